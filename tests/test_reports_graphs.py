"""Groups C to G of the public reports: aliases, types, frozen and tied weights, arguments."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from twins import Step, least, make, optimized, record, same, trained_alike

from remat import StepProtocol, UnsupportedGraphError, measure_peak

G = torch.Generator().manual_seed(0)
X = torch.randn(16, 8, generator=G)
STEP = Step((X,))


def module(forward: Any, **children: Any) -> nn.Module:
    """A module made of its parts and a function of them and the arguments."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, child in children.items():
                setattr(self, name, child())

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    Made.forward = call
    return Made()


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


# --- C: in-place ops, views, aliases


# pytorch#26546
def test_instance_norm_and_an_in_place_activation_last() -> None:
    step = Step((torch.randn(3, 2, 4, requires_grad=True),))

    def build() -> nn.Module:
        return nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.ReLU(True))

    trained_alike(build, step)


# pytorch#36383
def test_a_view_that_is_modified_in_place_and_returned() -> None:
    trained_alike(lambda: module(lambda m, x: (x + m.p)[:].relu_(), p=lambda: parameter(8)), STEP)


# functorch#565
def test_bias_activation_and_residual_in_place() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.b(functional.relu_(m.a(x).add_(m.p)).sin().add_(x)).mul_(2).tanh()

    trained_alike(
        lambda: module(
            forward,
            a=lambda: nn.Linear(8, 8),
            b=lambda: nn.Linear(8, 8),
            p=lambda: parameter(8),
        ),
        STEP,
    )


# pytorch#113737
def test_an_in_place_op_on_a_product() -> None:
    forward = lambda m, x: functional.selu_(x @ m.w).sin()  # noqa: E731
    trained_alike(lambda: module(forward, w=lambda: parameter(8, 8)), STEP)


# ColossalAI#1460
def test_the_first_op_in_place_on_the_input() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.lin(x.relu_()).tanh()

    def build() -> nn.Module:
        return module(forward, lin=lambda: nn.Linear(8, 8))

    x, y = X.clone(), X.clone()
    expected = record(make(build), Step((x,)))
    model = optimized(make(build), Step((y.clone(),)))
    assert same(record(model, Step((y,))), expected)
    assert torch.equal(x, y)
    assert model.remat.stats.planned == 2


# pytorch#198095
def test_a_view_of_an_updated_input_as_output() -> None:
    def forward(m: Any, a: Tensor, b: Tensor) -> Any:
        a.add_(100)
        return m.lin(b).sum() + a.sum() * 0, a[0]

    base = torch.zeros(4, 8)
    step = Step((base, base[1:]), loss=lambda output: output[0])

    def build() -> nn.Module:
        return module(forward, lin=lambda: nn.Linear(8, 8))

    with pytest.raises(UnsupportedGraphError, match="shares memory with tensor argument 1"):
        optimized(make(build), step)
    assert not base.any()
    apart = Step((torch.zeros(4, 8), torch.zeros(3, 8)), loss=step.loss)
    model, plain = optimized(make(build), apart), make(build)
    other = torch.zeros(4, 8)
    with pytest.warns(UserWarning, match="share memory"):
        mine = model(base, base[1:])
    assert same(list(mine), list(plain(other, other[1:])))
    assert same(list(model(*apart.args)), list(plain(torch.zeros(4, 8), torch.zeros(3, 8))))
    assert model.remat.stats.planned == 1


# pytorch#197887
def test_an_input_that_changes_before_backward_raises_also_through_a_view() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.w * x.view(-1)

    def build() -> nn.Module:
        return module(forward, w=lambda: parameter(128))

    model = optimized(make(build), STEP)
    for each in (make(build), model):
        x = X.clone()
        output = each(x)
        x.copy_(torch.ones_like(x))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    assert model.remat.stats.planned == 1


# pytorch#171966, pytorch#134468
def test_a_constant_is_made_again_and_not_saved() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return (torch.ones_like(x).sin_() * m.lin(x)).tanh() * torch.full_like(x, 2.0)

    def build() -> nn.Module:
        return module(forward, lin=lambda: nn.Linear(8, 8))

    plans = trained_alike(build, STEP)
    assert not [t for t in plans[1].saved if t.op.split(".")[1] in ("ones_like", "sin")]
    ops = optimized(make(build), STEP).remat.planned.prepared.graph.ops
    constants = [op for op in ops if "full" in op.target or "ones" in op.target]
    assert constants
    assert not any(op.pinned for op in constants)


# pytorch#104605
def test_a_pooling_last_holds_nothing_after_backward() -> None:
    step = Step((torch.randn(2, 3, 8, 8),))

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))

    trained_alike(build, step)
    held = StepProtocol(outputs_held=False)
    options: dict[str, Any] = {"optimizer": None, "loss_fn": step.loss, "protocol": held}
    model = optimized(make(build), step, **options)
    kept: list[Tensor] = []

    def train() -> None:
        loss = step.loss(model(*step.args))
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        kept[:] = [loss]

    before = sum(p.nbytes for p in model.parameters()) + step.args[0].nbytes
    assert before + measure_peak(train) == model.remat.plan.peak_bytes


# --- D: autocast, types


# pytorch#141896
def test_a_layer_used_twice_under_autocast() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            target = m.lin(x)
        return m.lin(m.lin(x).tanh()).sin() - target

    def build() -> nn.Module:
        return module(forward, lin=lambda: nn.Linear(8, 8))

    cast = partial(torch.autocast, "cpu", torch.bfloat16)
    trained_alike(build, Step((X,), around=partial(cast, cache_enabled=False)))
    with pytest.raises(UnsupportedGraphError, match=r"autocast casts lin\.weight 3 times"):
        optimized(make(build), Step((X,), around=cast))


