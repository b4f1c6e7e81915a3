"""Capture: `nn.Module` and example arguments to AOTAutograd's joint forward and backward graph.

The module's own forward is traced on fake tensors, without Dynamo, as a function of its parameters,
buffers and tensor arguments. A parameter that is registered under several names is one input, so its
gradient is summed in the order in which autograd sums it.

Which outputs receive a gradient is fixed at capture: those that `gradient_outputs` names; by default the
one called `loss`, else the 0-dimensional ones, else all that require one.

There is one route, DIRECT. (A trace that carries real values along would take the branches and bake in the
numbers that the example has, and be silently wrong for other data.)

Not handled, refused with `UnsupportedGraphError`: recurrent layers (torch 2.13 loses the dropout
between their layers when it captures them), outputs with a gradient that share memory with inputs or
with each other, control flow that depends on data, tensor subclasses, forwards that change Python state
(see `ir.untouched`), inputs that backward changes.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ._torch import (
    FakeTensorMode,
    ShapeEnv,
    TracingContext,
    aot_export_joint_with_descriptors,
    compiling_state,
    functorch_config,
    inductor_config,
    tracing,
)
from .checkpoints import run_once
from .device_kernels import cuda_kernels
from .eager_kernels import eager_kernels
from .errors import UnsupportedGraphError
from .fake import Dynamic, fake_tensors, sizes_of
from .functional import Functional, argument_names, fake_state, named_tensors, untouched
from .graph import OutputKind
from .lazy_hooks import install_lazy_hooks
from .lift import Signature
from .origin import record_origins
from .refusals import (
    refuse_hidden_tensors,
    refuse_late_updates,
    refuse_module,
    refuse_repeated_casts,
    refuse_returned_inputs,
    refuse_shared_updates,
    refuse_unknown_sizes,
)
from .structure import take_tensors
from .trace import Role

_OURS = str(Path(__file__).parent)
_COPIES = "Return copies instead."
_DATA_ERRORS = {
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
    "PendingUnbackedSymbolNotFound",
    "UnsupportedFakeTensorException",
}


class Route(StrEnum):
    """How a graph was captured."""

    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Capture:
    """A joint graph, and how its inputs and outputs map to the module's."""

    joint: fx.GraphModule
    """Placeholders: parameters, buffers, tensor arguments, tangents. Outputs: mutated inputs, results,
    gradients. All carry ``meta["desc"]``."""
    parameters: tuple[str, ...]
    """Name of each parameter input (its first, if it has several)."""
    buffers: tuple[str, ...]
    """Name of each buffer input."""
    arguments: int
    """Number of tensor arguments."""
    output_pattern: object
    """The module's output with its tensors taken out; see `ir.structure`."""
    requires_grad: tuple[bool, ...]
    """Per output tensor: it requires a gradient in eager."""
    gradient_outputs: tuple[int, ...]
    """Output tensors that receive a gradient, in the order of the tangents."""
    symbols: Mapping[str, str]
    """Name of each symbol in the graph, to the user's name for it."""
    sizes: Mapping[str, int]
    """The user's name of each size that was to be a symbol, with its number in the example."""
    checkpointed: bool
    """The model checkpoints parts of itself, which the graph has once."""
    route: Route

    def signature(self) -> tuple[Signature, list[fx.Node], list[tuple[int, fx.Node]]]:
        """What the joint graph's inputs and outputs are.

        Returns:
            The signature, the placeholders that the step updates, and for each gradient its position
            among the outputs with the placeholder that it belongs to.
        """
        placeholders = [node for node in self.joint.graph.nodes if node.op == "placeholder"]
        names = [*self.parameters, *self.buffers]
        inputs = [(name, Role.PARAMETER) for name in self.parameters]
        inputs += [(name, Role.BUFFER) for name in self.buffers]
        inputs += [(f"argument {i}", Role.INPUT) for i in range(self.arguments)]
        inputs += [("tangent", Role.TANGENT)] * (len(placeholders) - len(inputs))
        by_desc = {repr(node.meta["desc"]): i for i, node in enumerate(placeholders)}
        results: Any = self.joint.graph.output_node().args[0]
        outputs: list[tuple[OutputKind, str]] = []
        mutated: list[fx.Node] = []
        gradients: list[tuple[int, fx.Node]] = []
        gradient_results: list[int] = []
        for position, desc in enumerate(self.joint.graph.output_node().meta["desc"]):
            kind, of = _output_kind(desc)
            if of is None and kind is OutputKind.GRADIENT:  # an input that has none
                outputs.append((kind, ""))
                continue
            if kind is OutputKind.RESULT:
                outputs.append((kind, str(desc.idx)))
                if desc.idx in self.gradient_outputs:
                    gradient_results.append(position)
                continue
            node = placeholders[by_desc[repr(of)]]
            outputs.append((kind, node.name))
            if kind is OutputKind.MUTATION:
                mutated.append(node)
            elif results[position] is not None:
                gradients.append((position, node))
        if len(names) + self.arguments + len(gradient_results) != len(placeholders):
            raise UnsupportedGraphError(
                "an output of the model that requires a gradient is an input or parameter itself, or "
                f"shares memory with another output. {_COPIES}"
            )
        return (
            Signature(tuple(inputs), tuple(outputs), tuple(gradient_results)),
            mutated,
            gradients,
        )

    def results(self) -> list[torch.Tensor]:
        """Fake tensors of the module's output, in order."""
        output = self.joint.graph.output_node()
        nodes: Any = output.args[0]
        return [
            node.meta["val"]
            for node, desc in zip(nodes, output.meta["desc"], strict=True)
            if _output_kind(desc)[0] is OutputKind.RESULT
        ]


