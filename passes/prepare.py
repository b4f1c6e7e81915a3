"""Preparation: a module and example arguments to a lifted joint graph that shows all its memory.

Capture, canonical form, scratch of every kernel, memory of a loss outside the model, lifting.

A step that was captured with symbolic sizes is prepared *at* sizes: its graph has the bytes of these, and
what kernels were measured to take there. `resized` prepares the same captured step at others.
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
from remat.ir.capture import Capture, capture
from remat.ir.domain import Sizes, bound
from remat.ir.fake import Dynamic, is_fake
from remat.ir.lift import Loss, Measured, Signature, lift
from remat.ir.sizes import is_number
from remat.ir.symbols import Names

from .devices import device
from .eager import ScratchOf, no_scratch
from .outside_loss import trace_loss, used_outputs
from .protocol import StepProtocol
from .realize import at, described, renamed
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
    sizes: Sizes
    """The number of each named size; empty if none is dynamic."""
    loss_fn: Callable[[Any], torch.Tensor] | None
    scratch_of: ScratchOf

    def lift(self, joint: fx.GraphModule, border: str, measured: Mapping[str, Measured]) -> Graph:
        """Lift this step's joint graph, or one that was rewritten from it, at the sizes.

        Args:
            joint: the graph.
            border: name of its first node of backward.
            measured: node name -> scratch and real sizes.
        """
        return _lifted(
            self.capture, self.signature, joint, border, measured, self.loss, self.sizes
        )

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
    dynamic: Dynamic | None = None,
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
        dynamic: sizes that are symbols in the graph; see `ir.capture.capture`.
        cuda: trace the kernels of a CUDA device; see `planned_for_cuda`.
    """
    wanted = (protocol or StepProtocol()).gradient_outputs
    traced = partial(capture, module, args, kwargs, forward=forward, dynamic=dynamic, cuda=cuda)
    captured = _captured(traced, loss_fn, wanted)
    signature, mutated, gradients = captured.signature()
    canonicalize(captured.joint, mutated, gradients)
    return _prepared(captured, signature, loss_fn, scratch_for(module), captured.sizes)


def resized(prepared: Prepared, sizes: Sizes) -> Prepared:
    """The same captured step at other sizes, which must lie in the domain of its graph.

    Raises:
        UnsupportedGraphError: the loss cannot be computed from outputs of that size.
    """
    return _prepared(
        prepared.capture, prepared.signature, prepared.loss_fn, prepared.scratch_of, sizes
    )


def _prepared(
    captured: Capture,
    signature: Signature,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    scratch_of: ScratchOf,
    sizes: Sizes,
) -> Prepared:
    nodes = ops_of(captured.joint)
    calls = [_call(node) for node in nodes]
    if captured.symbols:
        calls = [at(call, bound(sizes)) for call in calls_of(captured)]
    scratch = scratch_of(calls)
    measured = {
        node.name: Measured(sympy.Integer(found.bytes), found.outputs)
        for node, found in zip(nodes, scratch, strict=True)
    }
    unknown = [
        n.name for n, found in zip(nodes, scratch, strict=True) if found.origin is Origin.UNKNOWN
    ]
    loss, targets = _loss(captured, loss_fn, scratch_of, sizes) if loss_fn else (None, ())
    border = next(node.name for node in nodes if is_backward(node))
    graph = _lifted(captured, signature, captured.joint, border, measured, loss, sizes)
    where = next(v.device for n in nodes if isinstance(v := n.meta["val"], torch.Tensor))
    return Prepared(
        captured,
        signature,
        border,
        graph,
        measured,
        loss,
        targets,
        tuple(unknown),
        where,
        sizes,
        loss_fn,
        scratch_of,
    )


def _lifted(
    captured: Capture,
    signature: Signature,
    joint: fx.GraphModule,
    border: str,
    measured: Mapping[str, Measured],
    loss: Loss | None,
    sizes: Sizes,
) -> Graph:
    graph = lift(
        joint,
        signature,
        border=border,
        measured=measured,
        loss=loss,
        symbols=captured.symbols,
        binding=bound(sizes),
    )
    verify(graph)
    return graph


def ops_of(joint: fx.GraphModule) -> list[fx.Node]:
    """Nodes that execute ops; not those that compute sizes."""
    return [n for n in joint.graph.nodes if n.op == "call_function" and not is_number(n)]


def calls_of(captured: Capture) -> list[Call]:
    """The call of every op of a captured step, described, in the user's symbols."""
    plain = Names(captured.symbols).plain
    return [renamed(described(_call(node)), plain) for node in ops_of(captured.joint)]


def loss_at(prepared: Prepared, sizes: Sizes) -> tuple[Loss | None, tuple[Block, ...]]:
    """The loss of a step at other sizes, and its targets.

    Raises:
        UnsupportedGraphError: it cannot be computed from outputs of that size.
    """
    assert prepared.loss_fn is not None
    return _loss(prepared.capture, prepared.loss_fn, prepared.scratch_of, sizes)


def _loss(
    captured: Capture,
    loss_fn: Callable[[Any], torch.Tensor],
    scratch_of: ScratchOf,
    sizes: Sizes,
) -> tuple[Loss | None, tuple[Block, ...]]:
    try:
        return trace_loss(captured, loss_fn, scratch_of, bound(sizes))
    except Exception as error:  # whatever the user's code raises
        if sizes == captured.sizes:
            raise
        at_sizes = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise UnsupportedGraphError(
            f"loss_fn cannot be computed at {at_sizes}: {error}\nWith dynamic sizes it is called with "
            "outputs of other sizes than the example's: let it make its targets to fit the output."
        ) from error


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
    used = used_outputs(captured, loss_fn, bound(captured.sizes))
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
