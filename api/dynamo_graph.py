"""Graphs that Dynamo makes: what their inputs are, where their ops come from, and the module to plan.

Dynamo names the source of each input: ``L['self']._modules['head']._parameters['weight']``. An input that
is an `nn.Parameter` is a parameter, one from a module's ``_buffers`` a buffer, and every other tensor an
argument. Numbers are inputs too, where sizes are symbolic.

Not handled: tensor subclasses, graphs that own trainable tensors (Dynamo's
``inline_inbuilt_nn_modules=False``).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from remat.ir.origin import give_origin

_ROOT = re.compile(r"^[LG]\['\w+'\]")
_PART = re.compile(r"\w+")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_TABLES = ("_modules", "_parameters", "_buffers")


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def needs_gradient(graph: fx.GraphModule) -> bool:
    """Some output requires a gradient, or may for all that is known: a backward may come."""
    outputs = [n.meta.get("example_value") for n in graph.graph.output_node().all_input_nodes]
    return any(
        value.requires_grad if isinstance(value, torch.Tensor) else value is None
        for value in outputs
    )


def is_symbolic(graph: fx.GraphModule, examples: Sequence[object]) -> bool:
    """The graph holds for several sizes."""
    nodes = zip(_placeholders(graph), examples, strict=True)
    return any(_has_symbols(node.meta.get("example_value", value)) for node, value in nodes)


def _has_symbols(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt)


def broken_at(graph: fx.GraphModule) -> str:
    """Where and why Dynamo cut the user's code after this graph; empty if it did not."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    stack = reason.user_stack
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown line"
    return f"{where}: {reason.reason.strip().splitlines()[0]}"


def share_memory(updated: Sequence[int], inputs: Sequence[object]) -> bool:
    """An input that the step updates shares memory with another input."""
    owners = [
        value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else -1
        for value in inputs
    ]
    return any(owners.count(owners[i]) > 1 for i in updated)


@dataclass(frozen=True, slots=True)
class Input:
    """What Dynamo knows of an input while it compiles, and forgets afterwards."""

    name: str
    """Its path in the user's module if it belongs to one, as an identifier."""
    is_buffer: bool


def inputs_of(graph: fx.GraphModule) -> tuple[Input, ...]:
    """The inputs of a graph that is being compiled, in order."""
    found: dict[str, Input] = {}
    for node in _placeholders(graph):
        source = _source(node)
        parts = _PART.findall(_ROOT.sub("", source))
        name = "_".join(part for part in parts if part not in _TABLES) or node.name
        while name in found:
            name += "_"
        found[name] = Input(name, "._buffers[" in source)
    return tuple(found.values())


class BoundGraph(nn.Module):
    """A graph of Dynamo, bound to the parameters and buffers of one call: a module that can be planned.

    It lives as long as planning takes. Its forward takes the other inputs of the graph.
    """

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Input], values: Sequence[object]
    ) -> None:
        """Bind.

        Args:
            graph: as Dynamo gave it.
            inputs: its inputs.
            values: of them in one call.
        """
        super().__init__()
        self.dynamo = graph
        self.state: dict[str, int] = {}
        """Name of each parameter and buffer -> position among the inputs."""
        for i, (given, value) in enumerate(zip(inputs, values, strict=True)):
            if isinstance(value, nn.Parameter):
                self.register_parameter(given.name, value)
            elif isinstance(value, torch.Tensor) and given.is_buffer:
                self.register_buffer(given.name, value)
            else:
                continue
            self.state[given.name] = i
        kept = set(self.state.values())
        self.rest = [i for i in range(len(values)) if i not in kept]
        """Positions of the arguments."""

    def forward(self, *arguments: object) -> Any:
        """Run the graph node by node, so that a trace keeps what the nodes say of their origin."""
        values = dict(zip(self.rest, arguments, strict=True))
        values |= {i: getattr(self, name) for name, i in self.state.items()}
        return fx.Interpreter(self.dynamo).run(*(values[i] for i in range(len(values))))


def give_origins(graph: fx.GraphModule) -> None:
    """Say of every op which module and line of the user's code it comes from."""
    for node in graph.graph.nodes:
        give_origin(node, *_origin(node))


def _origin(node: fx.Node) -> tuple[str, str]:
    """Module path and line of the user's code that a node comes from."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = _ROOT.sub("", modules[-1][0]).strip(".") if modules else ""
    lines = [
        f"{Path(file).name}:{line}"
        for file, line in _LINE.findall(node.meta.get("stack_trace") or "")
        if not file.startswith(_TORCH)
    ]
    return path, lines[-1] if lines else ""


def _source(node: fx.Node) -> str:
    """Where Dynamo found an input, as an expression."""
    return str(getattr(getattr(node.meta.get("grapharg"), "source", None), "name", ""))
