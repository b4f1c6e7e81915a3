"""A planned step that can run: its graphs, and what is known beforehand of their inputs and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat.passes import Parts, Prepared, StepProtocol


@dataclass(frozen=True, slots=True)
class Program:
    """A planned step that can run."""

    parts: Parts
    results: tuple[bool, ...]
    """Per output tensor: it requires a gradient."""
    gradient_results: tuple[int, ...]
    """Output tensors that receive a gradient, in the order of the tangents."""
    depends: Mapping[str, frozenset[int]]
    """Gradient target -> the tangents (by position) that it depends on."""
    parameters: tuple[tuple[int, ...], ...]
    """Per stage and gradient: position among the primals of the tensor it belongs to."""
    position: Mapping[str, int]
    """Of every primal, by name."""
    view_of: Mapping[str, int]
    """Saved value that is a view of a primal -> position of that primal."""
    needed: tuple[tuple[int, ...], ...]
    """Per stage: positions of the primals that it reads, or reads a view of."""
    dropped: tuple[int, ...]
    """Output tensors that the caller has dropped when backward begins, says the protocol."""


def make_program(parts: Parts, prepared: Prepared, protocol: StepProtocol) -> Program:
    """A program from the parts of a rewritten step."""
    captured = prepared.capture
    position = {name: i for i, name in enumerate(parts.primals)}
    kept = () if prepared.loss is not None else captured.gradient_outputs
    outputs = () if protocol.outputs_held else range(parts.results)
    view_of = _views_of_primals(parts)
    sources = position | view_of
    return Program(
        parts=parts,
        results=captured.requires_grad,
        gradient_results=captured.gradient_outputs,
        depends=_tangents_behind(parts),
        parameters=tuple(tuple(position[t] for t in stage.gradients) for stage in parts.stages),
        position=position,
        view_of=view_of,
        needed=tuple(
            tuple(sorted({sources[name] for name in stage.inputs if name in sources}))
            for stage in parts.stages
        ),
        dropped=tuple(i for i in outputs if i not in kept),
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
    behind: dict[str, frozenset[int]] = {
        name: frozenset([i]) for i, name in enumerate(parts.tangents)
    }
    for node in parts.backward.graph.nodes:
        if node.op == "call_function":
            behind[node.name] = frozenset().union(
                *(behind.get(operand.name, frozenset()) for operand in node.all_input_nodes)
            )
    targets = [target for stage in parts.stages for target in stage.gradients]
    outputs: Any = parts.backward.graph.output_node().args[0]
    names = {target: node.name for target, node in zip(parts.gradients, outputs, strict=True)}
    return {target: behind.get(names[target], frozenset()) for target in targets}
