"""Programs that are found without capturing: recordings, what is run, stale files, explanations."""

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
from modules import builders
from torch import Tensor, nn
from torch.nn import functional
from twins import Step, least, make, record, same

import remat.planner
from remat import optimize_checkpoints
from remat.ir import capture as capturing
from remat.ir.recording import record_step

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
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        result: Tensor = 2 * ctx.saved_tensors[0] * gradient
        return result


def custom(x: Tensor) -> Tensor:
    result: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return result


def twice(gradient: Tensor) -> Tensor:
    return gradient * 2


def thrice(gradient: Tensor) -> Tensor:
    return gradient * 3


def hooked(hook: Any) -> Any:
    def function(x: Tensor) -> Tensor:
        y = x * x
        y.register_hook(hook)  # type: ignore[no-untyped-call]
        return y

    return function


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self.linear(x)).tanh().sum()
        return result


def test_backward_in_python_is_recorded(
    tmp_path: Path, no_capture: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = (custom, hooked(twice), hooked(thrice), lambda x: x * x)
    nets = [make(lambda function=function: Apply(function)) for function in functions]  # type: ignore[misc]
    digests = [digest(net) for net in nets]
    assert len(set(digests)) == len(functions)
    monkeypatch.setattr(Square, "backward", lambda ctx, gradient: gradient * 5)
    assert digest(nets[0]) not in digests
    for captured in (True, False):
        model = planned(10**12, tmp_path, lambda: Apply(custom), recompute=("::aten.mul*",))
        assert same(record(model, STEP_OF_ONE), record(nets[0], STEP_OF_ONE))
        assert model.remat.planned.from_file is not captured
        nets[0] = make(lambda: Apply(custom))
        no_capture()


TABLE = torch.arange(2.0**21)


def test_what_a_recording_cannot_tell_is_captured(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Apply(lambda x: x * TABLE[: x.shape[-1]])

    net = make(build)
    assert record_step(net, net.forward, STEP.args, {}) is None
    for _ in range(2):
        model = planned(10**12, tmp_path, build)
        assert same(record(model, STEP_OF_ONE), record(make(build), STEP_OF_ONE))
    assert not list(tmp_path.glob("*.program"))


STEP_OF_ONE = Step(STEP.args, loss=lambda output: output)


def test_a_recording_leaves_everything_as_it_was() -> None:
    net, plain = make(Net), make(Net)
    digest(net)
    assert same(record(net, STEP), record(plain, STEP))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
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
