import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from remat.ir import Phase, Role, Trace, UnsupportedGraphError
from remat.measure import measure_peak
from remat.passes import eager_trace, measure_scratch, optimizer_trace, profile

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-3, weight_decay=0.1, foreach=True),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
}


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))


def step_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[[Any], Tensor],
    optimizer: torch.optim.Optimizer | None,
    resident: bool,
    held: bool,
) -> Callable[[], None]:
    """The real step that `eager_trace` describes."""

    def step() -> None:
        output = model(*args, **kwargs)
        loss = loss_fn(output)
        if not held:
            del output
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
        if not resident:
            model.zero_grad()

    return step


def predicted(trace: Trace) -> int:
    found = profile(trace)
    return found.peak - found.resident


def assert_equal_bytes(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss_fn: Callable[[Any], Tensor] = mean_square,
    make: MakeOptimizer | None = None,
    resident: bool = False,
    held: bool = False,
) -> None:
    optimizer = make(model.parameters()) if make else None
    trace = eager_trace(
        model,
        args,
        kwargs or {},
        loss_fn=loss_fn,
        optimizer=optimizer,
        gradients_resident=resident,
        outputs_held=held,
        scratch=measure_scratch,
    )
    step = step_of(model, args, kwargs or {}, loss_fn, optimizer, resident, held)
    assert predicted(trace) == measure_peak(step, warmup=2)


SLOW = ["llama", "t5", "resnet", "whisper", "unet2d", "vae", "dlrm", "transformer"]


@pytest.mark.parametrize(
    "name", ["gpt2", "bert", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_models_peak_as_predicted(name: str) -> None:
    zoo = pytest.importorskip("zoo")
    case = zoo.build(name)
    loss_fn = case.loss_fn or (lambda output: output.loss)
    assert_equal_bytes(case.model, case.args, case.kwargs, loss_fn, torch.optim.AdamW)


@pytest.mark.parametrize(
    ("name", "resident", "held"),
    [("gpt2", True, False), ("gpt2", False, True), ("mlp", True, True), ("mlp", False, False)],
)
def test_protocols_peak_as_predicted(name: str, resident: bool, held: bool) -> None:
    zoo = pytest.importorskip("zoo")
    case = zoo.build(name)
    loss_fn = case.loss_fn or (lambda output: output.loss)
    assert_equal_bytes(case.model, case.args, case.kwargs, loss_fn, resident=resident, held=held)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizers_peak_as_predicted(name: str) -> None:
    model, x = small_model(), torch.randn(2, 16)
    optimizer = OPTIMIZERS[name](model.parameters())
    step = step_of(model, (x,), {}, mean_square, optimizer, False, False)

    def trace() -> Trace:
        return eager_trace(
            model, (x,), {}, loss_fn=mean_square, optimizer=optimizer, scratch=measure_scratch
        )

    fresh = trace()
    for _ in range(8):
        step()
    measured = measure_peak(step)
    assert predicted(fresh) == predicted(trace()) == measured


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(8, 8),
    lambda: nn.Linear(8, 8, bias=False),
    nn.GELU,
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.Tanh,
    lambda: nn.Dropout(0.5),
    lambda: nn.LayerNorm(8),
    lambda: nn.BatchNorm1d(8),
    lambda: nn.Softmax(dim=1),
]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    picks=st.lists(st.integers(0, len(LAYERS) - 1), min_size=1, max_size=6),
    batch=st.integers(2, 9),
    resident=st.booleans(),
    held=st.booleans(),
)
def test_random_sequences_of_layers_peak_as_predicted(
    picks: Sequence[int], batch: int, resident: bool, held: bool
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(LAYERS[i]() for i in picks), nn.Linear(8, 8))
    x = torch.randn(batch, 8)
    assert_equal_bytes(model, (x,), make=torch.optim.AdamW, resident=resident, held=held)


