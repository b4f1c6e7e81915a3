"""Scratch: the bytes that a kernel allocates and frees inside one op.

Definition. With e_1 ... e_n the changes of the allocator's level during the op, in order (positive:
allocated, negative: freed), scratch = max over k of (e_1 + ... + e_k), at least 0, minus
(e_1 + ... + e_n): the peak inside the op, beyond the storages that it leaves behind.

No formula is known for most kernels, and fake tensors never show scratch, so each distinct call is
executed on real tensors and the allocator is asked: on CPU by the allocation events of
`torch.profiler`, on CUDA by the allocator's own maximum (the second time, when the libraries have
their workspaces; on CPU both times gave the same events in each of 800 calls tried). Only views are
not executed: all their results are parts of an argument.

Figures depend on the number of threads (CPU attention), so they hold for the present
`torch.get_num_threads()`. Values of tensors are not known: floats are ones, all others zeros (see
`realize`). A call that has no real counterpart here (no such device, unbound size, more than
`limit_bytes`, an error) is reported as unknown with 0 bytes, never guessed.

Not measured: memory that a library maps itself without asking torch's allocator. Must not be called
inside a dispatch mode or another profile.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from operator import getitem
from typing import Any

import sympy
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .realize import (
    Call,
    at,
    call_device,
    call_key,
    described,
    flat_tensors,
    realized,
    specs,
    tensors_of,
)

__all__ = ["Call", "Origin", "Scratch", "described", "measure_scratch"]

_MARK = "remat: call "
_CPU = torch.device("cpu")
_META = torch.device("meta")
_measured: dict[tuple[Any, ...], "Scratch"] = {}


class Origin(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    FORMULA = "formula"
    FITTED = "fitted"
    RESERVED = "reserved"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one call beyond its arguments."""

    bytes: int
    """Peak inside the op, beyond the new storages that it returns."""
    outputs: tuple[int, ...]
    """Bytes of the storage of each tensor in the flattened result; 0 for what is no tensor.

    Empty if the origin is `UNKNOWN`.
    """
    origin: Origin


def measure_scratch(
    calls: Sequence[Call],
    binding: Mapping[sympy.Symbol, int] | None = None,
    limit_bytes: int = 2**32,
) -> tuple[Scratch, ...]:
    """Scratch of every call; each distinct one is executed at most once in a process.

    Args:
        calls: calls on fake, `meta` or real tensors, or already described ones.
        binding: the integer of every symbol that occurs in a size.
        limit_bytes: a call whose arguments and results take more is not executed.
    """
    concrete = [_concrete(call, binding or {}) for call in calls]
    keys = [_key(call) if call else None for call in concrete]
    missing = {
        key: call
        for key, call in zip(keys, concrete, strict=True)
        if key and call and key not in _measured
    }
    found = _execute(missing, limit_bytes) if missing else {}
    _measured.update({k: v for k, v in found.items() if v.origin is not Origin.UNKNOWN})
    known = {**_measured, **found}
    return tuple(known[key] if key else _unknown() for key in keys)


def _unknown() -> Scratch:
    return Scratch(0, (), Origin.UNKNOWN)


def _concrete(call: Call, binding: Mapping[sympy.Symbol, int]) -> Call | None:
    """Description of `call` without symbols; None if there is none."""
    try:
        return at(described(call), binding)
    except (TypeError, RuntimeError, NotImplementedError):  # unbound symbol; no strided storage
        return None


def _key(call: Call) -> tuple[Any, ...]:
    return (torch.get_num_threads(), *call_key(call))


def _execute(
    calls: Mapping[tuple[Any, ...], Call], limit_bytes: int
) -> dict[tuple[Any, ...], Scratch]:
    """Scratch of every call, found anew."""
    found: dict[tuple[Any, ...], Scratch] = {}
    on_cpu: dict[tuple[Any, ...], Call] = {}
    with warnings.catch_warnings(), torch.no_grad(), _random_state_kept():
        warnings.simplefilter("ignore")
        for key, call in calls.items():
            device = call_device(call)
            if view := _as_view(call):
                found[key] = view
            elif _bytes_needed(call) > limit_bytes:
                found[key] = _unknown()
            elif device.type == "cpu":
                on_cpu[key] = call
            else:
                found[key] = _measure_cuda(call, device)
        if on_cpu:
            results = _measure_cpu(list(on_cpu.values()))
            found.update(zip(on_cpu, results, strict=True))
    return found


