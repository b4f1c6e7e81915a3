"""Programs that are found without capturing: recordings, what is run, stale files, explanations."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import builders
from torch import Tensor, fx, nn
from torch.nn import functional
from twins import Step, least, make, record, same

import remat.planner
from remat import optimize_checkpoints
from remat.ir import capture as capturing
from remat.ir.recording import record_step
from remat.passes.graph_data import graph_data, graph_of

ROWS = 64


class Net(nn.Module):
    """Dropout, statistics, a constant, a view of a parameter, two outputs."""

    scale = 0.5

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.dropout(self.norm(self.first(x)).tanh().sin())
        y = self.second(y * torch.tensor([self.scale])).exp().sin()
        return y.sum(), y @ self.first.weight.T


def loss(output: Any) -> Tensor:
    result: Tensor = output[0]
    return result


STEP = Step((torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0)),), loss=loss)


@pytest.fixture(scope="module")
def budget() -> int:
    return least(make(Net), STEP)


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("captured")

    return lambda: monkeypatch.setattr(remat.planner, "prepare", fail)


def planned(
    budget: int, folder: Path, build: Callable[[], nn.Module] = Net, **options: Any
) -> Any:
    options = {"gap": 1.0, "time_limit_s": 5.0, "cache_dir": folder, **options}
    return optimize_checkpoints(make(build), f"{budget}B", STEP.args, **options)


@pytest.mark.parametrize("ample", [False, True], ids=["planned", "eager"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_second_start_runs_the_same_program_without_a_capture(
    ample: bool, verify: bool, budget: int, tmp_path: Path, no_capture: Callable[[], None]
) -> None:
    budget = 10**12 if ample else budget
    first = planned(budget, tmp_path)
    no_capture()
    second = planned(budget, tmp_path, verify=verify)
    assert (first.remat.planned.from_file, second.remat.planned.from_file) == (False, True)
    assert second.remat.plan == first.remat.plan
    assert second.remat.plan.is_eager is ample
    assert second.remat.planned.trace == first.remat.planned.trace
    for graph in ("forward_graph", "backward_graph"):
        graphs = [getattr(model.remat, graph) for model in (first, second)]
        assert ample or graphs[0].code == graphs[1].code
    assert same(record(second, STEP), record(make(Net), STEP))
    assert second.remat.stats.planned == 2
    assert (verify and not ample) is ("bit for bit" in second.remat.stats.verified)


def test_what_explains_a_plan_is_made_when_somebody_asks(budget: int, tmp_path: Path) -> None:
    first, second = planned(budget, tmp_path), planned(budget, tmp_path)
    assert second.remat.planned.from_file
    reports = [model.remat.report() for model in (first, second)]
    plans = [replace(report.plan, seconds={}) for report in reports]
    assert plans[0] == plans[1]
    assert reports[0].timeline == reports[1].timeline
    assert reports[0].baseline == reports[1].baseline


def test_a_change_after_a_second_start_is_planned_anew(budget: int, tmp_path: Path) -> None:
    planned(budget, tmp_path)
    planned(2 * budget, tmp_path)
    model = planned(2 * budget, tmp_path)
    plain: Any = make(Net)
    assert model.remat.planned.from_file
    for one in (model, plain):
        one.first.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="another plan"):
        assert same(record(model, STEP), record(plain, STEP))
    assert not model.remat.planned.from_file


def detached(net: Any) -> None:
    net.norm.register_forward_hook(lambda module, args, output: output.detach())


def without_gradients(net: Any) -> None:
    own = net.norm.forward

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = own(x)
        return result

    net.norm.forward = forward


def renamed(net: Any) -> None:
    net.third = net._modules.pop("second")
    type(net).second = property(lambda self: self.third)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "probability": lambda net: setattr(net.dropout, "p", 0.3),
    "constant": lambda net: setattr(net, "scale", 0.25),
    "mode": lambda net: net.norm.eval(),
    "frozen": lambda net: net.second.bias.requires_grad_(False),
    "detached": detached,
    "without gradients": without_gradients,
    "type": lambda net: net.second.bfloat16(),
    "tied": lambda net: setattr(net.norm, "bias", net.norm.weight),
    "strides": lambda net: setattr(
        net.first.weight, "data", net.first.weight.data.T.contiguous().T
    ),
    "no bias": lambda net: setattr(net.second, "bias", None),
    "another name": renamed,
}


def digest(net: Any, x: Tensor = STEP.args[0]) -> str:
    found = record_step(net, net.forward, (x,), {})
    assert found is not None
    return found.digest


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_step_has_another_recording(change: Callable[[Any], Any]) -> None:
    class Own(Net):
        """Its class may be changed."""

    one, two = make(Own), make(Own)
    assert digest(one) == digest(two)
    change(two)
    try:
        assert digest(one) != digest(two)
    except AssertionError:
        found = record_step(two, two.forward, STEP.args, {})
        assert found is None  # of two types, which do not multiply


def test_what_is_around_a_step_is_part_of_it() -> None:
    net, x = make(Net), STEP.args[0]
    plain = digest(net)
    assert digest(net, x[: ROWS // 2]) != plain
    assert digest(net, x.T.contiguous().T) != plain
    assert digest(net, x.clone().requires_grad_()) != plain
    with torch.autocast("cpu", torch.bfloat16):
        assert digest(net) != plain
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert digest(net) != plain
    finally:
        torch.set_num_threads(threads)
    assert digest(net, torch.zeros_like(x)) == plain


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None]:
        result = ctx.factor * ctx.saved_tensors[0] * gradient
        return (result if ctx.factor else None), None


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, swap: bool) -> Tensor:
        ctx.swap = swap
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        both = gradient * 2, gradient * 3
        return (*(both[::-1] if ctx.swap else both), None)


class Pair(nn.Module):
    """Two alike in all but `way`."""

    gate: Tensor
    shared: Tensor

    def __init__(self, kind: str, way: int) -> None:
        super().__init__()
        self.kind, self.way = kind, way
        self.linear = nn.Linear(8, 8)
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("gate", torch.full((8,), 5.0))
        self.register_buffer("shared", self.gate[:] if kind == "shared" and way else self.gate + 0)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        if self.kind == "number or tensor":  # the buffer's number among the tensors is 4
            h = h * (4 if self.way else self.gate)
        if self.kind == "function":
            h = Square.apply(h, (2.0, 3.0)[self.way])  # type: ignore[no-untyped-call]
        if self.kind == "function without a gradient":
            h = h * Square.apply(self.a, (2.0, 0.0)[self.way])  # type: ignore[no-untyped-call]
        if self.kind == "function that swaps":
            h = h * Swap.apply(self.a, self.b, bool(self.way))  # type: ignore[no-untyped-call]
        if self.kind == "hook of a tensor":
            h.register_hook(lambda gradient: gradient * (2, 3)[self.way])  # type: ignore[no-untyped-call]
        if self.kind == "hook of a node":
            h = h.sin()
            assert h.grad_fn is not None
            h.grad_fn.register_hook(lambda given, _: (given[0] * (2, 3)[self.way],))
        if self.kind == "shared":
            self.gate.add_(1)
            h = h * self.shared
        result: Tensor = h.tanh().sum()
        return result


KINDS = (
    "number or tensor",
    "function",
    "function without a gradient",
    "function that swaps",
    "hook of a tensor",
    "hook of a node",
    "shared",
)


@pytest.mark.parametrize("kind", KINDS)
def test_one_difference_makes_another_recording(kind: str) -> None:
    nets = [make(lambda way=way: Pair(kind, way)) for way in (0, 1, 0)]  # type: ignore[misc]
    digests = [digest(net) for net in nets]
    assert digests[0] == digests[2] != digests[1]


def test_backward_in_python_starts_again(tmp_path: Path, no_capture: Callable[[], None]) -> None:
    def build() -> nn.Module:
        return Pair("function", 1)

    for captured in (True, False):
        model = planned(10**12, tmp_path, build, recompute=("::aten.tanh*",))
        assert same(record(model, STEP_OF_ONE), record(make(build), STEP_OF_ONE))
        assert model.remat.planned.from_file is not captured
        no_capture()


class Scaled(nn.Module):
    """By a tensor that is neither parameter nor buffer, and may change between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.linear(x) * self.factor).tanh().sum()
        return result


