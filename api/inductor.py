"""A program whose graphs are compiled by Inductor; what is saved between them is exactly the plan's.

The forward graph and each stage of backward are compiled on their own. Inside a graph, Inductor decides the
order, fusion and reuse of memory, so the peak there is Inductor's and not the plan's.

Random ops are opaque to Inductor. In the graph each waits for the one before it, by a tensor that it takes
and does not read: so they draw in the order of the plan, and what eager draws.

Not handled: symbolic sizes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from remat.ir import UnsupportedGraphError
from remat.ir._torch import FakeTensorMode, TracingContext, inductor_parts, tracing
from remat.ir.canonical import is_random
from remat.passes.randomness import CPU_STATE_BYTES, generator_state, repeat_random

from .program import Program

_aten = torch.ops.aten


def compile_program(program: Program) -> None:
    """Let Inductor run the graphs of a program; the graphs themselves stay as they are, to be read.

    Raises:
        UnsupportedGraphError: a random op cannot be made opaque.
    """
    parts = program.parts
    parts.forward.forward = _compiled(parts.forward, backward=False)
    for stage in parts.stages:
        stage.module.forward = _compiled(stage.module, backward=True)


def _compiled(module: fx.GraphModule, backward: bool) -> Callable[[list[Any]], list[Any]]:
    """What runs in place of `module.forward`: takes its inputs in a list, and empties it."""
    nodes = module.graph.nodes
    if not any(node.op == "call_function" for node in nodes):
        return module.forward  # hands on what it gets
    values = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    mode = FakeTensorMode()
    with mode, torch.no_grad(), tracing(TracingContext(mode)):
        inputs = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
            for v in values
        ]
        functional = torch.func.functionalize(_Opaque(module).outputs)
        compile_graph, decompositions = inductor_parts()
        traced = make_fx(functional, decomposition_table=decompositions)(*inputs)
        _leave_dead_inputs(traced)
        output = traced.graph.output_node()
        count = len(output.args[0])  # type: ignore[arg-type]
        output.meta["user_visible_output_idxs"] = list(range(count))  # their strides are kept
        compiled: Any = compile_graph(traced, inputs, is_backward=backward)

    def forward(boxed: list[Any]) -> list[Any]:
        made = list(compiled(boxed))
        boxed.clear()
        made.pop()  # what waits for the random ops
        return made

    return forward


def _leave_dead_inputs(traced: fx.GraphModule) -> None:
    """Do not write back to inputs: the plan writes over them only to reuse their memory."""
    for node in list(traced.graph.nodes):
        if node.target is _aten.copy_.default and node.args[0].op == "placeholder":
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()


class _Opaque(fx.Interpreter):
    """Runs a graph with its random ops replaced by ops of ours."""

    last: torch.Tensor | None = None
    """What the next random op waits for."""

    def outputs(self, *inputs: torch.Tensor) -> list[Any]:
        """Those of the graph, and a tensor that waits for all random ops."""
        self.last = None
        made = list(self.run(*inputs))
        return [*made, torch.empty(0) if self.last is None else self.last]

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.op != "call_function" or not (
            n.target in (generator_state, repeat_random) or is_random(n)
        ):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is generator_state:
            self.last = torch.ops.remat.state(self.last, *args)
            return self.last
        if n.target is repeat_random:
            device, state, target, *rest = args
            return _again(target)(state, device, *rest, **kwargs)
        self.last, *results = _draw(n.target)(self.last, *args, **kwargs)
        return results[0] if len(results) == 1 else tuple(results)


_library: Any = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An op that Inductor calls as it is."""
    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{name}", fake, lib=_library)
    return getattr(torch.ops.remat, name).default


def _state(after: torch.Tensor | None, device: str) -> torch.Tensor:
    return generator_state(device)


def _fake_state(after: torch.Tensor | None, device: str) -> torch.Tensor:
    size = CPU_STATE_BYTES if torch.device(device).type == "cpu" else 16
    return torch.empty(size, dtype=torch.uint8)


_define("state", "(Tensor? after, str device) -> Tensor", _state, _fake_state)


@functools.cache
def _draw(target: torch._ops.OpOverload) -> Any:
    """`target` as an op that waits for its first operand, and has a first result to wait for."""
    name, arguments, results = _signature(target)

    def run(after: torch.Tensor | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        made = target(*args, **kwargs)
        return torch.empty(0), *(made if isinstance(made, tuple) else (made,))

    return _define(
        f"draw_{name}", f"(Tensor? after, {arguments}) -> (Tensor, {results})", run, run
    )


@functools.cache
def _again(target: torch._ops.OpOverload) -> Any:
    """`target` as an op that starts from a state of the generator."""
    name, arguments, results = _signature(target)

    def run(state: torch.Tensor, device: str, *args: Any, **kwargs: Any) -> Any:
        return repeat_random(device, state, target, *args, **kwargs)

    def fake(state: torch.Tensor, device: str, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    schema = f"(Tensor state, str device, {arguments}) -> ({results})"
    return _define(f"again_{name}", schema, run, fake)


def _signature(target: torch._ops.OpOverload) -> tuple[str, str, str]:
    """Name, arguments and results of an op, as a schema has them."""
    if target._schema.is_mutable:
        raise UnsupportedGraphError(
            f"Inductor cannot run a plan with {target}, which draws in place"
        )
    _, _, schema = str(target._schema).partition("(")
    arguments, _, results = schema.rpartition(") -> ")
    name = str(target).replace(".", "_")
    return name, arguments, results.removeprefix("(").removesuffix(")")
