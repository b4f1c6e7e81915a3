"""Running a planned step under autograd.

The forward graph runs once. Backward is a chain of autograd nodes: an entry, which takes the gradients
of the outputs, and one node for each stage, which runs its slice of the backward graph and returns the
gradients of its parameters. So gradients are accumulated, and hooks fire, while backward is going on:

    outputs <- entry <- stage 0 (parameters of stage 0) <- stage 1 (...) <- ...

Kept from eager: a tensor that backward needs and that was changed in place since forward raises; a
second backward raises unless the first one kept the graph; an output without a gradient gives None to
the parameters that only it depends on; double backward raises.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.ir import GuardError
from remat.ir._torch import DisableAutocast, keeps_graph
from remat.passes import Parts, Prepared


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
    parameters: tuple[int, ...]
    """Per stage gradient, flattened: position among the primals of the tensor it belongs to."""


def make_program(parts: Parts, prepared: Prepared) -> Program:
    """A program from the parts of a rewritten step."""
    captured = prepared.capture
    position = {name: i for i, name in enumerate(parts.primals)}
    return Program(
        parts=parts,
        results=captured.requires_grad,
        gradient_results=captured.gradient_outputs,
        depends=_tangents_behind(parts),
        parameters=tuple(position[t] for stage in parts.stages for t in stage.gradients),
    )


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


@dataclass(slots=True)
class Frame:
    """One forward whose backward may still come."""

    program: Program
    primals: dict[str, torch.Tensor]
    saved: dict[str, Any] | None
    versions: dict[str, int]
    outputs: list[tuple["weakref.ref[torch.Tensor]", int]]
    on_done: Callable[[], None]
    results: list[torch.Tensor] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()
    keep: bool = False
    done: bool = False

    def finish(self) -> None:
        """The forward is no longer outstanding."""
        if not self.done:
            self.done = True
            self.on_done()

    def __del__(self) -> None:
        """An abandoned forward is no longer outstanding either."""
        self.finish()


def run(
    program: Program, primals: Sequence[torch.Tensor], on_done: Callable[[], None]
) -> list[torch.Tensor]:
    """Run forward; returns the output tensors, with a history that runs backward.

    Args:
        program: the planned step.
        primals: parameters, buffers and arguments, in the order of the graph's inputs.
        on_done: called once, when backward has run or can run no more.
    """
    parts = program.parts
    named = dict(zip(parts.primals, primals, strict=True))
    with torch.no_grad(), DisableAutocast():
        made = parts.forward.forward(list(primals))
        first = len(parts.mutations)
        for target, new in zip(parts.mutations, made[:first], strict=True):
            named[target].copy_(new)
    results = list(made[first : first + parts.results])
    saved = dict(zip(parts.saved, made[first + parts.results :], strict=True))
    del made
    needed = {name for stage in parts.stages for name in stage.inputs if name in named}
    frame = Frame(
        program,
        {name: t for name, t in named.items() if name in needed},
        saved,
        {name: named[name]._version for name in parts.primals if name in needed},
        [],
        on_done,
    )
    tracked = [i for i, grad in enumerate(program.results) if grad]
    frame.results = [_own(results[i]) for i in tracked]
    token: torch.Tensor | None = None
    position = len(program.parameters)
    for number in reversed(range(len(parts.stages))):
        count = len(parts.stages[number].gradients)
        inputs = [primals[i] for i in program.parameters[position - count : position]]
        position -= count
        token = _Stage.apply(frame, number, token, *inputs)  # type: ignore[no-untyped-call]
    del saved
    with_history = _Entry.apply(frame, token)  # type: ignore[no-untyped-call]
    for i, tensor in zip(tracked, with_history, strict=True):
        results[i] = tensor
        if _shares_saved(tensor, frame):
            frame.outputs.append((weakref.ref(tensor), tensor._version))
    return results


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, not known as a view, so that the caller may change it in place as in eager."""
    return (
        torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if tensor._is_view() else tensor
    )


def _shares_saved(tensor: torch.Tensor, frame: Frame) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(
        isinstance(other, torch.Tensor) and other.untyped_storage()._cdata == storage
        for other in (frame.saved or {}).values()
    )


def _check_versions(frame: Frame, names: Sequence[str]) -> None:
    for name in names:
        expected = frame.versions.get(name)
        if expected is not None and frame.primals[name]._version != expected:
            tensor = frame.primals[name]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {tensor.dtype} {list(tensor.shape)} is at version {tensor._version}; "
                f"expected version {expected} instead. It was changed between forward and backward."
            )


class _Entry(torch.autograd.Function):
    """Takes the gradients of the outputs; frees nothing and computes nothing."""

    @staticmethod
    def forward(ctx: Any, frame: Frame, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.frame = frame
        results, frame.results = frame.results, []
        ctx.like = [(r.shape, r.dtype, r.device) for r in results]
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, torch.Tensor]:
        frame: Frame = ctx.frame
        if frame.saved is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time. Saved intermediate values of the "
                "graph are freed when you call .backward() or autograd.grad(). Specify "
                "retain_graph=True if you need to backward through the graph a second time."
            )
        for output, version in frame.outputs:
            tensor = output()
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: an output of shape {list(tensor.shape)} is at version "
                    f"{tensor._version}; expected version {version} instead."
                )
        frame.keep = keeps_graph()
        frame.env = dict(frame.saved) | _tangents(frame, ctx.like, gradients)
        if not frame.keep:
            frame.saved = None
        return None, torch.empty(0)


def _tangents(
    frame: Frame, like: Sequence[Any], gradients: Sequence[torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Tangents by name; zeros where an output got no gradient."""
    program = frame.program
    tracked = [i for i, grad in enumerate(program.results) if grad]
    tangents: dict[str, torch.Tensor] = {}
    missing: list[int] = []
    for i, (shape, dtype, device), gradient in zip(tracked, like, gradients, strict=True):
        if i not in program.gradient_results:
            if gradient is not None:
                raise GuardError(
                    f"output tensor {i} received a gradient, but the plan was made for gradients of "
                    f"{list(program.gradient_results)} only. Pass "
                    'protocol=StepProtocol(gradient_outputs="all") to optimize_checkpoints.'
                )
            continue
        tangent = program.gradient_results.index(i)
        if gradient is None:
            missing.append(tangent)
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        tangents[program.parts.tangents[tangent]] = gradient
    frame.missing = frozenset(missing)
    return tangents


class _Stage(torch.autograd.Function):
    """Runs one stage of backward and returns the gradients of its parameters."""

    @staticmethod
    def forward(
        ctx: Any, frame: Frame, number: int, token: torch.Tensor | None, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.frame, ctx.number = frame, number
        return torch.empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:
        frame: Frame = ctx.frame
        stage = frame.program.parts.stages[ctx.number]
        _check_versions(frame, stage.inputs)
        env = frame.env
        inputs = []
        for name, drop in zip(stage.inputs, stage.dropped, strict=True):
            if name in frame.primals:
                inputs.append(frame.primals[name])
            else:
                inputs.append(env.pop(name) if drop else env[name])
        with torch.no_grad(), DisableAutocast():
            made = list(stage.module.forward(inputs))
        count = len(stage.gradients)
        env.update(zip(stage.kept, made[count:], strict=True))
        del made[count:]
        depends = frame.program.depends
        for i, target in enumerate(stage.gradients):
            if frame.missing and depends[target] <= frame.missing:
                made[i] = None
        if ctx.number < len(frame.program.parts.stages) - 1:
            return (None, None, token, *made)
        env.clear()
        if not frame.keep:
            frame.primals = {}
            frame.finish()
        return (None, None, None, *made)
