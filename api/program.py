"""A planned step that can run: its graphs, and what is known beforehand of their inputs and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat.passes import Parts, Prepared, StepProtocol

from .spare import Spare, spare_of


@dataclass(frozen=True, slots=True)
class Interface:
    """What a call of the model has to do with a plan."""

    parameters: tuple[str, ...]
    """Name of each parameter input, in order."""
    buffers: tuple[str, ...]
    """Name of each buffer input, which follow."""
    output_pattern: object
    """The module's output with its tensors taken out; see `ir.structure`."""
    updates_state: bool
    """The step updates a buffer or an argument in place."""
    updates_arguments: bool
    """The step updates an argument in place."""
    checkpointed: bool
    """The model checkpoints parts of itself, which the plan runs once."""


def interface_of(prepared: Prepared) -> Interface:
    """The interface of a captured step."""
    captured = prepared.capture
    return Interface(
        captured.parameters,
        captured.buffers,
        captured.output_pattern,
        prepared.updates_state(),
        prepared.updates_arguments(),
        captured.checkpointed,
    )


@dataclass(frozen=True, slots=True)
class Program:
    """A planned step that can run."""

    parts: Parts
    results: tuple[bool, ...]
    """Per output tensor: it requires a gradient."""
    gradient_results: tuple[int, ...]
    """Output tensors that receive a gradient, in the order of the tangents."""
    view_of: Mapping[str, int]
    """Saved value that is a view of a primal -> position of that primal."""
    dropped: tuple[int, ...]
    """Output tensors that the caller has dropped when backward begins, says the protocol."""
    depends: Mapping[str, frozenset[int]]
    """Gradient target -> the tangents (by position) that it depends on."""
    position: Mapping[str, int]
    """Of every primal, by name."""
    parameters: tuple[tuple[int, ...], ...]
    """Per stage and gradient: position among the primals of the tensor it belongs to."""
    needed: tuple[tuple[int, ...], ...]
    """Per stage: positions of the primals that it reads, or reads a view of."""
    spare: Spare | None
    """Outputs that may receive a gradient for which the plan was not made; None if there are none."""


def make_program(parts: Parts, prepared: Prepared, protocol: StepProtocol) -> Program:
    """A program from the parts of a rewritten step."""
    captured = prepared.capture
    kept = () if prepared.loss is not None else captured.gradient_outputs
    outputs = () if protocol.outputs_held else range(parts.results)
    return program_of(
        parts,
        captured.requires_grad,
        captured.gradient_outputs,
        _views_of_primals(parts),
        tuple(i for i in outputs if i not in kept),
    )


def program_of(
    parts: Parts,
    results: tuple[bool, ...],
    gradient_results: tuple[int, ...],
    view_of: Mapping[str, int],
    dropped: tuple[int, ...],
) -> Program:
    """A program from its graphs and what they do not say; see `Program`."""
    position = {name: i for i, name in enumerate(parts.primals)}
    sources = position | dict(view_of)
    needed = tuple(
        tuple(sorted({sources[name] for name in stage.inputs if name in sources}))
        for stage in parts.stages
    )
    return Program(
        parts,
        results,
        gradient_results,
        view_of,
        dropped,
        depends=_tangents_behind(parts),
        position=position,
        parameters=tuple(tuple(position[t] for t in stage.gradients) for stage in parts.stages),
        needed=needed,
        spare=spare_of(
            parts, results, gradient_results, position, frozenset().union(*map(frozenset, needed))
        ),
    )


def _views_of_primals(parts: Parts) -> dict[str, int]:
    """Saved value -> position of the primal that it is a view of."""
    values = {node.name: node.meta.get("val") for node in parts.forward.graph.nodes}
    of = [values[name] for name in parts.primals]
    owner = {storage_of(t): i for i, t in enumerate(of) if isinstance(t, torch.Tensor)}
    found = {name: owner.get(storage_of(values[name]), -1) for name in parts.saved}
    return {name: i for name, i in found.items() if i >= 0 and same_kind(values[name], of[i])}


def same_kind(view: torch.Tensor, base: torch.Tensor) -> bool:
    """`view` differs from `base` in size, strides and offset only."""
    return (
        view.dtype == base.dtype
        and view.is_conj() == base.is_conj()
        and view.is_neg() == base.is_neg()
    )


def storage_of(tensor: torch.Tensor) -> int:
    """What two tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def _tangents_behind(parts: Parts) -> dict[str, frozenset[int]]:
    """Gradient target -> tangents that it depends on."""
    behind = {name: frozenset([i]) for i, name in enumerate(parts.tangents)}
    none: frozenset[int] = frozenset()
    found: dict[str, frozenset[int]] = {}
    for stage in parts.stages:
        for node in stage.module.graph.nodes:
            if node.op == "call_function":
                operands = (behind.get(operand.name, none) for operand in node.all_input_nodes)
                behind[node.name] = none.union(*operands)
        outputs: Any = stage.module.graph.output_node().args[0]
        for target, node in zip(stage.gradients, outputs, strict=False):
            found[target] = behind.get(node.name, none)
    return found