def _output_kind(desc: Any) -> tuple[OutputKind, Any]:
    """Kind of an output by its descriptor, and the descriptor of the input it belongs to."""
    kind = type(desc).__name__
    if desc is None:
        return OutputKind.GRADIENT, None
    if kind == "PlainAOTOutput":
        return OutputKind.RESULT, None
    if kind == "GradAOTOutput":
        return OutputKind.GRADIENT, desc.grad_of
    if kind == "InputMutationAOTOutput":
        return OutputKind.MUTATION, desc.mutated_input
    raise UnsupportedGraphError(
        f"the model has an output of kind {kind} (views of inputs, views that share memory with each "
        f"other, or inputs whose shape changes), which a plan cannot return. {_COPIES}"
    )


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    forward: Callable[..., Any] | None = None,
    gradient_outputs: str | tuple[int, ...] = "auto",
    dynamic: Dynamic | None = None,
    cuda: bool = False,
) -> Capture:
    """Trace one training step of `module` on fake tensors.

    Args:
        module: in the mode (train or eval of each submodule) in which it is to be captured.
        args: example positional arguments; tensors may be real, fake or on the meta device.
        kwargs: example keyword arguments.
        forward: what to trace; `module.forward` if None.
        gradient_outputs: "auto", "all", or indices of output tensors; see `choose_gradient_outputs`.
        dynamic: sizes to keep symbolic, by argument name: ``{"input_ids": {0: "batch", 1: "seq"}}``.
        cuda: trace the kernels of a CUDA device, wherever the tensors claim to be; see `device_kernels`.

    Raises:
        UnsupportedGraphError: no route captures it; names the user's line and what to do.
    """
    refuse_module(module)
    install_lazy_hooks(module)
    tensors, pattern = take_tensors((args, dict(kwargs or {})))
    refuse_hidden_tensors(pattern, "arguments")
    try:
        with untouched(module):
            return _capture(
                module,
                forward or module.forward,
                tensors,
                pattern,
                gradient_outputs,
                dynamic,
                cuda,
            )
    except UnsupportedGraphError:
        raise
    except Exception as error:  # torch raises dozens of types here
        raise explained(error) from error


