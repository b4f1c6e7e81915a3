"""Out of memory in a planned step: one message that lays the plan beside the allocator's state.

The error that is raised has the type of the one that torch raised, so that code which catches that still
does. What the failed call had allocated is released when the error is raised, not when it is forgotten: the
frames that it has left are cleared.

Not handled: an optimizer step that runs out of memory, which is not called by us; a process that the
operating system kills.
"""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from remat.passes import Plan

from .budget import in_units
from .stats import Stats

OURS = "remat: out of memory"
ON_CPU = "DefaultCPUAllocator: can't allocate memory"
SLACK = 0.02
"""Fraction of the plan's peak that the process may hold beyond it without being suspected."""
CONTEXT = 10**9
"""Bytes that a CUDA context and its libraries may take, about."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory of a device when an allocation failed, bytes; None: not known."""

    requested: int | None
    """By the allocation that failed."""
    free: int | None
    """On the device, for whoever asks."""
    total: int | None
    """Of the device."""
    allocated: int | None = None
    """In tensors of this process."""
    reserved: int | None = None
    """By torch's allocator for this process, `allocated` included."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a drop-in knows of the step that failed."""

    phase: str
    plan: Plan
    outstanding: int
    """Forwards whose backward has not run, beside this one."""
    other_optimizer: str
    """Name of an optimizer that steps instead of the one planned for; empty if none does."""
    unplanned: str
    """Why the failed call ran the original forward; empty if it ran the plan."""


def is_out_of_memory(error: BaseException) -> bool:
    """Torch could not allocate a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or ON_CPU in str(error)


@contextlib.contextmanager
def out_of_memory_explained(
    circumstances: Callable[[], Circumstances | None], stats: Stats
) -> Iterator[None]:
    """Run one part of a step; if it runs out of memory, say what was planned, what is, and why it may be.

    Args:
        circumstances: of the step; None if there is no plan to compare with.
        stats: of the drop-in.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error) or str(error).startswith(OURS):
            raise
        found = circumstances()
        if found is None:
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what the call had allocated
        state = memory_state(found.plan.device, str(error))
        raise type(error)(explanation(found, stats, state, str(error))) from error


def memory_state(device: str, error: str) -> MemoryState:
    """The state now, after an allocation failed with this message."""
    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return cuda_state(torch.cuda.memory_stats(device), free, total, error)
    return host_state(_meminfo(), error)


def cuda_state(stats: Mapping[str, int], free: int, total: int, error: str) -> MemoryState:
    """The state by `torch.cuda.memory_stats` and `torch.cuda.mem_get_info`."""
    return MemoryState(
        requested(error),
        free,
        total,
        stats.get("allocated_bytes.all.current"),
        stats.get("reserved_bytes.all.current"),
    )


def host_state(meminfo: Mapping[str, int], error: str) -> MemoryState:
    """The state of the host by ``/proc/meminfo``; what is in tensors is not known there."""
    return MemoryState(requested(error), meminfo.get("MemAvailable"), meminfo.get("MemTotal"))


def requested(error: str) -> int | None:
    """Bytes that the failed allocation asked for, by torch's message."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)", error)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _meminfo() -> dict[str, int]:
    path = Path("/proc/meminfo")
    if not path.exists():
        return {}
    rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def explanation(found: Circumstances, stats: Stats, state: MemoryState, error: str) -> str:
    """The message: prediction, state, likely causes, and what torch said."""
    plan = found.plan
    what = "a training call without a plan" if found.unplanned else f"the planned {found.phase}"
    lines = [
        f"{OURS} in {what}.",
        f"  plan: peak {in_units(plan.peak_bytes)} under a budget of {in_units(plan.budget_bytes)}, of "
        f"which {in_units(plan.resident_bytes)} are there before the step; eager would take "
        f"{in_units(plan.baseline_peak_bytes)}",
        f"  {plan.device}: {_state_text(state)}",
        *(f"  likely cause: {cause}" for cause in causes(found, stats, state)),
        f"  torch: {error.splitlines()[0] if error else 'no message'}",
    ]
    return "\n".join(lines)


def _state_text(state: MemoryState) -> str:
    known = [
        (state.allocated, "in tensors"),
        (state.reserved, "reserved by torch"),
        (state.free, "free"),
        (state.total, "in all"),
    ]
    parts = [f"{in_units(size)} {name}" for size, name in known if size is not None]
    asked = f"; asked for {in_units(state.requested)} more" if state.requested else ""
    return (", ".join(parts) or "nothing is known") + asked


def causes(found: Circumstances, stats: Stats, state: MemoryState) -> list[str]:
    """What likely filled the device, the surest first."""
    plan, asked = found.plan, state.requested or 0
    causes: list[str] = []
    if found.unplanned:
        causes.append(
            f"this call ran the original forward, which no budget caps: {found.unplanned}. Plan for the "
            "largest batch, or name its size in dynamic"
        )
    if state.allocated is not None and state.reserved is not None:
        unused = state.reserved - state.allocated
        if unused >= max(asked, 1):
            causes.append(
                f"fragmentation: {in_units(unused)} are reserved and unused, but in no piece that is large "
                "enough. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
        excess = state.allocated + asked - plan.peak_bytes
        if excess > SLACK * plan.peak_bytes:
            causes.append(
                f"this process holds {in_units(excess)} more than the plan: another model, outputs or losses "
                "that are kept from earlier steps. Count it with StepProtocol(other_bytes=...)"
            )
    if state.total is not None and state.free is not None and state.reserved is not None:
        others = state.total - state.free - state.reserved
        if others > CONTEXT:
            causes.append(f"other processes hold {in_units(others)} of the device")
    planned_for = plan.protocol.forwards_outstanding
    if found.outstanding + 1 > planned_for:
        causes.append(
            f"{found.outstanding + 1} forwards are outstanding, planned for {planned_for}: "
            f"StepProtocol(forwards_outstanding={found.outstanding + 1})"
        )
    if found.other_optimizer:
        causes.append(f"{found.other_optimizer} steps, and {plan.optimizer} was planned for")
    if stats.fallbacks and not found.unplanned:
        causes.append(
            f"{sum(stats.fallbacks.values())} earlier calls ran the original forward; what they left "
            "reserved may be in the way"
        )
    if state.total is not None and plan.budget_bytes > state.total:
        causes.append(f"the budget is above the {in_units(state.total)} of the device: lower it")
    elif state.reserved is None and state.free is not None and state.free < plan.peak_bytes:
        causes.append("other processes, or what this one holds beside the step, fill the host")
    return causes or [
        "not known: a limit on the process (ulimit, a container), or a defect of the plan"
    ]
