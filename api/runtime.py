"""Running a planned step under autograd.

The forward graph runs once. Backward is a chain of autograd nodes: an entry, which takes the gradients
of the outputs, and one node for each stage, which runs its slice of the backward graph and returns the
gradients of its parameters. So gradients are accumulated, and hooks fire, while backward is going on:

    outputs <- entry <- stage 0 (parameters of stage 0) <- stage 1 (...) <- ...

All that backward needs is saved the way autograd saves it (`save_for_backward`), so its promises hold:
a tensor that backward needs and that was changed in place since forward raises, a second backward
raises unless the first one kept the graph, and saved-tensor hooks see what is saved. An output without
a gradient gives None to the parameters that only it depends on; `create_graph=True` raises.

A gradient of an output that the plan was not made for: the entry has eager compute all gradients (`rerun`),
and the stages deliver those.

Not as in eager: a tensor that only a recomputation reads must not be changed either. If several outputs
receive gradients and one does not, its part of backward runs on zeros.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from remat.ir._torch import DisableAutocast
from remat.passes import Stage

from .apart import Apart
from .pending import Frame, Listener, given_of, view
from .program import Program, same_kind, storage_of
from .rerun import Rerun, unplanned


def run(
    program: Program,
    primals: Sequence[torch.Tensor],
    listener: Listener,
    rerun: Rerun | None = None,
) -> list[torch.Tensor]:
    """Run forward; returns the output tensors, with a history that runs backward.

    Args:
        program: the planned step.
        primals: parameters, buffers and arguments, in the order of the graph's inputs.
        listener: hears when the forward becomes outstanding, and when it no longer is.
        rerun: for backwards that the plan was not made for; None: they raise.
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
    outputs = {i: _own(results[i]) for i, grad in enumerate(program.results) if grad}
    frame = Frame(program, listener, rerun, numbers=numbers)
    listener.begun()
    frame.of_primals = {
        name: view(i, primals[i], saved.pop(name)) for name, i in program.view_of.items()
    }
    shared = {storage_of(t): i for i, t in reversed(outputs.items())}
    of_output = {name: shared.get(storage_of(value), -1) for name, value in saved.items()}
    frame.of_outputs = {
        name: view(i, outputs[i], saved.pop(name))
        for name, i in of_output.items()
        if i >= 0 and same_kind(saved[name], outputs[i])
    }
    frame.saved = list(saved)
    box = [outputs, list(saved.values())]
    del outputs, saved
    found = _with_history(frame, box, primals)
    alias = {id(tensor) for tensor in found.values()}
    for i, tensor in enumerate(results):  # an output that is another one, detached
        if i not in found and id(tensor) in alias:
            results[i] = tensor.detach()
    for i, tensor in found.items():
        results[i] = tensor
    frame.returned = [weakref.ref(results[i]) for i in program.dropped]
    return results


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, not known as a view, so that the caller may change it in place as in eager."""
    return (
        torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if tensor._is_view() else tensor
    )


def _with_history(
    frame: Frame, box: list[Any], primals: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The outputs, by position, at the end of the chain of nodes.

    Args:
        frame: of the forward.
        box: outputs, and values that backward needs; emptied.
        primals: of the forward.
    """
    program = frame.program
    spare = program.spare if frame.rerun is not None else None
    if spare is not None:
        frame.alone = tuple([i for i in spare.primals if primals[i].requires_grad])
    apart = spare.outputs if spare is not None and frame.alone else ()
    token: torch.Tensor | None = None
    for number in reversed(range(len(program.parts.stages))):
        inputs = [primals[i] for i in program.parameters[number]]
        needed = [primals[i] for i in program.needed[number]]
        token = _Stage.apply(frame, number, needed, token, *inputs)  # type: ignore[no-untyped-call]
    others = [box[0][i] for i in apart]
    by_entry = [i for i in box[0] if i not in apart]
    made = _Entry.apply(frame, box, by_entry, token)  # type: ignore[no-untyped-call]
    found = dict(zip(by_entry, made, strict=False))
    if apart:
        alone = [primals[i] for i in frame.alone]
        made = Apart.apply(frame, others, apart, made[-1], *alone)  # type: ignore[no-untyped-call]
        found |= zip(apart, made, strict=True)
    return found


class _Entry(torch.autograd.Function):
    """Takes the gradients of the outputs, and hands out what is saved; computes nothing by itself.

    If some outputs are apart, it returns one tensor more, which connects their node with it.
    """

    @staticmethod
    def forward(
        ctx: Any, frame: Frame, box: list[Any], which: Sequence[int], token: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.frame, ctx.which = frame, which
        outputs, kept = box
        box.clear()
        ctx.like = {
            i: (outputs[i].shape, outputs[i].dtype, outputs[i].device)
            for i in frame.program.gradient_results
        }
        ctx.shared = sorted({view.of for view in frame.of_outputs.values()})
        # An output of another node would keep that node, and thereby itself, alive.
        shared = [outputs[i] if i in which else outputs[i].detach() for i in ctx.shared]
        ctx.save_for_backward(*kept, *shared)
        link = () if len(which) == len(outputs) else (torch.empty(0),)
        return (*[outputs[i] for i in which], *link)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        frame: Frame = ctx.frame
        tensors = ctx.saved_tensors
        frame.begin(anew=all(gradient is None for gradient in gradients[len(ctx.which) :]))
        _check_dropped(frame)
        given = given_of(ctx.which, gradients) | frame.apart
        if unplanned(frame.program, given):
            primals = [i for stage in frame.program.parameters for i in stage]
            frame.gradients = frame.by_eager(ctx, primals, given, keep=False)
            frame.eager = None
            return None, None, None, torch.empty(0)
        count = len(frame.saved)
        shared = dict(zip(ctx.shared, tensors[count:], strict=True))
        frame.env = dict(zip(frame.saved, tensors[:count], strict=True)) | frame.numbers
        frame.env |= {name: view.again(shared[view.of]) for name, view in frame.of_outputs.items()}
        frame.env |= _tangents(frame, ctx.like, given)
        tracked = [i for i, grad in enumerate(frame.program.results) if grad]
        frame.listener.given([given.get(i) for i in tracked])
        return None, None, None, torch.empty(0)


def _check_dropped(frame: Frame) -> None:
    """Report outputs that the caller keeps, unlike the protocol says."""
    held = [tensor for output in frame.returned if (tensor := output()) is not None]
    if held and not frame.keep:  # what keeps the graph keeps what the loss has saved, too
        frame.listener.held(len(held), sum(tensor.nbytes for tensor in held))


def _tangents(
    frame: Frame, like: Mapping[int, Any], given: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tangents by name; zeros where an output got no gradient."""
    program = frame.program
    tangents: dict[str, torch.Tensor] = {}
    missing: list[int] = []
    for number, (i, name) in enumerate(
        zip(program.gradient_results, program.parts.tangents, strict=True)
    ):
        if i not in given:
            missing.append(number)
        shape, dtype, device = like[i]
        tangents[name] = given[i] if i in given else torch.zeros(shape, dtype=dtype, device=device)
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
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:
        frame: Frame = ctx.frame
        parts = frame.program.parts
        stage = parts.stages[ctx.number]
        depends = frame.program.depends
        try:
            with frame.listener.running("backward"):
                made = _run_stage(frame, stage, ctx.number, list(ctx.saved_tensors))
            if frame.gradients is None:
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
    if frame.gradients is not None:
        return [frame.gradients.pop(i) for i in frame.program.parameters[number]]
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