def _random_state_kept() -> AbstractContextManager[None]:
    """Context that leaves the generators' states as they were."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


def _as_view(call: Call) -> Scratch | None:
    """Figures of a call that only returns parts of its arguments; None if it may do more."""
    is_view = getattr(call.target, "is_view", None)  # only an OpOverload has it
    if is_view is None and not specs(call):
        return Scratch(0, (0,), Origin.FORMULA)  # arithmetic on sizes
    if call.target is not getitem and not is_view:
        return None
    shadow = realized(call, _META)
    sizes = {t.untyped_storage(): t.untyped_storage().nbytes() for t in tensors_of(shadow)}
    try:
        results = flat_tensors(shadow.target(*shadow.args, **shadow.kwargs))
        outputs = tuple(0 if t is None else sizes[t.untyped_storage()] for t in results)
    except Exception:  # `reshape` had to copy, or there is no meta kernel
        return None
    return Scratch(0, outputs, Origin.FORMULA)


def _bytes_needed(call: Call) -> int:
    """Bytes of the arguments, and of the results where they are known without executing."""
    storages = {spec.storage: int(spec.storage_bytes) for spec in specs(call)}
    shadow = realized(call, _META)
    try:
        results = flat_tensors(shadow.target(*shadow.args, **shadow.kwargs))
    except Exception:  # no meta kernel
        results = ()
    return sum(storages.values()) + sum(_storage_bytes(results))


def _storage_bytes(results: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if t is None else t.untyped_storage().nbytes() for t in results)


def _measure_cpu(calls: Sequence[Call]) -> list[Scratch]:
    """Execute every call under one profile."""
    outputs: list[tuple[int, ...] | None] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        for number, call in enumerate(calls):
            outputs.append(_run_marked(call, f"{_MARK}{number}"))
    changes = _changes_by_mark(record)
    return [
        _unknown() if sizes is None else Scratch(_scratch(changes[number]), sizes, Origin.MEASURED)
        for number, sizes in enumerate(outputs)
    ]


def _run_marked(call: Call, mark: str) -> tuple[int, ...] | None:
    """Bytes of the results' storages; None if the op raises."""
    try:
        ready = realized(call, _CPU)
        with record_function(mark):
            result = ready.target(*ready.args, **ready.kwargs)
    except Exception:  # whatever the kernel refuses: ones and zeros are not valid for every op
        return None
    return _storage_bytes(flat_tensors(result))


def _changes_by_mark(record: profile) -> dict[int, list[int]]:
    """Changes of the allocator's level during each marked call, in order of time."""
    changes: dict[int, list[int]] = {}
    current: list[int] = []
    end = 0
    profiler: Any = record.profiler
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith(_MARK):
            current = changes.setdefault(int(event.name().removeprefix(_MARK)), [])
            end = event.start_ns() + event.duration_ns()
        elif event.name() == "[memory]" and event.start_ns() <= end:
            current.append(event.nbytes())
    return changes


def _scratch(changes: Sequence[int]) -> int:
    """Peak of the running sum, beyond what is left at the end."""
    return max(accumulate(changes, initial=0)) - sum(changes)


def _measure_cuda(call: Call, device: torch.device) -> Scratch:
    """Execute one call on a CUDA device; unknown if that is not possible."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _unknown()
    try:
        ready = realized(call, device)
        ready.target(*ready.args, **ready.kwargs)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = flat_tensors(ready.target(*ready.args, **ready.kwargs))
        torch.cuda.synchronize(device)
    except Exception:  # out of memory, or arguments that the kernel refuses
        return _unknown()
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return Scratch(peak, _storage_bytes(result), Origin.MEASURED)
