"""The one-liner under other people's trainers: the same losses, every step planned, memory as predicted.

No example is given: the plan is made of what the trainer really passes, on its first training call.
"""

import functools
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
import zoo
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from twins import same

from remat import StepProtocol, measure_peak, optimize_checkpoints

QUICK: dict[str, Any] = {"gap": 1.0, "time_limit_s": 2.0}
BATCH, LENGTH = 4, 32
EXAMPLE = {
    name: torch.randint(2, zoo.VOCABULARY, (BATCH, LENGTH)) for name in ("input_ids", "labels")
}
IN_ADVANCE = sum(t.nbytes for t in EXAMPLE.values())
"""Bytes of a batch: trainers fetch one while another is in use."""
SCALARS = 64
"""Bytes that a trainer may hold in sums of losses and counts."""


class Text(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, zoo.VOCABULARY, (rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def gpt2() -> Any:
    return zoo.build("gpt2").model


@functools.cache
def cap(dtype: torch.dtype | None, protocol: StepProtocol) -> str:
    """A third of the way from the least peak of GPT-2 to eager's, bytes."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        plan: Any = optimize_checkpoints(gpt2(), "1TB", (), EXAMPLE, protocol=protocol, **QUICK)
    plan = plan.remat.plan
    return f"{(2 * plan.least_peak_bytes + plan.baseline_peak_bytes) // 3}B"


def capped(dtype: torch.dtype | None = None, **protocol: Any) -> Any:
    """GPT-2 that recomputes."""
    asked = StepProtocol(**protocol)
    return optimize_checkpoints(gpt2(), cap(dtype, asked), protocol=asked, **QUICK)


class Recorded(hf.Trainer):  # type: ignore[misc]
    """Keeps the exact losses."""

    seen: list[Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.seen.append(loss.detach().clone())
        return loss


def trainer(model: nn.Module, folder: Path, rows: int, **options: Any) -> Recorded:
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = hf.TrainingArguments(str(folder), **(settings | options))
    made = Recorded(model=model, args=arguments, train_dataset=Text(rows), eval_dataset=Text(3))
    made.seen = []
    return made


@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data.dataloader")
@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [
        pytest.param(None, 1, marks=pytest.mark.slow),
        (torch.bfloat16, 1),
        pytest.param(None, 2, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 2, marks=pytest.mark.slow),
    ],
)
def test_a_transformers_trainer(
    tmp_path: Path, dtype: torch.dtype | None, accumulate: int
) -> None:
    options = {"bf16": dtype is not None, "gradient_accumulation_steps": accumulate}
    plain = trainer(gpt2(), tmp_path / "plain", 2 * BATCH * accumulate, **options)
    plain.train()
    ahead = accumulate * IN_ADVANCE + SCALARS
    if dtype is not None:  # accelerate makes float32 copies of the outputs
        ahead += BATCH * LENGTH * zoo.VOCABULARY * 4
    model = capped(dtype, outputs_held=False, other_bytes=ahead, gradients_resident=accumulate > 1)
    ours = trainer(model, tmp_path / "ours", 2 * BATCH * accumulate, **options)
    ours.train()
    assert same(ours.seen, plain.seen)
    assert not torch.is_autocast_enabled("cpu")  # accelerate enters one context again and again
    stats, plan = model.remat.stats, model.remat.plan
    assert (stats.planned, stats.plans, sum(stats.fallbacks.values())) == (4 * accumulate, 1, 0)
    assert not plan.is_eager
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert stats.planned == 4 * accumulate
    before = plan.resident_bytes - IN_ADVANCE - ahead
    if accumulate > 1:
        before -= sum(p.nbytes for p in model.parameters())  # gradients are not there between runs
    left = plan.peak_bytes - before - measure_peak(ours.train)
    assert 0 <= left <= (SCALARS if dtype is None else ahead)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data.dataloader")
def test_a_transformers_trainer_saves_resumes_and_meets_a_short_last_batch(tmp_path: Path) -> None:
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 2}
    plain = trainer(gpt2(), tmp_path / "plain", 2 * BATCH + 2, **options)
    plain.train()
    model = capped()
    ours = trainer(model, tmp_path / "ours", 2 * BATCH + 2, **options)
    with pytest.warns(UserWarning, match=r"another plan: tensor argument 0 is int64\[2, 32\]"):
        ours.train()
    assert same(ours.seen, plain.seen)
    stats = model.remat.stats
    assert (stats.planned, stats.plans, sum(stats.fallbacks.values())) == (6, 2, 0)
    for step in ("checkpoint-3", "checkpoint-6"):
        saved = [
            load_file(tmp_path / who / step / "model.safetensors") for who in ("ours", "plain")
        ]
        assert same(*(sorted(each.items()) for each in saved))
    del model, ours  # what another model holds is counted
    resumed = trainer(capped(), tmp_path / "ours", 2 * BATCH + 2, **options)
    with pytest.warns(UserWarning, match="another plan"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert same(resumed.seen, plain.seen[3:])
    assert type(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-6")) is (
        hf.GPT2LMHeadModel
    )


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.slow), "bf16"])
def test_accelerate_with_accumulation_and_clipping(precision: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else None

    def run(model: Any) -> list[Any]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = DataLoader(Text(4 * BATCH), batch_size=BATCH)
        prepared, optimizer, data = accelerator.prepare(model, optimizer, data)
        torch.manual_seed(1)
        seen = []
        for batch in data:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(prepared.parameters(), 1.0).clone())
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach().clone())
        accelerator.save_model(prepared, str(tmp_path / type(model).__module__))
        unwrapped = accelerator.unwrap_model(prepared)
        assert unwrapped is model
        return [*seen, *(p.detach().clone() for p in unwrapped.parameters())]

    model = capped(dtype, gradients_resident=True)
    assert same(run(model), run(gpt2()))
    stats = model.remat.stats
    assert (stats.planned, stats.plans, sum(stats.fallbacks.values())) == (4, 1, 0)
    assert not model.remat.plan.is_eager


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()) for _ in range(4)]
        layers = [layer for block in blocks for layer in block]
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 64, 5))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


IMAGES = TensorDataset(
    torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 5
)


class Lit(LightningModule):  # type: ignore[misc]
    """`training_step` calls a module; `forward` does too."""

    def __init__(self, net: nn.Module, through: str = "net") -> None:
        super().__init__()
        self.net = net
        self.through = through
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, label = batch
        loss = cross_entropy(self.net(x) if self.through == "net" else self(x), label)
        self.log("loss", loss)
        self.seen.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, label = batch
        self.log("val", cross_entropy(self.net(x), label))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: Any, folder: Path, **options: Any) -> Any:
    torch.manual_seed(1)
    runner = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    runner.fit(module, DataLoader(IMAGES, batch_size=8), DataLoader(IMAGES, batch_size=8))
    runner.save_checkpoint(folder / "saved.ckpt")
    return torch.load(folder / "saved.ckpt", weights_only=False)


def classifier() -> Classifier:
    torch.manual_seed(0)
    return Classifier().train()


LIGHTNING = (
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
)


def lightning(test: Any) -> Any:
    for mark in LIGHTNING:
        test = mark(test)
    return test


@lightning
@pytest.mark.parametrize("whole", [False, True])
def test_lightning_with_a_module_inside_or_as_a_whole(whole: bool, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "plain").mkdir()
    torch.manual_seed(0)
    plain = Lit(classifier(), "self")
    saved = fit(plain, tmp_path / "plain", accumulate_grad_batches=1, gradient_clip_val=0.5)
    # Lightning clears the gradients between forward and backward.
    options = QUICK | {"protocol": StepProtocol(gradients_resident=True)}
    plan: Any = optimize_checkpoints(classifier(), "1TB", (IMAGES.tensors[0][:8],), **options)
    plan = plan.remat.plan
    budget = f"{(plan.least_peak_bytes + plan.baseline_peak_bytes) // 2}B"
    ours: Any
    if whole:
        ours = optimize_checkpoints(Lit(classifier(), "self"), budget, **options)
        remat = ours.remat
    else:
        ours = Lit(optimize_checkpoints(classifier(), budget, **options))
        remat = vars(ours.net)["remat"]
    again = fit(ours, tmp_path / "ours", accumulate_grad_batches=1, gradient_clip_val=0.5)
    assert same(ours.seen, plain.seen)
    assert (remat.stats.planned, remat.stats.plans) == (6, 1)
    assert not remat.stats.fallbacks
    assert not remat.plan.is_eager
    assert same(list(again["state_dict"].items()), list(saved["state_dict"].items()))


@lightning
def test_a_lightning_module_whose_training_step_does_not_call_it_is_reported(
    tmp_path: Path,
) -> None:
    ours: Any = optimize_checkpoints(Lit(classifier()), "1GB", **QUICK)
    with pytest.warns(UserWarning, match="no training call has come to its forward"):
        fit(ours, tmp_path)
