"""Peaks that were measured on GPUs and published, reproduced without one; skipped without the data."""

import csv
import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import published
import pytest
import sympy
import torch
import transformers as hf
from korthikanti import Stack
from torch.nn import functional

import remat
from remat.passes.device_memory import (
    CAPABILITIES,
    TRANSFORMER_ENGINE_WORKSPACE,
    overheads_for,
)

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LIGER = DATA / "liger" / "peak_memory.csv"


def liger_rows() -> dict[tuple[str, str, str, str], list[tuple[int, float]]]:
    rows: dict[tuple[str, str, str, str], list[tuple[int, float]]] = defaultdict(list)
    if LIGER.exists():
        with LIGER.open() as file:
            for row in csv.DictReader(file):
                key = (
                    row["kernel_name"],
                    row["x_name"],
                    row["gpu_name"],
                    row["extra_benchmark_config_str"],
                )
                rows[key].append((int(row["x_value"]), float(row["y_value_50"])))
    return rows


@pytest.mark.skipif(not LIGER.exists(), reason="needs data/liger/peak_memory.csv")
@pytest.mark.parametrize("key", sorted(liger_rows()), ids=lambda key: f"{key[0]}-{key[2][7:11]}")
def test_liger_peaks(key: tuple[str, str, str, str]) -> None:
    name, symbol, gpu, config = key
    if name not in published.LIGER:
        pytest.skip(f"the step of {name} is not rebuilt")
    rows = liger_rows()[key]
    build = published.LIGER[name](json.loads(config))
    device = "a100-80gb" if "A100" in gpu else "h100"
    report = remat.analyze_step(build, {symbol: rows[0][0]}, device=device)
    for size, mib in rows:
        # Published through float32, which rounds from 2**14 MiB on.
        tolerance = 1024 if mib >= 2**14 else 0
        assert abs(report.peak_at(step="steady", **{symbol: size}) - mib * 2**20) <= tolerance


def decoder(cls: Any, config: Any, loss_fn: Any = None) -> tuple[Any, int]:
    """The report of a full bfloat16 fine-tune with checkpointing, and the number of parameters."""
    with torch.device("meta"):
        model = cls._from_config(config, dtype=torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.zeros(4, 2048, dtype=torch.long)
    kwargs = {"input_ids": ids, "use_cache": False} | ({} if loss_fn else {"labels": ids})
    report = remat.analyze(
        model,
        (),
        kwargs,
        loss_fn=loss_fn,
        optimizer="AdamW",
        dynamic={"input_ids": {0: "batch"}},
        device="a100-80gb",
    )
    return report, sum(parameter.numel() for parameter in model.parameters())


def bf16_loss(output: Any) -> torch.Tensor:
    """The loss of transformers 4.48, which the published run used: without float32 logits."""
    logits = output.logits[..., :-1, :].contiguous()
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


@pytest.mark.slow
def test_santacoder_is_bound_by_its_optimizer_at_4_and_by_activations_at_8() -> None:
    config = hf.GPTBigCodeConfig(
        n_layer=24, n_embd=2048, n_head=16, vocab_size=49280, n_positions=2048, multi_query=True
    )
    report, count = decoder(hf.GPTBigCodeForCausalLM, config, bf16_loss)
    assert count == 1_124_886_528
    small, large = report.at(batch=4), report.at(batch=8)
    assert small.peak_phase.phase.value == "optimizer step"
    assert abs(small.peak / 11_267_745_280 - 1) < 0.002
    assert large.peak_phase.phase.value != "optimizer step"


@pytest.mark.parametrize(("gpu", "bytes_"), [("a100-80gb", 552_128_512), ("h100", 581_489_664)])
def test_megatron_resident_bytes(gpu: str, bytes_: int) -> None:
    """`mem-allocated-bytes` of Megatron-LM's golden values, 8 ranks, CUBLAS_WORKSPACE_CONFIG=:4096:8."""
    overheads = dataclasses.replace(
        overheads_for(gpu, ":4096:8"),
        other_workspaces=TRANSFORMER_ENGINE_WORKSPACE[CAPABILITIES[gpu]],
    )
    report = remat.analyze_step(published.megatron_gpt(8), {}, device=gpu, overheads=overheads)
    assert abs(report.resident_at() - bytes_) < 1e-4 * bytes_


@pytest.mark.slow
def test_mistral_7b_needs_ten_bytes_a_parameter() -> None:
    config = hf.MistralConfig(vocab_size=32000, sliding_window=None)
    report, count = decoder(hf.MistralForCausalLM, config)
    assert count == 7_241_732_096
    assert abs(report.peak_at(batch=4) / 72_434_837_504 - 1) < 1e-3


@pytest.mark.parametrize("fused", [False, True])
def test_korthikanti_activations_of_a_layer(fused: bool) -> None:
    """Korthikanti et al. 2023: s b h (34 + 5 a s / h) bytes, and 34 s b h with fused attention."""
    width, heads = 512, 8
    with torch.device("meta"):
        model = Stack(width, heads, layers=3, fused=fused).half()
        x = torch.empty(128, 4, width, dtype=torch.half, requires_grad=True)
    report = remat.analyze(
        model,
        (x,),
        loss_fn=lambda y: y.float().mean(),
        optimizer=None,
        dynamic={"x": {0: "s", 1: "b"}},
        device="a100-80gb",
    )
    s, b = (sympy.Symbol(name, positive=True, integer=True) for name in "sb")
    layer = {
        module: size
        for module, size in report.steady.retained_by_module.items()
        if module.startswith("layers.1")
    }
    found = sum(layer.values(), sympy.S.Zero)
    paper = s * b * width * 34 + (0 if fused else 5 * heads * s**2 * b)
    # What the paper leaves out: the mean and the deviation of each row of two layer norms, float32; with
    # fused attention its sum for every query, and two words of the generator's state.
    beside = 4 * 512 * sympy.ceiling(2 * s * b / sympy.Integer(512))
    if fused:
        beside += 512 * sympy.ceiling(4 * heads * s * b / sympy.Integer(512)) + 1024
    for sizes in ({s: 128, b: 4}, {s: 2048, b: 8}):
        assert found.subs(sizes) == (paper + beside).subs(sizes)