def test_a_step_that_reads_a_tensor_of_its_own_is_captured(tmp_path: Path) -> None:
    net = make(Scaled)
    assert record_step(net, net.forward, STEP.args, {}) is None
    for _ in range(2):
        model: Any = planned(10**12, tmp_path, Scaled, recompute=("::aten.tanh*",))
        plain: Any = make(Scaled)
        for one in (model, plain):
            one.factor.mul_(0.5)
        assert same(record(model, STEP_OF_ONE), record(plain, STEP_OF_ONE))
    assert not list(tmp_path.glob("*.program"))


def test_what_explains_a_plan_is_made_in_the_mode_it_was_planned_in(tmp_path: Path) -> None:
    def report() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            model = planned(10**12, tmp_path, recompute=("::aten.sin*",))
        model.eval()
        found = model.remat.report().timeline
        assert not any(module.training for module in model.modules())
        return model.remat.planned.from_file, found

    (first, timeline), (second, again) = report(), report()
    assert (first, second) == (False, True)
    assert timeline == again


EVIL = (
    ["call_function", "x", {"function": "os:system"}, {"tuple": ["true"]}, {"dict": {}}],
    [
        "call_function",
        "x",
        {"function": "torch.utils.collect_env:run"},
        {"tuple": []},
        {"dict": {}},
    ],
    ["call_function", "x", {"torch": "load"}, {"tuple": ["file"]}, {"dict": {}}],
    ["call_function", "x", {"op": "aten.__class__.mro"}, {"tuple": []}, {"dict": {}}],
    ["placeholder", "x", "x = __import__('os').system('true')", {"tuple": []}, {"dict": {}}],
    ["placeholder", "x; print()", "x", {"tuple": []}, {"dict": {}}],
)


