"""Groups B and H of the public reports: buffers that the step changes, and caches in Python."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from twins import Step, budgets, make, optimized, record, same, trained_alike

from remat import UnsupportedGraphError


def conv_net(activation: type[nn.Module] = nn.ReLU, momentum: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, momentum=momentum),
        activation(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8, momentum=momentum),
        activation(),
    )


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


# pytorch#96136
def test_batch_norm_statistics_are_updated_once() -> None:
    trained_alike(conv_net, Step((IMAGES,)), steps=3)


# YOLO-Master#262
def test_state_dict_does_not_drift() -> None:
    trained_alike(lambda: conv_net(nn.SiLU), Step((IMAGES,)), steps=3)


# pytorch#62471
def test_fifty_forwards_of_a_small_momentum() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10, momentum=0.001), nn.Tanh())

    step = Step((torch.randn(16, 10),))
    models = [make(build), optimized(make(build), step)]
    for model in models:
        for _ in range(50):
            model(*step.args)
    assert same(*([(n, b.clone()) for n, b in model.named_buffers()] for model in models))


# pytorch#42212
def test_convolution_and_batch_norm_gradients() -> None:
    def build() -> nn.Module:
        convolutions = (nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(9, 2))

    trained_alike(build, Step((torch.randn(4, 1, 3, 3),)))


# insightface#2053
def test_momentum_needs_no_compensation() -> None:
    trained_alike(conv_net, Step((IMAGES,)), steps=10, count=1)


class Counter(nn.Module):
    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("c", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.c.add_(1)
        return self.lin(x) * self.c


# pytorch#197039
def test_a_counter_that_scales_the_output() -> None:
    step = Step((torch.randn(8, 4),), loss=lambda output: output.sum())
    trained_alike(Counter, step, steps=3)
    for budget in budgets(make(Counter), step):
        model = optimized(make(Counter), step, budget)
        for k in (1, 2, 3):
            model.zero_grad()
            model(*step.args).sum().backward()
            expected = k * torch.full((4,), 8.0)
            assert torch.equal(model.lin.bias.grad, expected)


class ReadBeforeAndAfter(nn.Module):
    c: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("c", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        before = (self.lin(x) * self.c.clone()).tanh()
        self.c.mul_(2)
        middle = before * self.c[:1].clone()
        self.c.add_(before.detach().mean(0))
        return middle * self.c


def test_backward_sees_each_value_of_a_buffer_that_is_updated_twice() -> None:
    trained_alike(ReadBeforeAndAfter, Step((torch.randn(8, 4),)), steps=3)


class Rebound(nn.Module):
    """A buffer that is replaced instead of updated."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        hidden = self.lin(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return (hidden - self.mean).tanh()


def test_a_buffer_that_is_replaced_is_replaced_once() -> None:
    trained_alike(Rebound, Step((torch.randn(8, 4),)), steps=3)


class AddInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(buffer)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (buffer,) = ctx.saved_tensors
        buffer.add_(gradient.abs().max())
        return gradient * 2, None


class Amax(nn.Module):
    amax: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("amax", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return AddInBackward.apply(self.lin(x), self.amax).tanh()  # type: ignore[no-untyped-call]


# pytorch#174124, pytorch#112906
def test_a_buffer_that_backward_changes_is_refused() -> None:
    with pytest.raises(UnsupportedGraphError, match="backward changes amax in place"):
        optimized(make(Amax), Step((torch.randn(8, 4),)))


class Cache(nn.Module):
    """Attention over keys that a Python list collects."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Any:
        cache = [] if cache is None else cache
        for part in torch.split(x, 2, dim=1):
            cache.append(self.k(part))
        keys = torch.cat(cache, dim=1)
        return (self.q(x) @ keys.transpose(1, 2)).softmax(-1) @ keys


# pytorch#155171, MemoryVLA#18
def test_a_cache_inside_the_forward_is_filled_once() -> None:
    trained_alike(Cache, Step((torch.randn(2, 6, 8),)))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


# transformers#30320, transformers#34928
def test_a_transformers_cache_has_the_length_of_the_input() -> None:
    ids = torch.randint(0, 32, (2, 8))
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": True}
    step = Step(kwargs=kwargs, loss=lambda output: output.loss)
    expected = record(make(llama), step)
    model = optimized(make(llama), step)
    assert same(record(model, step), expected)
    cache = model(**kwargs).past_key_values
    assert type(cache).__name__ == "DynamicCache"
    assert cache.get_seq_length() == 8
