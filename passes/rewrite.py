"""Rewrite: a schedule written out as a new joint graph.

Every execution of the schedule becomes a node. The first one keeps its name, the n-th repetition is
called ``<name>_again`` (``_again_2``, ...). Views are made anew just before they are needed, on
whichever instance of their base is the current one. Before a random op that will be repeated, the
state of the generator is kept; the repetition runs under that state. A first execution may write its result
over an operand that dies with it (see `reuse`).

Results, updates and gradients refer to first executions. Fake values are computed anew for all that is
repeated or viewed: copying a node would copy its fake storage too, and a repetition would pass for an
alias of the first. Other first executions keep theirs, which takes a fraction of the time.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from remat.ir import BORDER, Graph, OutputKind
from remat.ir._torch import FakeTensor, FakeTensorMode
from remat.ir.canonical import is_random
from remat.ir.in_place import in_place
from remat.ir.lift import tensors_of
from remat.ir.sizes import is_number

from .formulate import Index
from .randomness import CPU_STATE_BYTES, generator_state, repeat_random

REPEATS = "remat_repeats"
"""Key in ``node.meta``: name of the op that a node repeats."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The joint graph of a plan."""

    joint: fx.GraphModule
    border: str
    """Name of the first node of backward."""
    stage_ends: tuple[str, ...]
    """Name of the last node of each stage of backward."""
    delivered: Mapping[str, int]
    """Target of a gradient -> number of the stage that delivers it."""

    def origins(self) -> dict[str, str]:
        """Name of every repetition -> name of the op that it repeats."""
        nodes = self.joint.graph.nodes
        return {node.name: node.meta[REPEATS] for node in nodes if REPEATS in node.meta}


@dataclass(slots=True)
class _Emitter:
    """State of writing a schedule out."""

    graph: Graph
    mode: FakeTensorMode
    new: fx.Graph = field(default_factory=fx.Graph)
    storages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Value name -> its storages."""
    instance: dict[int, int] = field(default_factory=dict)
    """Storage -> how often it has been allocated."""
    current: dict[str, tuple[fx.Node, tuple[int, ...]]] = field(default_factory=dict)
    """Value name -> newest node for it, and the instances that the node refers to."""
    executions: dict[str, int] = field(default_factory=dict)
    states: dict[str, fx.Node] = field(default_factory=dict)

    def fetch(self, node: fx.Node) -> fx.Node:
        """The new node for an old one; makes the views that lead to it."""
        known = self.current.get(node.name)
        if known is not None and known[1] == self._instances(node.name):
            return known[0]
        args, kwargs = map_arg((node.args, node.kwargs), self.fetch)
        # A view of the very tensor that it was a view of is the view that it was.
        same = all(self._is_same(operand) for operand in node.all_input_nodes)
        value = node.meta["val"] if same else None
        return self._emit(node, node.target, args, node.name, kwargs, value)

    def _is_same(self, node: fx.Node) -> bool:
        """The newest node for an old one has its fake value."""
        return self.current[node.name][0].meta.get("val") is node.meta.get("val")

    def place(self, node: fx.Node) -> None:
        """Take over a placeholder, a constant, or a size."""
        made = self.new.node_copy(node, self.fetch)
        self.current[node.name] = (made, self._instances(node.name))

    def execute(
        self, node: fx.Node, allocates: Sequence[int], state: bool, over: fx.Node | None
    ) -> None:
        """Add an execution of an op.

        Args:
            node: the op.
            allocates: storages that it allocates.
            state: it is random, and the schedule repeats it.
            over: the operand that it overwrites, if any.
        """
        count = self.executions[node.name] = self.executions.get(node.name, 0) + 1
        args: tuple[Any, ...] = map_arg(node.args, self.fetch)
        target: Any = node.target
        kwargs = dict(node.kwargs)
        name = node.name
        if count > 1:
            name += "_again" if count == 2 else f"_again_{count - 1}"
        if state and count == 1:
            self.states[node.name] = self._keep_state(node)
        elif state:
            kept = self.states[node.name]
            args, target = (kept.args[0], kept, target, *args), repeat_random
        if over is not None:
            target, place = in_place(node, over)
            kwargs |= place
        kwargs = map_arg(kwargs, self.fetch)
        for storage in allocates:
            self.instance[storage] = count
        # A first result that shares nothing with its operands has the fake value that it had.
        fresh = count == 1 and over is None and set(self.storages[node.name]) == set(allocates)
        made = self._emit(node, target, args, name, kwargs, node.meta["val"] if fresh else None)
        if count > 1:
            made.meta[REPEATS] = node.name
        for user in node.users:
            if user.target is operator.getitem:
                self.fetch(user)

    def _instances(self, name: str) -> tuple[int, ...]:
        return tuple(self.instance.get(s, 0) for s in self.storages[name])

    def _emit(
        self, node: fx.Node, target: Any, args: Any, name: str, kwargs: Any, value: Any = None
    ) -> fx.Node:
        made = self.new.create_node("call_function", target, args, kwargs, name=name)
        made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        made.meta["val"] = self._value(made) if value is None else value
        self.current[node.name] = (made, self._instances(node.name))
        return made

    def _keep_state(self, node: fx.Node) -> fx.Node:
        device = str(next(t.device for t in tensors_of(node.meta["val"])))
        name = f"{node.name}_state"
        state = self.new.create_node("call_function", generator_state, (device,), name=name)
        state.meta = {k: v for k, v in node.meta.items() if k != "val"}
        state.meta["val"] = self._value(state)
        return state

    def _value(self, node: fx.Node) -> Any:
        """Fake value of a new node, from its operands'."""
        operands: Any = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        args, kwargs = operands
        target = cast(Callable[..., Any], node.target)
        with self.mode, torch.no_grad():
            if target is generator_state:
                return torch.empty(CPU_STATE_BYTES, dtype=torch.uint8)
            if target is repeat_random:
                return args[2](*args[3:], **kwargs)
            return target(*args, **kwargs)


