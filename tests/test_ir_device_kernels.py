"""A model without data, planned for a GPU, is traced with the kernels that the GPU would run."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from remat import StepProtocol, plan_checkpoints
from remat.passes import eager_trace, planned_for_cuda, prepare_step

FLASH = "aten._scaled_dot_product_flash_attention"
EFFICIENT = "aten._scaled_dot_product_efficient_attention"


class Attention(nn.Module):
    """Self-attention with dropout, its output summed; the mask is causal, given, or absent."""

    def __init__(self, width: int, heads: int, mask: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.mask = mask
        self.qkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        mask = (
            torch.ones(length, length, dtype=torch.bool).tril() if self.mask == "given" else None
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=0.1, is_causal=self.mask == "causal"
        )
        y = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return functional.dropout(y, 0.1).float().pow(2).sum()


def step(
    mask: str, dtype: torch.dtype, width: int = 64, heads: int = 2, length: int = 64
) -> tuple[nn.Module, tuple[Tensor]]:
    with FakeTensorMode():
        model = Attention(width, heads, mask, dtype)
        return model, (torch.empty(2, length, width, dtype=dtype),)


def targets(model: nn.Module, args: tuple[Tensor], *, cuda: bool = True) -> list[str]:
    return [op.target for op in prepare_step(model, args, {}, cuda=cuda).graph.ops]


@pytest.mark.parametrize(
    ("mask", "dtype", "kernel"),
    [
        ("none", torch.bfloat16, FLASH),
        ("causal", torch.float16, FLASH),
        ("given", torch.bfloat16, EFFICIENT),
        ("none", torch.float32, EFFICIENT),
        ("given", torch.float32, EFFICIENT),
    ],
)
def test_attention_is_the_fused_kernel_of_cuda(mask: str, dtype: torch.dtype, kernel: str) -> None:
    found = targets(*step(mask, dtype))
    assert f"{kernel}.default" in found
    assert f"{kernel}_backward.default" in found
    assert "aten.native_dropout.default" in found
    assert "aten.native_dropout_backward.default" in found
    assert not any("softmax" in target or "bernoulli" in target for target in found)


def test_float64_has_no_fused_kernel() -> None:
    assert any("softmax" in target for target in targets(*step("none", torch.float64)))


def test_rows_of_a_mask_are_aligned_and_heads_are_padded() -> None:
    odd_length = targets(*step("given", torch.float32, length=61))
    assert f"{EFFICIENT}.default" in odd_length
    assert "aten.constant_pad_nd.default" in odd_length
    odd_width = targets(*step("none", torch.bfloat16, width=60, heads=6))
    assert f"{FLASH}.default" in odd_width
    assert "aten.constant_pad_nd.default" in odd_width


def test_the_cpu_keeps_its_own_kernels() -> None:
    found = targets(*step("none", torch.float32), cuda=False)
    assert not any(target.startswith((FLASH, EFFICIENT)) for target in found)
    assert "aten.native_dropout.default" not in found
    after = targets(*step("none", torch.bfloat16))  # what the switch changes is put back
    assert found == targets(*step("none", torch.float32), cuda=False) != after


def test_the_eager_trace_runs_the_same_kernels() -> None:
    model, args = step("none", torch.bfloat16)
    found = [instant.target for instant in eager_trace(model, args, {}, cuda=True).instants]
    assert f"{FLASH}.default" in found
    assert f"{FLASH}_backward.default" in found
    assert "aten.native_dropout.default" in found


def test_only_a_model_without_data_is_planned_for_another_device() -> None:
    fake, _ = step("none", torch.bfloat16)
    real = Attention(64, 2, "none", torch.bfloat16)
    assert planned_for_cuda(fake, "h100")
    assert planned_for_cuda(fake, "generic-gpu")
    assert not any(planned_for_cuda(fake, name) for name in ("cpu", "roofline", "timed"))
    assert not planned_for_cuda(real, "h100")


def test_a_plan_for_a_gpu_has_the_memory_of_its_kernels() -> None:
    """Attention with dropout keeps its matrix of length x length on the CPU, and not on a GPU."""
    model, args = step("none", torch.bfloat16, length=1024)
    peak = {
        name: plan_checkpoints(
            model, "1GB", args, optimizer=None, protocol=StepProtocol(), cost_model=name
        ).baseline_peak_bytes
        for name in ("cpu", "h100")
    }
    matrix = 2 * 2 * 1024 * 1024 * 2  # batch, heads, length, length, bytes
    assert peak["h100"] < matrix < peak["cpu"]
