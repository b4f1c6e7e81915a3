"""What a training script does beside the step, with a drop-in as with the model itself.

Every drop-in here is made as scripts make it: no example, the plan is made on the first training call.
"""

import copy
import functools
import io
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
import zoo
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from twins import same

from remat import StepProtocol, measure_peak, optimize_checkpoints

BATCH = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
TARGET = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
QUICK: dict[str, Any] = {"gap": 1.0, "time_limit_s": 2.0}


class Net(nn.Module):
    """A loss inside, dropout, and layers that can be frozen."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        layers = [
            (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.2)) for _ in range(depth)
        ]
        self.layers = nn.Sequential(*(module for layer in layers for module in layer))

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return (self.layers(x) - target).pow(2).mean()


def net() -> Any:
    torch.manual_seed(0)
    return Net().train()


def budget(model: nn.Module, *args: Any, **options: Any) -> str:
    """Between the least peak and eager's, bytes."""
    plan: Any = optimize_checkpoints(model, "1TB", args, **QUICK, **options)
    plan = plan.remat.plan
    return f"{(plan.least_peak_bytes + plan.baseline_peak_bytes) // 2}B"


@functools.cache
def usual_cap() -> str:
    """For `net`."""
    return budget(net(), BATCH, TARGET)


def lazy(model: nn.Module, cap: str = "", **options: Any) -> Any:
    """A drop-in without a plan so far, for a cap that needs recomputation."""
    cap = cap or usual_cap()
    return optimize_checkpoints(model, cap, **QUICK, **options)


