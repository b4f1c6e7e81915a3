"""Random small modules: every kind of layer that memory or randomness could trip over."""

from collections.abc import Callable
from typing import Any

import torch
import zoo
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8
ROWS = 6


class Residual(nn.Module):
    """x + f(x)"""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.inner(x), 0.2)


class InPlace(nn.Module):
    """Ops that change their argument, and an activation that changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x * 2).add_(1).mul_(0.5)
        y[:, 0] = x[:, 1]
        return functional.relu(y, inplace=True)


class Gated(nn.Module):
    """Several outputs of one op, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.linear(x).chunk(2, dim=-1)
        y: Tensor = value * gate.sigmoid() + gate
        return y


class Counter(nn.Module):
    """A buffer that is read after it was updated."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y: Tensor = self.linear(x) * self.count
        return y


class Convolution(nn.Module):
    """A convolution over the width, normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.convolution(x.unsqueeze(1))).relu()
        return y.mean(1)


class Attention(nn.Module):
    """Attention over the rows, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, ROWS, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return y.transpose(1, 2).reshape(ROWS, WIDTH)


class Noise(nn.Module):
    """Draws from the generator, once for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        functional.dropout(x, 0.5)
        return x + torch.randn_like(x) * torch.rand(1)


class Sorted(nn.Module):
    """Selects by value: the indices must not change."""

    def forward(self, x: Tensor) -> Tensor:
        top = x.topk(WIDTH // 2, dim=-1)
        return torch.cat([top.values, x.gather(1, top.indices).cos()], dim=-1)


LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Dropout(0.3),
    nn.GELU,
    nn.ReLU,
    Residual,
    InPlace,
    Gated,
    Counter,
    Convolution,
    Attention,
    Noise,
    Sorted,
)


class Stack(nn.Module):
    """Layers one after the other; some repeat earlier ones, with the same parameters."""

    def __init__(self, layers: list[int], again: list[int], embed: bool, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH) if embed else None
        self.layers = nn.ModuleList(LAYERS[i]() for i in layers)
        # Backward needs what a counter's second call would change, which eager refuses.
        self.order = list(range(len(layers)))
        self.order += [i for i in again if not isinstance(self.layers[i], Counter)]
        self.head = nn.Linear(WIDTH, 12, bias=False)
        if self.embedding is not None:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=not frozen)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.embedding(x) if self.embedding is not None else x
        h = h * self.scale
        for i in self.order:
            h = self.layers[i](h)
        return {"hidden": h, "rest": (self.head(h), len(self.order))}


def _loss(output: dict[str, Any]) -> Tensor:
    logits: Tensor = output["rest"][0]
    target = torch.arange(len(logits)) % logits.shape[1]
    hidden: Tensor = output["hidden"]
    return functional.cross_entropy(logits, target) + hidden.square().mean()


@st.composite
def builders(draw: st.DrawFn, most_layers: int = 5) -> Callable[[], zoo.Case]:
    """A function that makes the same random module and batch at every call."""
    layers = draw(st.lists(st.integers(0, len(LAYERS) - 1), min_size=1, max_size=most_layers))
    again = draw(st.lists(st.integers(0, len(layers) - 1), max_size=2))
    embed, frozen = draw(st.booleans()), draw(st.booleans())

    def build() -> zoo.Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Stack(layers, again, embed, frozen)
            x = torch.randint(12, (ROWS,)) if embed else torch.randn(ROWS, WIDTH)
        return zoo.Case("random", model.train(), (x,), {}, _loss)

    return build
