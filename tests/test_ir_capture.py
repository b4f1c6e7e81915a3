import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.ir import BORDER, Graph, OutputKind, Phase, Role, UnsupportedGraphError
from remat.ir.canonical import canonicalize, dense_clone, is_backward, is_random
from remat.ir.capture import Capture, Route, capture
from remat.ir.lift import lift


def canonical(captured: Capture) -> list[Any]:
    signature, mutated, gradients = captured.signature()
    assert len(signature.inputs) >= len(captured.parameters)
    canonicalize(captured.joint, mutated, gradients)
    return list(captured.joint.graph.nodes)


def lifted(captured: Capture) -> Graph:
    nodes = canonical(captured)
    border = next(n.name for n in nodes if n.op == "call_function" and is_backward(n))
    signature = captured.signature()[0]
    return lift(captured.joint, signature, border=border, symbols=captured.symbols)


@dataclasses.dataclass
class Answer:
    loss: Tensor
    hidden: Tensor
    name: str


class Model(nn.Module):
    """Keyword and plain arguments in; a dataclass out; a tied and a frozen parameter, a counter."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, *, mode: str, scale: Tensor | None = None) -> Answer:
        self.count += 1
        h = self.second(functional.dropout(self.first(x), 0.5)) * self.frozen
        if mode == "double":
            h = h * 2
        if scale is not None:
            h = h * scale
        return Answer(h.square().sum(), h, mode)


def test_arguments_and_outputs_are_named_and_rebuilt() -> None:
    captured = capture(Model(), (torch.ones(3, 4),), {"mode": "double"})
    assert captured.route is Route.DIRECT
    assert captured.parameters == ("frozen", "first.weight", "first.bias", "second.bias")
    assert captured.buffers == ("count",)
    assert captured.arguments == 1
    assert captured.requires_grad == (True, True)
    assert captured.gradient_outputs == (0,)  # the loss
    assert [tuple(t.shape) for t in captured.results()] == [(), (3, 4)]


def test_plain_arguments_choose_the_path() -> None:
    captured = [capture(Model(), (torch.ones(3, 4),), {"mode": m}) for m in ("double", "single")]
    counts = [
        sum(n.target is torch.ops.aten.mul.Tensor for n in c.joint.graph.nodes) for c in captured
    ]
    assert counts[0] > counts[1]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_meta_parameters_and_inputs_give_the_same_graph_as_real_ones(device: str) -> None:
    real = lifted(capture(Model(), (torch.ones(3, 4),), {"mode": "single"}))
    model = Model().to(device)
    model.second.weight = model.first.weight  # `to` unties them
    graph = lifted(capture(model, (torch.ones(3, 4, device="meta"),), {"mode": "single"}))
    assert [op.target for op in graph.ops] == [op.target for op in real.ops]
    assert [s.size for s in graph.storages] == [s.size for s in real.storages]


def test_capture_leaves_model_gradients_and_random_state_alone() -> None:
    model, x = Model(), torch.ones(3, 4)
    before, count = torch.get_rng_state(), model.count.clone()
    capture(model, (x,), {"mode": "single"})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.count, count)
    assert all(p.grad is None for p in model.parameters())


def test_symbolic_sizes_carry_the_names_of_the_user() -> None:
    dynamic = {"x": {0: "batch"}}
    graph = lifted(capture(Model(), (torch.ones(5, 4),), {"mode": "single"}, dynamic=dynamic))
    batch = sympy.Symbol("batch", positive=True, integer=True)
    assert dict(graph.symbols) == {batch: 5}
    activation = next(s for s in graph.storages if s.name.startswith("addmm"))
    assert activation.size == 16 * batch


def test_control_flow_that_depends_on_data_is_refused_and_the_line_named() -> None:
    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.sin() if x.sum() > 0 else y.cos()

    for device in ("cpu", "meta"):
        with pytest.raises(UnsupportedGraphError, match=r"if x\.sum\(\) > 0"):
            capture(Branch(2, 2), (torch.ones(1, 2, device=device),))


@pytest.mark.parametrize("number", [float, int, bool])
def test_a_number_that_is_read_from_data_is_refused(number: Callable[[Tensor], float]) -> None:
    class Scale(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * number(x.sum())

    with pytest.raises(UnsupportedGraphError, match=r"number\(x\.sum\(\)\)"):
        capture(Scale(2, 2), (torch.ones(1, 2),))


def test_recurrent_layers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedGraphError, match=r"rnn is an nn\.GRU"):
        capture(nn.ModuleDict({"rnn": nn.GRU(2, 2)}), (torch.ones(1, 1, 2),))


def test_a_frozen_model_has_no_step_to_plan() -> None:
    with pytest.raises(UnsupportedGraphError, match="no training step"):
        capture(nn.Linear(2, 2).requires_grad_(False), (torch.ones(1, 2),))


class Canonical(nn.Module):
    """Needs most points of the canonical form."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.outer = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        functional.dropout(x, 0.5)
        self.scale.mul_(2)
        y = self.norm(self.linear(x) * self.scale)
        low, high = y.chunk(2, -1)
        values = high.topk(1).values
        outer = (self.outer.expand(3, 4) * y).sum()
        total: Tensor = (low.detach() + low).sum() + outer + values.sum()
        return total