def _capture(
    module: nn.Module,
    forward: Callable[..., Any],
    tensors: list[torch.Tensor],
    pattern: object,
    gradient_outputs: str | tuple[int, ...],
    dynamic: Dynamic | None,
    cuda: bool,
) -> Capture:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    state = fake_state(module, mode)
    names = argument_names(forward, pattern, len(tensors))
    fakes, symbols = fake_tensors(mode, tensors, names, dynamic)
    functional = Functional(module, forward, state, pattern, gradient_outputs)
    functional.train()
    with contextlib.ExitStack() as stack:
        # Without this, graph clean-up drops random ops whose results are unused, and shifts the stream.
        stack.enter_context(inductor_config.patch(fallback_random=True))
        # Loops call backward outside of autocast.
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(compiling_state())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(eager_kernels())
        if cuda:
            stack.enter_context(cuda_kernels())
        stack.enter_context(record_origins(module))
        checkpoints = stack.enter_context(run_once())
        descriptors = aot_export_joint_with_descriptors(stack, functional, tuple(fakes), {})
    assert functional.output is not None
    output_pattern, requires_grad, chosen = functional.output
    refuse_hidden_tensors(output_pattern, "output")
    if not chosen:
        raise UnsupportedGraphError(
            "no output of the model requires a gradient, so there is no training step to plan. "
            "Is every parameter frozen, or did the forward run under no_grad?"
        )
    result = Capture(
        joint=descriptors.graph_module,
        parameters=state.parameter_names,
        buffers=state.buffer_names,
        arguments=len(tensors),
        output_pattern=output_pattern,
        requires_grad=requires_grad,
        gradient_outputs=chosen,
        symbols=symbols,
        sizes=sizes_of(tensors, names, dynamic or {}),
        checkpointed=bool(checkpoints),
        route=Route.DIRECT,
    )
    refuse_unknown_sizes(result.joint)
    refuse_late_updates(result)
    refuse_repeated_casts(result, [p.requires_grad for p in state.parameters])
    _refuse_aliases(result, module, tensors)
    return result


def _refuse_aliases(
    captured: Capture, module: nn.Module, arguments: Sequence[torch.Tensor]
) -> None:
    """Refuse updates of shared memory, and results that are inputs with a gradient."""
    parameters, buffers = named_tensors(module)
    inputs = [*parameters.values(), *buffers.values(), *arguments]
    names = [*captured.parameters, *captured.buffers]
    names += [f"tensor argument {i}" for i in range(len(arguments))]
    _, mutated, _ = captured.signature()
    placeholders = [node for node in captured.joint.graph.nodes if node.op == "placeholder"]
    refuse_shared_updates([placeholders.index(node) for node in mutated], names, inputs)
    trained = [tensor.requires_grad for tensor in inputs]
    refuse_returned_inputs(captured.joint, names, trained, captured.results())


def explained(error: Exception) -> UnsupportedGraphError:
    """The error with the user's line in front: the last frame outside torch."""
    root = str(torch.__path__[0])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((root, _OURS, "<"))
    ]
    where = (
        f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
        if frames
        else "unknown line"
    )
    reason = (
        str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    )
    if "entirely functional graph" in reason:
        return UnsupportedGraphError(
            "the forward changes a tensor in place that is neither a buffer nor an argument. "
            "Register it: register_buffer."
        )
    names = {type(each).__name__ for each in _chain(error)}
    advice = (
        "Values of tensors must not decide what the forward does (`if tensor:`, `.item()`, loops over "
        "data). Move such code out of the model, or optimise the parts around it one by one."
        if names & _DATA_ERRORS
        else "Running the forward on the example arguments failed: do they fit the model? (It runs on "
        "tensors without data, so code that reads their memory fails too, such as `.numpy()`.)"
    )
    return UnsupportedGraphError(
        f"the model could not be captured.\n  at {where}\n  {type(error).__name__}: {reason}\n{advice}"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it was raised from or while handling."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