def rewrite_joint(
    joint: fx.GraphModule,
    graph: Graph,
    index: Index,
    schedule: Sequence[int],
    over: Mapping[int, int] | None = None,
) -> Rewritten:
    """Write a schedule out as a new joint graph.

    Args:
        joint: the canonical joint graph; not changed.
        graph: its lifted form.
        index: from `formulate`.
        schedule: problem ops in order of execution.
        over: graph op -> value that its first execution overwrites, see `reuse.reused`.
    """
    over = over or {}
    old = {node.name: node for node in joint.graph.nodes}
    mode = next(
        t.fake_mode
        for node in joint.graph.nodes
        for t in tensors_of(node.meta.get("val"))
        if isinstance(t, FakeTensor)
    )
    emitter = _Emitter(graph, mode, storages={v.name: v.storages for v in graph.values})
    for node in joint.graph.nodes:
        if node.op in ("placeholder", "get_attr") or is_number(node):
            emitter.place(node)
    outputs = _OutputTaker(joint, graph)
    outputs.take("", emitter)
    repeated = {op for op, count in Counter(schedule).items() if count > 1}
    ends = dict.fromkeys(index.stage_ends)
    marks: list[fx.Node] = []
    before_border: fx.Node | None = None
    for problem_op in schedule:
        i = index.ops[problem_op]
        op = graph.ops[i]
        if op.target == BORDER:
            before_border = _last(emitter.new)
            continue
        first = op.name not in emitter.executions
        operand = old[graph.values[over[i]].name] if first and i in over else None
        state = op.random and problem_op in repeated
        emitter.execute(old[op.name], op.allocates, state, operand)
        if first:
            outputs.take(op.name, emitter)
        if first and i in ends:
            marks.append(_last(emitter.new))
    assert before_border is not None
    emitter.new.output(tuple(outputs.taken())).meta = dict(joint.graph.output_node().meta)
    border = before_border.next.name
    stage = {end: number for number, end in enumerate(index.stage_ends)}
    delivered = {
        output.target: stage[index.delivered[graph.values[output.value].storages[0]]]
        for output in graph.outputs
        if output.kind is OutputKind.GRADIENT
    }
    return _finish(joint, emitter.new, Rewritten(joint, border, (), delivered), marks)


def _last(graph: fx.Graph) -> fx.Node:
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last


class _OutputTaker:
    """Fetches every output right after the first execution of the op that its storage comes from."""

    def __init__(self, joint: fx.GraphModule, graph: Graph) -> None:
        self.results = list(joint.graph.output_node().args[0])  # type: ignore[arg-type]
        self.nodes: dict[int, fx.Node] = {}
        allocator = {s: op.name for op in graph.ops for s in op.allocates}
        storages = {value.name: value.storages for value in graph.values}
        self.waiting: dict[str, list[int]] = {}
        for i, node in enumerate(self.results):
            if isinstance(node, fx.Node):
                origin = next((allocator[s] for s in storages[node.name] if s in allocator), "")
                self.waiting.setdefault(origin, []).append(i)

    def take(self, origin: str, emitter: _Emitter) -> None:
        for i in self.waiting.get(origin, ()):
            self.nodes[i] = emitter.fetch(self.results[i])

    def taken(self) -> list[fx.Node | None]:
        return [self.nodes.get(i) for i in range(len(self.results))]


def _finish(
    joint: fx.GraphModule, new: fx.Graph, draft: Rewritten, marks: Sequence[fx.Node]
) -> Rewritten:
    """Remove unused views; a mark on a removed node moves to the node before it."""
    border = draft.border
    ends = [mark.name for mark in marks]
    random = (generator_state, repeat_random)
    for node in reversed(list(new.nodes)):
        if node.users or node.op != "call_function" or is_random(node) or node.target in random:
            continue
        previous = node.prev
        while previous.op != "call_function":
            previous = previous.prev
        ends = [previous.name if end == node.name else end for end in ends]
        border = node.next.name if node.name == border else border
        new.erase_node(node)
    new.lint()
    return Rewritten(fx.GraphModule(joint, new), border, tuple(ends), draft.delivered)