def test_roles_and_phases() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    trace = eager_trace(model, (torch.randn(2, 16),), {}, loss_fn=mean_square, optimizer=optimizer)
    sizes = {role: sum(int(b.size) for b in trace.blocks if b.role is role) for role in Role}
    parameters = 4 * (16 * 32 + 32 + 32 * 8 + 8)
    assert sizes[Role.PARAMETER] == sizes[Role.GRADIENT] == parameters
    assert sizes[Role.OPTIMIZER_STATE] == 2 * parameters + 4 * 4
    assert sizes[Role.INPUT] == 4 * 2 * 16
    assert sizes[Role.OUTPUT] == 4 * 2 * 8
    assert sizes[Role.TANGENT] == 4
    assert sizes[Role.ACTIVATION] > 0
    phases = [instant.phase for instant in trace.instants]
    assert phases == sorted(phases, key=list(Phase).index)
    assert len({instant.name for instant in trace.instants}) == len(trace.instants)
    assert {instant.module for instant in trace.instants} >= {"0", "1", "2", "3"}
    assert "0.weight.grad" in {block.name for block in trace.blocks}


def test_optimizer_trace_is_the_step_alone() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    trace = optimizer_trace(list(model.parameters()), optimizer, scratch=measure_scratch)
    assert not optimizer.state
    assert {instant.phase for instant in trace.instants} == {Phase.OPTIMIZER}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert predicted(trace) == measure_peak(lambda: optimizer.step())


def test_tied_parameters_are_one_block() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    trace = eager_trace(model, (torch.randn(2, 8),), {}, loss_fn=mean_square)
    assert sum(b.role is Role.PARAMETER for b in trace.blocks) == 3
    assert_equal_bytes(model, (torch.randn(2, 8),), make=torch.optim.AdamW)


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.weight * x
        return y.sum(), y * 2


def test_without_a_loss_function_backward_starts_from_scalars() -> None:
    trace = eager_trace(Scalars(), (torch.randn(6),), {})
    tangents = [block for block in trace.blocks if block.role is Role.TANGENT]
    assert [int(block.size) for block in tangents] == [4]


def test_without_scalars_backward_starts_from_every_tensor() -> None:
    trace = eager_trace(small_model(), (torch.randn(2, 16),), {})
    tangents = [block for block in trace.blocks if block.role is Role.TANGENT]
    assert [int(block.size) for block in tangents] == [4 * 2 * 8]


class Branch(nn.Module):
    """Allocates more if its mask has a zero, and keeps what it saw."""

    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen = None
        self.log: list[Tensor] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.seen = x
        self.log.append(x)
        if not (mask == 1).all():
            x = x.tanh().exp()
        return self.linear(x).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mask", [[1, 1], [1, 0]])
def test_branches_are_those_of_the_real_values(mask: list[int]) -> None:
    trace = eager_trace(Branch(), (torch.randn(2, 8), torch.tensor(mask)), {})
    assert ("exp" in {instant.name for instant in trace.instants}) == (0 in mask)


def test_values_that_are_not_known_are_refused() -> None:
    with pytest.raises(UnsupportedGraphError, match="depends on values"):
        eager_trace(Branch(), (torch.randn(2, 8), torch.ones(2, device="meta")), {})


def test_everything_is_left_as_it_was() -> None:
    class Failing(Branch):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            super().forward(x, mask)
            torch.rand(())
            raise RuntimeError("in the forward")

    model, x = Failing(), torch.randn(2, 8)
    model.linear.weight.grad = torch.ones(8, 8)
    grad, weight = model.linear.weight.grad, model.linear.weight
    optimizer = torch.optim.AdamW(model.parameters())
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    attributes = {k: id(v) for m in model.modules() for k, v in m.__dict__.items()}
    with pytest.raises(RuntimeError, match="in the forward"):
        eager_trace(model, (x, torch.tensor([1, 0])), {}, optimizer=optimizer)
    assert model.linear.weight is weight
    assert weight.grad is grad
    assert model.seen is None
    assert model.log == []
    assert not optimizer.state
    assert not model.linear._forward_hooks
    assert {k: id(v) for m in model.modules() for k, v in m.__dict__.items()} == attributes
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_parameters_without_data_are_enough() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.Linear(100_000, 1))
    trace = eager_trace(model, (torch.empty(1, 100_000, device="meta"),), {})
    assert profile(trace).resident == 4 * (10**10 + 10**5 + 10**5 + 1 + 10**5)


def test_a_trainable_tensor_outside_the_model_is_refused() -> None:
    outside = torch.ones(8, requires_grad=True)

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * outside

    with pytest.raises(UnsupportedGraphError, match="neither a parameter nor an argument"):
        eager_trace(Uses(), (torch.randn(8),), {})
    assert outside.grad is None