# pytorch#159359, pytorch#176650
def test_hooks_that_cast_inputs_and_outputs() -> None:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Tanh())
        made.register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
        made.register_forward_hook(lambda m, args, output: output.float())
        return made

    step = Step((X,))
    expected = record(make(build), step)
    for budget in (None, 10**12):
        model = optimized(make(build), Step((X.bfloat16(),)), budget)
        assert same(record(model, step), expected)
        assert model.remat.stats.planned == 2


# --- E: frozen parameters


def blocks(count: int = 4) -> nn.Sequential:
    made = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(count)]
    return nn.Sequential(*made)


# transformers#23170
def test_a_frozen_embedding() -> None:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Embedding(10, 8), *blocks())
        made[0].requires_grad_(False)
        return made

    trained_alike(build, Step((torch.randint(0, 10, (4, 4)),)))


# transformers#21381
def test_frozen_blocks_save_nothing() -> None:
    def build() -> nn.Module:
        made = blocks()
        made[:2].requires_grad_(False)
        return made

    plans = trained_alike(build, STEP)
    assert not [t for plan in plans for t in plan.saved if t.module.split(".")[0] == "0"]


# pytorch#33962
def test_the_first_layer_without_a_gradient_of_the_input() -> None:
    trained_alike(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), STEP)


# transformers#42494
def test_low_rank_adapters_on_a_frozen_weight() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(8, 8).requires_grad_(False)
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: Tensor) -> Any:
            return (self.w(x) + self.b(self.a(x))).tanh()

    trained_alike(lambda: nn.Sequential(*(Adapter() for _ in range(3))), STEP)


# DeepSpeed#8130
def test_a_parameter_that_is_emptied_after_forward_raises() -> None:
    for model in (make(blocks), optimized(make(blocks), STEP)):
        loss = STEP.loss(model(X))
        weight = next(model[2].parameters())  # type: ignore[index]
        weight.data = torch.empty(0)
        with pytest.raises(RuntimeError, match=r"size|shape|storage|mat|bounds"):
            loss.backward()  # type: ignore[no-untyped-call]


# --- F: tied weights


# DeepSpeed#2103
def test_one_block_applied_six_times() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        for _ in range(6):
            x = m.block(x)
        return x

    trained_alike(lambda: module(forward, block=lambda: blocks(1)), STEP, count=1)


# longformer#63
def test_encoder_and_decoder_share_blocks() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        encoded = m.encoder(x)
        return m.decoder(x + encoded) * encoded

    def build() -> nn.Module:
        made: Any = module(forward, encoder=blocks, decoder=blocks)
        made.decoder = nn.Sequential(*made.encoder[:2], nn.Linear(8, 8))
        return made  # type: ignore[no-any-return]

    trained_alike(build, STEP, count=1)


# TransformerEngine#3437
def test_an_embedding_tied_with_the_head() -> None:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Embedding(10, 8), *blocks(2), nn.Linear(8, 10, bias=False))
        made[3].weight = made[0].weight
        return made

    trained_alike(build, Step((torch.randint(0, 10, (4, 4)),)))


# --- G: arguments and outputs; the rest is in test_api_calls


# transformers#38744
def test_keyword_arguments_reach_every_layer() -> None:
    def layer(m: Any, x: Tensor, *, pos: Any = None, mask: Any = None) -> Any:
        hidden = m.lin(x)
        hidden = hidden if pos is None else hidden + pos
        return hidden.tanh() if mask is None else hidden.tanh() * mask

    def forward(m: Any, x: Tensor, **kwargs: Any) -> Any:
        return m.b(m.a(x, **kwargs), **kwargs)

    def part() -> nn.Module:
        return module(layer, lin=lambda: nn.Linear(8, 8))

    kwargs = {"pos": torch.randn(8, generator=G), "mask": X > 0}
    trained_alike(lambda: module(forward, a=part, b=part), Step((X,), kwargs))


# keras#21865
def test_a_keyword_that_scales() -> None:
    def forward(m: Any, x: Tensor, scale: float = 1.0) -> Any:
        return (m.lin(x) * scale).tanh().sin()

    def build() -> nn.Module:
        return module(forward, lin=lambda: nn.Linear(8, 8))

    trained_alike(build, Step((X,), {"scale": 3.0}))


# optimum-habana#2353
def test_a_call_by_position_and_one_by_keyword() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Any:
            hidden = self.lin(hidden_states).tanh()
            return hidden if mask is None else hidden * mask

    both = Step((X, X > 0))
    model = optimized(make(Layer), both, least(make(Layer), both))
    expected = record(make(Layer), both)
    assert same(record(model, both), expected)
    model = optimized(make(Layer), both)
    assert same(record(model, Step((), {"mask": X > 0, "hidden_states": X})), expected)
    assert model.remat.stats.planned == 2


class Spectral(nn.Module):
    """Mixes along the rows in the frequency domain, with a complex weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        spectrum = torch.fft.rfft(self.lin(x).tanh())
        spectrum = spectrum * self.weight * torch.exp(1j * self.weight.conj())
        return torch.fft.irfft(spectrum, n=8).sin()


def test_complex_tensors() -> None:
    plans = trained_alike(Spectral, STEP, verify=True)
    assert any(plan.recomputed for plan in plans)