def back(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def train(model: Any, *batches: tuple[Tensor, Tensor], optimizer: Any = None) -> list[Any]:
    """One step on each batch; all that they computed."""
    seen: list[Any] = []
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, target in batches or [(BATCH, TARGET)] * 2:
        loss = model(x, target)
        loss.backward()
        seen += [loss.detach().clone(), torch.get_rng_state()]
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_autocast_with_a_scaler_and_clipping(dtype: torch.dtype) -> None:
    def run(model: Any) -> list[Any]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        seen: list[Any] = []
        for _ in range(3):
            with torch.autocast("cpu", dtype):
                loss = model(BATCH, TARGET)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [
                loss.detach().clone(),
                norm,
                *(p.detach().clone() for p in model.parameters()),
            ]
        return seen

    with torch.autocast("cpu", dtype):
        cap = budget(net(), BATCH, TARGET, optimizer="sgd")
    model = lazy(net(), cap)
    assert same(run(model), run(net()))
    assert (model.remat.stats.planned, model.remat.stats.plans) == (3, 1)
    assert not model.remat.plan.is_eager


def test_accumulation_is_noticed_and_planned_for() -> None:
    def run(model: Any) -> list[Any]:
        torch.manual_seed(1)
        for _ in range(3):
            (model(BATCH, TARGET) / 3).backward()
        return [p.grad for p in model.parameters()]

    model = lazy(
        net(), budget(net(), BATCH, TARGET, protocol=StepProtocol(gradients_resident=True))
    )
    assert same(run(model), run(net()))
    assert (model.remat.stats.planned, model.remat.stats.plans) == (3, 2)
    assert model.remat.plan.protocol.gradients_resident


def test_evaluation_between_steps() -> None:
    def run(model: Any) -> list[Any]:
        seen = train(model, (BATCH, TARGET))
        model.eval()
        with torch.no_grad():
            seen.append(model(BATCH[:7], TARGET[:7]))
        seen.append(model(BATCH, TARGET).detach())
        model.train()
        return [*seen, *train(model, (BATCH, TARGET))]

    model = lazy(net())
    assert same(run(model), run(net()))
    assert (model.remat.stats.planned, model.remat.stats.plans) == (2, 1)
    assert not model.remat.stats.fallbacks


def freeze(model: Any, frozen: bool) -> None:
    """The lower layers."""
    for layer in model.layers[:12]:
        layer.requires_grad_(not frozen)


def test_freezing_and_unfreezing_are_followed_by_plans_that_fit() -> None:
    def run(model: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for frozen in (False, True, False, True):
            freeze(model, frozen)
            seen += train(model, (BATCH, TARGET), optimizer=optimizer)
        return seen

    model = lazy(net())
    with pytest.warns(UserWarning, match="made another plan: .* has been frozen"):
        assert same(run(model), run(net()))
    stats = model.remat.stats
    assert (stats.planned, stats.plans, sum(stats.fallbacks.values())) == (4, 2, 0)


def test_gradients_under_autocast_are_those_of_a_backward_outside_of_it() -> None:
    kwargs = zoo.build("gpt2").kwargs

    def run(model: Any) -> list[Any]:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**kwargs).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    model: Any = optimize_checkpoints(gpt2(), "1TB", recompute=("*.mlp",), **QUICK)
    assert same(run(model), run(gpt2()))  # attention's backward multiplies in float32
    assert not model.remat.plan.is_eager


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_another_type_of_the_parameters_is_planned_anew(dtype: torch.dtype) -> None:
    def run(model: Any) -> list[Any]:
        seen = train(model)
        model.to(dtype)
        return [*seen, *train(model, (BATCH.to(dtype), TARGET.to(dtype)))]

    model = lazy(net(), "1GB")
    with pytest.warns(UserWarning, match="made another plan"):
        assert same(run(model), run(net()))
    stats = model.remat.stats
    assert (stats.planned, stats.plans, sum(stats.fallbacks.values())) == (3, 2, 0)


def test_a_short_last_batch_is_planned_for_once_and_then_every_size() -> None:
    def run(model: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sizes = (48, 48, 20, 48, 33, 20)
        return train(model, *((BATCH[:n], TARGET[:n]) for n in sizes), optimizer=optimizer)

    model = lazy(net())
    with pytest.warns(UserWarning, match=r"another plan: tensor argument 0 is float32\[20, 32\]"):
        assert same(run(model), run(net()))
    stats = model.remat.stats
    assert (stats.planned, stats.plans, sum(stats.fallbacks.values())) == (6, 2, 0)
    assert model.remat.plan.sizes == {"x_0": 48}
    assert model.remat.peak_at(x_0=20) < model.remat.plan.budget_bytes


@pytest.mark.slow
def test_a_larger_batch_is_planned_under_the_same_cap_or_refused() -> None:
    model = lazy(net())
    train(model)
    with pytest.warns(UserWarning, match="made another plan"):
        train(model, (torch.cat([BATCH, BATCH[:2]]), torch.cat([TARGET, TARGET[:2]])))
    assert model.remat.plan.peak_bytes <= model.remat.plan.budget_bytes
    assert model.remat.stats.plans == 2
    model = lazy(net(), on_new_size="refuse", cap="1GB")
    train(model)
    with pytest.raises(Exception, match="no plan covers this call"):
        train(model, (BATCH[:3], TARGET[:3]))


def test_a_change_that_cannot_be_planned_falls_back_with_the_reason() -> None:
    whole: Any = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).train()
    loss_fn = lambda output: (output - TARGET).pow(2).sum()  # noqa: E731
    model: Any = optimize_checkpoints(whole, "1GB", loss_fn=loss_fn, **QUICK)
    back(mse_loss(model(BATCH), TARGET))
    with pytest.warns(UserWarning, match="cannot be planned: RuntimeError"):
        model(BATCH[:5])
    back(mse_loss(model(BATCH[:5]), TARGET[:5]))
    assert model.remat.stats.planned == 1
    assert sum(model.remat.stats.fallbacks.values()) == 2


class Checkpointed(Net):
    """Half of it runs again in backward."""

    reentrant = False

    def forward(self, x: Tensor, target: Tensor) -> Any:
        x = checkpoint(self.layers[:12], x, use_reentrant=self.reentrant)
        return (self.layers[12:](x) - target).pow(2).mean()


class Reentrant(Checkpointed):
    reentrant = True


def runs_of(model: Any) -> int:
    """How often one layer runs in a step."""
    counts: list[int] = []
    with torch.profiler.profile() as record:
        model(BATCH.clone().requires_grad_(), TARGET).backward()
    counts = [e.count for e in record.key_averages() if e.key == "aten::native_layer_norm"]
    return counts[0]


@pytest.mark.parametrize("kind", [Checkpointed, pytest.param(Reentrant, marks=pytest.mark.slow)])
def test_checkpointing_inside_is_taken_over(kind: type[Net]) -> None:
    torch.manual_seed(0)
    plain = kind().train()
    batches = [(BATCH.clone().requires_grad_(), TARGET)] * 2
    model = lazy(copy.deepcopy(plain), "1GB")
    with pytest.warns(UserWarning, match="checkpoints parts of itself") as caught:
        planned = train(model, *batches)
    assert len(caught) == 1
    assert same(planned, train(plain, *batches))
    assert model.remat.stats.planned == 2
    assert (runs_of(model), runs_of(plain)) == (5, 8)


def test_the_checkpointing_of_transformers_is_taken_over() -> None:
    case, plain = zoo.build("gpt2"), zoo.build("gpt2")
    original: Any = plain.model
    plan: Any = optimize_checkpoints(plain.model, "1TB", (), case.kwargs, **QUICK)
    cap = f"{plan.remat.plan.baseline_peak_bytes + 10**6}B"
    model: Any = optimize_checkpoints(case.model, cap, **QUICK)

    def run(model: Any) -> list[Any]:
        torch.manual_seed(1)
        loss = model(**case.kwargs).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    assert same(run(model), run(plain.model))
    assert model.remat.plan.is_eager
    for one in (model, original):
        one.zero_grad()
        one.activation_checkpointing_enable()
    with pytest.warns(UserWarning, match="remat: ") as caught:
        assert same(run(model), run(plain.model))
    messages = " ".join(str(w.message) for w in caught)
    assert "checkpoints parts of itself" in messages
    assert "another plan: hooks of a submodule" in messages
    assert (model.remat.stats.planned, model.remat.stats.plans) == (2, 2)
    assert not model.remat.plan.is_eager  # planned without recomputation, unlike the original
    assert not [t for t in model.remat.plan.recomputed if t.bytes > 0]
    assert model.is_activation_checkpointing


def test_an_exception_in_forward_leaves_the_next_step_fine() -> None:
    case, plain = zoo.build("gpt2"), zoo.build("gpt2")
    model: Any = optimize_checkpoints(case.model, "1GB", (), case.kwargs, **QUICK)
    ids = case.kwargs["input_ids"] + zoo.VOCABULARY
    wrong = case.kwargs | {"input_ids": ids, "labels": ids}
    before = torch.get_rng_state()
    with pytest.raises(IndexError):
        model(**wrong)
    torch.set_rng_state(before)
    loss = model(**case.kwargs).loss
    torch.set_rng_state(before)
    assert torch.equal(loss, plain.model(**case.kwargs).loss)
    loss.backward()
    assert model.remat.outstanding == 0


@pytest.mark.parametrize("part", ["planner.prepare", "planner.step_of", "making.make_guard"])
def test_an_interrupt_during_planning_leaves_everything_as_it_was(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = part.partition(".")
    where = import_module(f"remat.{module}")
    real = getattr(where, name)

    def interrupted_after(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    model, plain = lazy(net(), "1GB"), net()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupted_after)
        leaves_everything(model, interrupted=True)
    assert same(train(model), train(plain))
    assert not model.remat.stats.fallbacks


def leaves_everything(model: Any, *, interrupted: bool) -> None:
    """A first call that may be interrupted; if it is, nothing has moved, the random state included."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    ids = [id(p) for p in model.parameters()]
    before = torch.get_rng_state()
    try:
        model(BATCH, TARGET)
        assert not interrupted
    except KeyboardInterrupt:
        assert torch.equal(torch.get_rng_state(), before)
    assert [id(p) for p in model.parameters()] == ids
    assert same(list(model.state_dict().items()), list(state.items()))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # inside a weakref's callback
@pytest.mark.parametrize("after", [0.02, 0.1, 0.2, 0.3, 0.6])
def test_an_interrupt_at_any_time_leaves_everything_as_it_was(after: float) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model, plain = lazy(net(), "1GB"), net()
    was = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        leaves_everything(model, interrupted=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
    assert same(train(model), train(plain))
    assert not model.remat.stats.fallbacks


def test_a_model_that_is_trained_past_its_drop_in_is_reported() -> None:
    model = lazy(net(), "1GB")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    back(mse_loss(model.layers(BATCH), TARGET))
    optimizer.step()
    optimizer.step()
    with pytest.warns(UserWarning, match="no training call has come to its forward") as caught:
        optimizer.step()
    optimizer.step()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_an_average_of_the_weights() -> None:
    def run(model: Any) -> list[Any]:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        seen = []
        for _ in range(3):
            seen += train(model, (BATCH, TARGET))
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            return [*seen, average(BATCH, TARGET), list(average.state_dict().items())]

    model = lazy(net())
    assert same(run(model), run(net()))
    assert (model.remat.stats.planned, model.remat.stats.plans) == (3, 1)


def gpt2() -> Any:
    return zoo.build("gpt2").model


def adapters(model: nn.Module) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).train()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("outside", [pytest.param(True, marks=pytest.mark.slow), False])
def test_low_rank_adapters_train_and_are_saved(outside: bool, tmp_path: Path) -> None:
    kwargs = zoo.build("gpt2", large=True).kwargs

    def run(model: Any) -> list[Any]:
        torch.manual_seed(1)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        seen = []
        for _ in range(2):
            loss = model(**kwargs).loss
            loss.backward()
            seen += [loss.detach(), *(p.grad for p in trained)]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *trained]

    plan: Any = optimize_checkpoints(adapters(gpt2()), "1TB", (), kwargs, **QUICK)
    plan = plan.remat.plan
    cap = f"{(plan.least_peak_bytes + plan.baseline_peak_bytes) // 2}B"
    model: Any
    planned: Any
    if outside:
        model = planned = optimize_checkpoints(adapters(gpt2()), cap, **QUICK)
    else:
        planned = optimize_checkpoints(gpt2(), cap, **QUICK)
        model = adapters(planned)
    plain = adapters(gpt2())
    assert same(run(model), run(plain))
    assert vars(planned)["remat"].stats.planned == 2
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "ours")
    assert same(list(loaded.state_dict().items()), list(plain.state_dict().items()))


def test_generating_and_saving_between_steps(tmp_path: Path) -> None:
    kwargs = zoo.build("gpt2").kwargs

    def run(model: Any, folder: Path) -> list[Any]:
        torch.manual_seed(1)
        seen = []
        for _ in range(2):
            model.train()
            loss = model(**kwargs).loss
            loss.backward()
            model.eval()
            prompt = kwargs["input_ids"][:1, :4]
            seen += [loss.detach(), model.generate(prompt, max_new_tokens=4, do_sample=False)]
        model.save_pretrained(folder)
        return [*seen, *(p.grad for p in model.parameters())]

    model: Any = optimize_checkpoints(gpt2(), "1GB", **QUICK)
    plain = gpt2()
    assert same(run(model, tmp_path / "ours"), run(plain, tmp_path / "plain"))
    assert model.remat.stats.planned == 2
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert type(loaded) is hf.GPT2LMHeadModel
    assert same(list(loaded.state_dict().items()), list(plain.state_dict().items()))
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "plain" / name).read_text()


WITHOUT = """
import sys
sys.modules["remat"] = None  # importing it fails
import torch
checkpoint = torch.load(sys.argv[1], weights_only=False)
model = checkpoint["model"]
print(type(model).__name__, [list(p.shape) for p in model.parameters()][:1], checkpoint["step"])
"""


def test_a_checkpoint_loads_where_remat_is_not_installed(tmp_path: Path) -> None:
    model: Any = optimize_checkpoints(nn.Sequential(nn.Linear(4, 4)), "1GB", **QUICK)
    model(torch.randn(2, 4)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = {"model": model, "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, tmp_path / "checkpoint.pt")
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "checkpoint.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "Sequential [[4, 4]] 3"
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert list(torch.load(buffer)) == list(nn.Sequential(nn.Linear(4, 4)).state_dict())


@pytest.mark.parametrize("change", ["freeze", pytest.param("short batch", marks=pytest.mark.slow)])
def test_the_new_plan_is_what_the_allocator_measures(change: str) -> None:
    model = lazy(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer=optimizer)
    batch = (BATCH, TARGET)
    if change == "freeze":
        freeze(model, True)
    else:
        batch = (BATCH[:20].clone(), TARGET[:20].clone())

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match="made another plan"):
        step()
    plan = model.remat.plan
    predicted, resident = plan.peak_bytes, plan.resident_bytes
    if change == "short batch":
        predicted = model.remat.peak_at(x_0=20)
        resident -= sum(t.nbytes for t in (BATCH, TARGET)) - sum(t.nbytes for t in batch)
    assert measure_peak(step) == predicted - resident