@pytest.mark.parametrize("row", EVIL)
def test_a_file_cannot_have_anything_called_but_ops(row: list[Any]) -> None:
    with pytest.raises((ValueError, KeyError, AttributeError)):
        graph_of({"rows": [row], "constants": {}})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.complex_numbers(),
        lambda inner: (
            st.lists(inner) | st.lists(inner).map(tuple) | st.builds(slice, inner, inner)
        ),
    )
)
def test_arguments_come_back_as_they_were(value: Any) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.relu.default, (value,), {"key": value}))
    again = graph_of(json.loads(json.dumps(graph_data(fx.GraphModule({}, graph)))))
    call = next(iter(again.graph.nodes))
    assert repr((call.args, call.kwargs)) == repr(((value,), {"key": value}))


STEP_OF_ONE = Step(STEP.args, loss=lambda output: output)


def test_a_recording_leaves_everything_as_it_was() -> None:
    net, plain = make(Net), make(Net)
    digest(net)
    assert same(record(net, STEP), record(plain, STEP))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(builders(2), builders(2))
def test_steps_with_one_recording_are_captured_alike(
    one: Callable[[], zoo.Case], other: Callable[[], zoo.Case]
) -> None:
    def found(build: Callable[[], zoo.Case]) -> tuple[str, str]:
        case = build()
        recording = record_step(case.model, case.model.forward, case.args, case.kwargs)
        assert recording is not None
        joint = capturing.capture(case.model, case.args, case.kwargs).joint
        return recording.digest, joint.code

    (first, code), (again, _), (second, others) = map(found, (one, one, other))
    assert first == again
    assert (first == second) <= (code == others)


@pytest.mark.parametrize("kind", ["cut short", "empty", "changed", "of another step", "no graph"])
def test_a_stale_program_is_reported_once_and_replaced(
    kind: str, budget: int, tmp_path: Path
) -> None:
    planned(budget, tmp_path)
    (path,) = tmp_path.glob("*.program")
    text = path.read_text()
    head, _, body = text.partition("\n")
    path.write_text(
        {
            "cut short": text[: len(text) // 2],
            "empty": "",
            "changed": text.replace("aten.sin.default", "aten.cos.default"),
            "of another step": head.replace(path.stem[:8], "0" * 8) + "\n" + body,
            "no graph": "{}\n{}",
        }[kind]
    )
    with pytest.warns(UserWarning, match="stale") as caught:
        again = planned(budget, tmp_path)
    assert len(caught) == 1
    assert same(record(again, STEP), record(make(Net), STEP))
    assert path.read_text() == text


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_starts import Net, digest, make
print(digest(make(Net)))
"""


@pytest.mark.slow  # test_api_cache has a like
def test_recordings_are_the_same_in_every_process() -> None:
    def found(seed: str) -> str:
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
        env = {"PYTHONHASHSEED": seed, "KINETO_LOG_LEVEL": "5"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
        return done.stdout

    assert found("1") == found("2")


def test_dropout_of_functional_is_recorded() -> None:
    class Functional(Net):
        p = 0.1

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            loss, y = super().forward(functional.dropout(x, self.p, self.training))
            return loss, y

    net: Any = make(Functional)
    before = digest(net)
    net.p = 0.2
    assert digest(net) != before


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_model_starts_again(
    name: str, tmp_path: Path, no_capture: Callable[[], None]
) -> None:
    def optimized(budget: int, folder: Path | None = None) -> Any:
        case = zoo.build(name)
        return optimize_checkpoints(
            case.model,
            f"{budget}B",
            case.args,
            case.kwargs,
            loss_fn=case.loss_fn,
            gap=1.0,
            time_limit_s=5.0,
            cache_dir=folder,
        )

    case = zoo.build(name)
    step = Step(case.args, case.kwargs, case.loss_fn or (lambda output: output.loss))
    ample = optimized(10**12).remat.plan
    budget = (ample.least_peak_bytes + ample.baseline_peak_bytes) // 2
    first = optimized(budget, tmp_path)
    no_capture()
    second = optimized(budget, tmp_path)
    assert second.remat.planned.from_file
    assert second.remat.plan == first.remat.plan
    assert same(record(second, step), record(case.model, step))
