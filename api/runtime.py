"""Running a planned step under autograd.

The forward graph runs once. Backward is a chain of autograd nodes: an entry, which takes the gradients
of the outputs, and one node for each stage, which runs its slice of the backward graph and returns the
gradients of its parameters. So gradients are accumulated, and hooks fire, while backward is going on:

    outputs <- entry <- stage 0 (parameters of stage 0) <- stage 1 (...) <- ...

All that backward needs is saved the way autograd saves it (`save_for_backward`), so its promises hold:
a tensor that backward needs and that was changed in place since forward raises, a second backward
raises unless the first one kept the graph, and saved-tensor hooks see what is saved. An output without
a gradient gives None to the parameters that only it depends on; double backward raises.

Not as in eager: a tensor that only a recomputation reads must not be changed either. If several outputs
receive gradients and one does not, its part of backward runs on zeros.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from remat.ir import GuardError
from remat.ir._torch import DisableAutocast, keeps_graph, queue_callback
from remat.passes import Stage

from .program import Program, same_kind, storage_of


@dataclass(frozen=True, slots=True)
class _View:
    """A saved value that is made again as a view of a tensor that autograd saves."""

    of: int
    """Position of that tensor, among the tracked outputs or the primals."""
    layout: tuple[int, ...]
    """Strides of that tensor."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements from the first one of that tensor to the first one of the view."""

    def again(self, tensor: torch.Tensor) -> torch.Tensor:
        """The saved value. A saved-tensor hook may have put the tensor elsewhere, in other strides."""
        base = tensor.detach()
        if base.stride() != self.layout:
            base = torch.empty_strided(
                base.shape, self.layout, dtype=base.dtype, device=base.device
            ).copy_(base)
        offset = int(base.storage_offset()) + self.offset
        return base.as_strided(self.size, self.stride, offset)


