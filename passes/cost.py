"""Cost of every op: FLOPs, bytes moved, time.

Definitions.
    (1) FLOPs: torch's own formulas (`torch.utils.flop_counter`), a multiply-add being two. An op
        without a formula counts 0: its time is that of its memory traffic.
    (2) Bytes moved = elements that the op reads, each distinct tensor once, plus those it writes. An
        expanded dimension is read once. An op that gathers reads no more than it returns.
    (3) Time = max(FLOPs / rate, bytes / bandwidth) + launch: the roofline (Williams, Waterman and
        Patterson, 2009), with rate and bandwidth taken at the device's efficiency.
    (4) A view, an uninitialised tensor and arithmetic on sizes cost nothing.

`timed_costs` replaces the time by a measurement. Not described: caches, fusion, overlap of kernels,
causal masks (attention is counted in full, as torch does).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from statistics import median_low
from typing import Any

import sympy
import torch
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from remat.ir import UnsupportedGraphError

from .devices import Device
from .realize import (
    Call,
    TensorSpec,
    at,
    call_device,
    call_key,
    described,
    leaves,
    realized,
    specs,
)

aten = torch.ops.aten

_META = torch.device("meta")
_RUNS = 5
_GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select}
_UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
# Attention kernels whose arguments begin like those of one that torch has a formula for.
_COUNTED_AS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
    aten._scaled_dot_product_fused_attention_overrideable: (
        aten._scaled_dot_product_flash_attention
    ),
    aten._scaled_dot_product_fused_attention_overrideable_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one execution of an op."""

    flops: int
    """Floating-point operations; a multiply-add is two."""
    bytes: int
    """Bytes read and written."""
    time_ns: int
    """Nanoseconds."""


@dataclass(frozen=True, slots=True)
class _Execution:
    """A node's call with its result, described."""

    call: Call
    result: Any

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The tensors in the result."""
        return tuple(leaf for leaf in leaves(self.result) if isinstance(leaf, TensorSpec))

    @property
    def is_free(self) -> bool:
        """Whether no kernel runs."""
        packet = getattr(self.call.target, "overloadpacket", None)
        if packet is None and (not self.results or self.call.target is getitem):
            return True
        held = {spec.storage for spec in specs(self.call)}
        aliases = all(spec.storage in held for spec in self.results)
        is_view = aliases and getattr(self.call.target, "is_view", False)
        return is_view or packet in _UNINITIALISED


def costs(
    nodes: Sequence[torch.fx.Node],
    device: Device,
    binding: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Cost, ...]:
    """Predicted cost of every node.

    Args:
        nodes: call_function nodes, with fake tensors in ``meta["val"]`` of them and their arguments.
        device: where they are to run.
        binding: the integer of every symbol that occurs in a size.
    """
    return tuple(_cost(_execution(node, binding or {}), device) for node in nodes)


def timed_costs(
    nodes: Sequence[torch.fx.Node], binding: Mapping[sympy.Symbol, int] | None = None
) -> tuple[Cost, ...]:
    """Cost of every node, each distinct call timed once on the device that its tensors name.

    The time is the median of five runs after a first one. Takes real memory and real time.

    Raises:
        UnsupportedGraphError: if a call cannot be executed here.
    """
    timed: dict[tuple[Any, ...], int] = {}
    found: list[Cost] = []
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        for node in nodes:
            execution = _execution(node, binding or {})
            key = call_key(execution.call)
            if key not in timed:
                timed[key] = 0 if execution.is_free else _time_ns(execution.call)
            cost = Cost(_flops(execution), _bytes_moved(execution), timed[key])
            found.append(replace(cost, flops=0, bytes=0) if execution.is_free else cost)
    return tuple(found)


def _execution(node: torch.fx.Node, binding: Mapping[sympy.Symbol, int]) -> _Execution:
    """Description of a node at a binding; arguments and result share the numbering of storages."""

    def value(leaf: Any) -> Any:
        return leaf.meta["val"] if isinstance(leaf, torch.fx.Node) else leaf

    target: Any = node.target
    parts = tuple(map_aggregate(part, value) for part in (node.args, node.kwargs))
    whole = at(described(Call(target, (*parts, node.meta.get("val")))), binding)
    args, kwargs, result = whole.args
    return _Execution(Call(target, args, kwargs), result)


def _cost(execution: _Execution, device: Device) -> Cost:
    if execution.is_free:
        return Cost(0, 0, 0)
    flops, moved = _flops(execution), _bytes_moved(execution)
    rate = device.peak_flops[_arithmetic(execution)]
    busy = max(flops / rate, moved / device.bandwidth_bytes_per_s) / device.efficiency
    return Cost(flops, moved, round(1e9 * (busy + device.launch_s)))


def _arithmetic(execution: _Execution) -> str:
    """Type in which the op computes, as a key of `Device.peak_flops`."""
    for spec in (*specs(execution.call), *execution.results):
        name = str(spec.dtype).removeprefix("torch.")
        if name == "float32" and torch.get_float32_matmul_precision() != "highest":
            return "tf32"
        if name in ("float64", "float32", "bfloat16", "float16"):
            return name
    return "float32"


def _flops(execution: _Execution) -> int:
    """FLOPs by torch's formula; 0 where there is none."""
    packet: Any = getattr(execution.call.target, "overloadpacket", execution.call.target)
    formula = flop_registry.get(_COUNTED_AS.get(packet, packet))
    if formula is None:
        return 0
    shadow = realized(execution.call, _META)
    (result,) = realized(Call(packet, (execution.result,)), _META).args
    return int(formula(*shadow.args, **shadow.kwargs, out_val=result))


def _bytes_moved(execution: _Execution) -> int:
    """Bytes of the distinct argument elements that are read, and of the results."""
    written = sum(map(_extent, dict.fromkeys(execution.results)))
    arguments = list(dict.fromkeys(specs(execution.call)))
    read = [_extent(spec) for spec in arguments]
    if getattr(execution.call.target, "overloadpacket", None) in _GATHERS:
        read[0] = min(read[0], written)
    return sum(read) + written


def _extent(spec: TensorSpec) -> int:
    """Bytes of the distinct elements of a tensor."""
    shape: Any = spec.shape
    strides: Any = spec.strides
    if 0 in shape:
        return 0
    elements = prod(n for n, stride in zip(shape, strides, strict=True) if stride)
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return int(min(elements, span)) * spec.dtype.itemsize


def _time_ns(call: Call) -> int:
    """Median time of a call on real tensors, nanoseconds."""
    device = call_device(call)
    samples: list[int] = []
    try:
        ready = realized(call, device)
        for _ in range(_RUNS + 1):
            start = time.perf_counter_ns()
            ready.target(*ready.args, **ready.kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples.append(time.perf_counter_ns() - start)
    except Exception as error:
        raise UnsupportedGraphError(
            f"{call.target} cannot be timed on {device}: {error}"
        ) from error
    return median_low(samples[1:])