class Scaled(nn.Module):
    """Backward reads the buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y.sum()


def test_the_canonical_form_holds_point_by_point() -> None:
    captured = capture(Canonical(), (torch.ones(3, 4),))
    nodes = canonical(captured)
    # (1) no detach
    assert not any(n.target is torch.ops.aten.detach.default for n in nodes)
    # (3) gradients own distinct, dense storages
    gradients = captured.signature()[2]
    results: Any = captured.joint.graph.output_node().args[0]
    values = [
        (results[position].meta["val"], target.meta["val"]) for position, target in gradients
    ]
    assert all(g.stride() == p.stride() for g, p in values)
    assert len({g.untyped_storage()._cdata for g, _ in values}) == len(values)
    # (4) getitem follows its op
    for node in nodes:
        if node.target is operator.getitem:
            before = node.prev
            while before.target is operator.getitem:
                before = before.prev
            assert before is node.args[0]
    # (5) what is unused is gone, but for random ops
    unused = [n for n in nodes if n.op == "call_function" and not n.users]
    assert [is_random(n) for n in unused] == [True]


def test_backward_reads_a_clone_of_what_the_step_updates() -> None:
    captured = capture(Scaled(), (torch.ones(3, 4),))
    gradients = captured.signature()[2]
    placeholders = [n for n in captured.joint.graph.nodes if n.op == "placeholder"]
    scale = placeholders[len(captured.parameters)]
    assert any(is_backward(user) for user in scale.users)
    canonicalize(captured.joint, [scale], gradients)
    assert not any(is_backward(user) for user in scale.users)
    (clone,) = [user for user in scale.users if user.target is torch.ops.aten.clone.default]
    assert not is_backward(clone)
    assert all(is_backward(user) for user in clone.users)


def test_a_gradient_that_something_else_owns_is_copied_in_the_graph() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3))
            self.b = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.a + self.b + x

    nodes = canonical(capture(Twice(), (torch.ones(3),)))
    assert sum(n.target is dense_clone for n in nodes) == 2  # both would be the tangent itself


def test_lifting_finds_storages_phases_roles_and_origins() -> None:
    graph = lifted(capture(Canonical(), (torch.ones(3, 4),)))
    op = {op.name: op for op in graph.ops}
    value = {v.name: v for v in graph.values}
    weight = op["t"].operands[0]
    assert weight in graph.inputs
    assert value["t"].storages == graph.values[weight].storages
    assert graph.is_alias(op["t"])
    assert graph.ops[graph.border].target == BORDER
    phases = [o.phase for o in graph.ops]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index)
    linear = op["addmm"]
    assert (linear.module, linear.source.split(":")[0]) == ("linear", "test_ir_capture.py")
    roles = {graph.storages[s].role for v in graph.inputs for s in graph.values[v].storages}
    assert roles == {Role.PARAMETER, Role.BUFFER, Role.INPUT}
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            storages = graph.values[output.value].storages
            assert [graph.storages[s].role for s in storages] == [Role.GRADIENT]
    assert all(o.pinned for o in graph.ops if o.phase is Phase.BACKWARD)
    assert "chooses indices" in op["topk"].pinned
    reads = [o for o in graph.ops if "which the step updates" in o.pinned]
    assert [o.target for o in reads] == ["aten.mul.Tensor", "aten.add.Tensor"]