class Listener(Protocol):
    """Whoever runs the program, and wants to know."""

    def begun(self) -> None:
        """A forward has run whose backward may come; called once for each forward."""

    def done(self) -> None:
        """A backward has run, or can run no more; called once for each forward."""

    def held(self, count: int, size: int) -> None:
        """The caller holds outputs that the protocol says it drops: their number and bytes."""

    def given(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward begins: the gradients of the outputs that have a history."""

    def made(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """A stage has run; what it is about to deliver."""

    def running(self, phase: str) -> AbstractContextManager[None]:
        """Context in which a graph runs."""


@dataclass(slots=True)
class Frame:
    """One forward whose backward may still come."""

    program: Program
    listener: Listener
    saved: list[str] = field(default_factory=list)
    """Names of the values that the entry saves, in order."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Sizes that backward reads, by name."""
    of_outputs: dict[str, _View] = field(default_factory=dict)
    of_primals: dict[str, _View] = field(default_factory=dict)
    returned: list["weakref.ref[torch.Tensor]"] = field(default_factory=list)
    """Outputs that the caller should have dropped when backward begins."""
    env: dict[str, Any] = field(default_factory=dict)
    """While backward runs: values by name."""
    missing: frozenset[int] = frozenset()
    keep: bool = False
    done: bool = False

    def finish(self) -> None:
        """The forward is no longer outstanding."""
        self.env = {}
        if not self.done:
            self.done = True
            self.listener.done()

    def __del__(self) -> None:
        """An abandoned forward is no longer outstanding either."""
        self.finish()


def run(
    program: Program, primals: Sequence[torch.Tensor], listener: Listener
) -> list[torch.Tensor]:
    """Run forward; returns the output tensors, with a history that runs backward.

    Args:
        program: the planned step.
        primals: parameters, buffers and arguments, in the order of the graph's inputs.
        listener: hears when the forward becomes outstanding, and when it no longer is.
    """
    parts = program.parts
    with torch.no_grad(), DisableAutocast(), listener.running("forward"):
        made = parts.forward.forward(list(primals))
        first = len(parts.mutations)
        named = dict(zip(parts.primals, primals, strict=True))
        for target, new in zip(parts.mutations, made[:first], strict=True):
            named[target].copy_(new)
    results = list(made[first : first + parts.results])
    kept = dict(zip((*parts.saved, *parts.numbers), made[first + parts.results :], strict=True))
    numbers = {name: kept.pop(name) for name in parts.numbers}
    saved = kept
    del made, named, kept
    tracked = [i for i, grad in enumerate(program.results) if grad]
    outputs = [_own(results[i]) for i in tracked]
    frame = Frame(program, listener, numbers=numbers)
    listener.begun()
    frame.of_primals = {
        name: _view(i, primals[i], saved.pop(name)) for name, i in program.view_of.items()
    }
    shared = {storage_of(t): i for i, t in reversed(list(enumerate(outputs)))}
    of_output = {name: shared.get(storage_of(value), -1) for name, value in saved.items()}
    frame.of_outputs = {
        name: _view(i, outputs[i], saved.pop(name))
        for name, i in of_output.items()
        if i >= 0 and same_kind(saved[name], outputs[i])
    }
    frame.saved = list(saved)
    token: torch.Tensor | None = None
    for number in reversed(range(len(parts.stages))):
        inputs = [primals[i] for i in program.parameters[number]]
        needed = [primals[i] for i in program.needed[number]]
        token = _Stage.apply(frame, number, needed, token, *inputs)  # type: ignore[no-untyped-call]
    box = [outputs, list(saved.values())]
    del outputs, saved
    with_history = _Entry.apply(frame, box, token)  # type: ignore[no-untyped-call]
    alias = {id(tensor): i for i, tensor in zip(tracked, with_history, strict=True)}
    for i, tensor in enumerate(results):  # an output that is another one, detached
        if i not in tracked and id(tensor) in alias:
            results[i] = tensor.detach()
    for i, tensor in zip(tracked, with_history, strict=True):
        results[i] = tensor
    frame.returned = [weakref.ref(results[i]) for i in program.dropped]
    return results


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, not known as a view, so that the caller may change it in place as in eager."""
    return (
        torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if tensor._is_view() else tensor
    )


def _view(of: int, base: torch.Tensor, tensor: torch.Tensor) -> _View:
    """How to make a saved value again.

    What shares memory with an output or a primal is made again from that, which autograd saves: so a
    change of it is noticed, and no saved value keeps an output, its history and thereby itself alive.
    """
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    return _View(of, base.stride(), tensor.shape, tensor.stride(), offset)


class _Entry(torch.autograd.Function):
    """Takes the gradients of the outputs, and hands out what is saved; computes nothing."""

    @staticmethod
    def forward(ctx: Any, frame: Frame, box: list[Any], token: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.frame = frame
        outputs, kept = box
        box.clear()
        ctx.like = [(r.shape, r.dtype, r.device) for r in outputs]
        ctx.shared = sorted({view.of for view in frame.of_outputs.values()})
        ctx.save_for_backward(*kept, *(outputs[i] for i in ctx.shared))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, torch.Tensor]:
        frame: Frame = ctx.frame
        frame.keep = keeps_graph()
        tensors = ctx.saved_tensors
        _check_dropped(frame)
        # However much of backward is asked for, nothing is left over when it ends.
        queue_callback(frame.finish if not frame.keep else frame.env.clear)
        count = len(frame.saved)
        shared = dict(zip(ctx.shared, tensors[count:], strict=True))
        frame.env = dict(zip(frame.saved, tensors[:count], strict=True)) | frame.numbers
        frame.env |= {name: view.again(shared[view.of]) for name, view in frame.of_outputs.items()}
        frame.env |= _tangents(frame, ctx.like, gradients)
        frame.listener.given(gradients)
        return None, None, torch.empty(0)


def _check_dropped(frame: Frame) -> None:
    """Report outputs that the caller keeps, unlike the protocol says."""
    held = [tensor for output in frame.returned if (tensor := output()) is not None]
    if held and not frame.keep:  # what keeps the graph keeps what the loss has saved, too
        frame.listener.held(len(held), sum(tensor.nbytes for tensor in held))


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
        ctx: Any,
        frame: Frame,
        number: int,
        needed: list[torch.Tensor],
        token: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.frame, ctx.number = frame, number
        ctx.save_for_backward(*needed)
        return torch.empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:
        frame: Frame = ctx.frame
        parts = frame.program.parts
        stage = parts.stages[ctx.number]
        depends = frame.program.depends
        try:
            with frame.listener.running("backward"):
                made = _run_stage(frame, stage, ctx.number, list(ctx.saved_tensors))
            for i, target in enumerate(stage.gradients):
                if frame.missing and depends[target] <= frame.missing:
                    made[i] = None
            frame.listener.made(ctx.number, made)
        except BaseException:
            frame.finish()  # torch does not call back after an error
            raise
        last = ctx.number == len(parts.stages) - 1
        return (None, None, None, None if last else token, *made)


def _run_stage(frame: Frame, stage: Stage, number: int, primals: list[torch.Tensor]) -> list[Any]:
    """Gradients of a stage; what later stages need is left in the frame."""
    program, env, views = frame.program, frame.env, frame.of_primals
    found = dict(zip(program.needed[number], primals, strict=True))
    primals.clear()
    inputs = []
    for name, drop in zip(stage.inputs, stage.dropped, strict=True):
        if name in views:
            inputs.append(views[name].again(found[views[name].of]))
        elif name in program.position:
            inputs.append(found[program.position[name]])
        else:
            inputs.append(env.pop(name) if drop else env[name])
    del found
    with torch.no_grad(), DisableAutocast():
        made = list(stage.module.forward(inputs))
    count = len(stage.gradients)
    env.update(zip(stage.kept, made[count:], strict=True))
    del made[count:]
    return made
