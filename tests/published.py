"""Training steps whose peaks on GPUs were published, rebuilt from what their benchmarks say they run.

Liger-Kernel's benchmarks (BSD-2, `benchmark/scripts/benchmark_*.py`) keep the modules of both providers and
the gradients of earlier iterations; what is measured is a later iteration.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

Build = Callable[..., Callable[[], object]]


def cross_entropy(config: dict[str, Any]) -> Build:
    """Cross entropy in float32 of B x T rows of V logits."""
    rows = config["B"] * config["T"]

    def build(V: int) -> Callable[[], object]:
        x = torch.randn(rows, V, requires_grad=True)
        target = torch.randint(V, (rows, 1)).squeeze(1)
        loss = nn.CrossEntropyLoss()
        return lambda: loss(x, target).backward()

    return build


class _Head(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
        self.loss = nn.CrossEntropyLoss(ignore_index=-100)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.linear(x), target)
        return loss


def fused_linear_cross_entropy(config: dict[str, Any]) -> Build:
    """A language model's head with its loss, the plain provider."""
    width, vocabulary = config["H"], config["V"]

    def build(BT: int) -> Callable[[], object]:
        heads = _Head(width, vocabulary), _Head(width, vocabulary)
        x = torch.randn(BT, width, requires_grad=True, dtype=torch.bfloat16)
        target = torch.randint(vocabulary, (BT, 1)).squeeze(1)
        return lambda: heads[0](x, target).backward()

    return build


def layer_norm(config: dict[str, Any]) -> Build:
    """Layer norm in float32 over N columns."""

    def build(N: int) -> Callable[[], object]:
        norms = nn.LayerNorm((N,), eps=1e-6), nn.LayerNorm((N,), eps=1e-6)
        x = torch.randn(config["M"], N)
        gradient = torch.randn_like(x)
        x.requires_grad_()

        def step() -> None:
            norms[0](x).backward(gradient, retain_graph=True)

        return step

    return build


class _SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(width, inner, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(inner, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return y


def swiglu(config: dict[str, Any]) -> Build:
    """A gated MLP over B x T tokens."""
    width, inner = config["hidden_size"], config["intermediate_size"]

    def build(T: int) -> Callable[[], object]:
        mlp = _SwiGLU(width, inner)
        x = torch.randn(config["B"], T, width, dtype=torch.bfloat16, requires_grad=True)

        def step() -> None:
            y = mlp(x)
            y.backward(torch.randn_like(y), retain_graph=True)

        return step

    return build


def megatron_gpt(ranks: int) -> Build:
    """One rank of Megatron-LM's 12-layer GPT with its distributed optimizer, without the layers' kernels.

    Weights in bfloat16, gradients summed up in one float32 buffer, and of the optimizer (float32 weights and
    two moments) one part in `ranks`.
    """
    config = hf.GPT2Config(n_layer=12, n_embd=512, n_head=8, n_positions=1024, vocab_size=50304)

    def build() -> Callable[[], object]:
        model = hf.GPT2LMHeadModel._from_config(config, dtype=torch.bfloat16)
        count = sum(p.numel() for p in model.parameters())
        gradients = torch.zeros(count)
        shard = nn.Parameter(torch.zeros(count // ranks))
        optimizer = torch.optim.AdamW([shard])

        def step() -> None:
            ids = torch.zeros(4, 1024, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            for p in model.parameters():
                gradients[: p.numel()] += p.grad.view(-1)
                p.grad = None
            shard.grad = gradients[: shard.numel()]
            optimizer.step()
            shard.grad = None

        return step

    return build


LIGER: dict[str, Callable[[dict[str, Any]], Build]] = {
    "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "layer_norm": layer_norm,
    "swiglu": swiglu,
}
