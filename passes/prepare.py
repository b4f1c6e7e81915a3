"""Preparation: a module and example arguments to a lifted joint graph that shows all its memory.

Capture, canonical form, scratch of every kernel, memory of a loss outside the model, lifting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx, nn

from remat.ir import Block, Graph, OutputKind, UnsupportedGraphError, verify
from remat.ir._torch import DisableAutocast
from remat.ir.canonical import canonicalize, is_backward
from remat.ir.capture import Capture, capture, is_fake
from remat.ir.lift import Loss, Measured, Signature, lift

from .devices import device
from .eager import ScratchOf, no_scratch
from .outside_loss import trace_loss, used_outputs
from .protocol import StepProtocol
from .scratch import Call, Origin, Scratch, measure_scratch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A captured step, ready to be planned."""

    capture: Capture
    signature: Signature
    border: str
    """Name of the first node of backward."""
    graph: Graph
    measured: Mapping[str, Measured]
    """Node name -> scratch and real sizes."""
    loss: Loss | None
    """The loss, if it is outside the model and known."""
    targets: tuple[Block, ...]
    """Tensors that the loss uses beside the outputs, on the device throughout the step."""
    unmeasured: tuple[str, ...]
    """Ops whose scratch is not known."""
    device: torch.device

    def trained(self) -> frozenset[str]:
        """Names of the parameters that receive a gradient."""
        placeholders = [n.name for n in self.capture.joint.graph.nodes if n.op == "placeholder"]
        names = dict(zip(placeholders, self.capture.parameters, strict=False))
        return frozenset(
            names[output.target]
            for output in self.graph.outputs
            if output.kind is OutputKind.GRADIENT and output.target in names
        )

    def updates_state(self) -> bool:
        """The step updates something in place: buffers, or arguments."""
        return any(kind is OutputKind.MUTATION for kind, _ in self.signature.outputs)

    def updates_arguments(self) -> bool:
        """The step updates a tensor argument in place."""
        state = len(self.capture.parameters) + len(self.capture.buffers)
        inputs = [node.name for node in self.capture.joint.graph.nodes if node.op == "placeholder"]
        arguments = inputs[state : state + self.capture.arguments]
        return any(
            kind is OutputKind.MUTATION and target in arguments
            for kind, target in self.signature.outputs
        )


def prepare_step(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    forward: Callable[..., Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    protocol: StepProtocol | None = None,
    cuda: bool = False,
) -> Prepared:
    """Capture one training step and lift it.

    Args:
        module: see `ir.capture.capture`, likewise `args`, `kwargs` and `forward`.
        args: example positional arguments.
        kwargs: example keyword arguments.
        forward: what to trace; the module's own if None.
        loss_fn: output to a scalar, if the loss is outside the module.
        protocol: says which outputs receive a gradient; "auto" with a loss: those that it uses.
        cuda: trace the kernels of a CUDA device; see `planned_for_cuda`.
    """
    wanted = (protocol or StepProtocol()).gradient_outputs
    traced = partial(capture, module, args, kwargs, forward=forward, cuda=cuda)
    captured = _captured(traced, loss_fn, wanted)
    signature, mutated, gradients = captured.signature()
    joint = captured.joint
    canonicalize(joint, mutated, gradients)
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    scratch_of = scratch_for(module)
    scratch = scratch_of([_call(node) for node in nodes])
    measured = {
        node.name: Measured(sympy.Integer(found.bytes), found.outputs)
        for node, found in zip(nodes, scratch, strict=True)
    }
    unknown = [
        n.name for n, found in zip(nodes, scratch, strict=True) if found.origin is Origin.UNKNOWN
    ]
    loss, targets = trace_loss(captured, loss_fn, scratch_of) if loss_fn else (None, ())
    border = next(node.name for node in nodes if is_backward(node))
    graph = lift(joint, signature, border=border, measured=measured, loss=loss)
    verify(graph)
    where = next(v.device for n in nodes if isinstance(v := n.meta["val"], torch.Tensor))
    return Prepared(
        captured, signature, border, graph, measured, loss, targets, tuple(unknown), where
    )


def _captured(
    captured_for: Callable[..., Capture],
    loss_fn: Callable[[Any], torch.Tensor] | None,
    wanted: str | tuple[int, ...],
) -> Capture:
    """The step, captured for the outputs that receive a gradient: with a loss, those that it uses."""
    if loss_fn is None or wanted != "auto":
        return captured_for(gradient_outputs=wanted)
    try:
        captured = captured_for(gradient_outputs="all")
    except UnsupportedGraphError:  # perhaps for an output that the loss does not use
        return captured_for(gradient_outputs="auto")
    used = used_outputs(captured, loss_fn)
    if used == captured.gradient_outputs:
        return captured
    return captured_for(gradient_outputs=used)


def planned_for_cuda(module: nn.Module, cost_model: str) -> bool:
    """The step is for a GPU that is not at hand: the module has no data, and the costs are a GPU's."""
    if not _is_elsewhere(module) or cost_model in ("roofline", "timed"):
        return False
    return device(cost_model).name != "cpu"


def _is_elsewhere(module: nn.Module) -> bool:
    return any(is_fake(tensor) for tensor in (*module.parameters(), *module.buffers()))


def scratch_for(module: nn.Module) -> ScratchOf:
    """How the scratch of a module's kernels is found.

    Kernels are executed on the device at hand. A module without data is planned for another machine: its
    kernels are not executed here, and their scratch is reported as unknown.
    """
    if _is_elsewhere(module):
        return no_scratch

    def measured(calls: Sequence[Call]) -> Sequence[Scratch]:
        with DisableAutocast():  # the casts are calls of their own
            return measure_scratch(calls)

    return measured


def _call(node: fx.Node) -> Call:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return Call(node.target, args, kwargs)  # type: ignore[arg-type]
