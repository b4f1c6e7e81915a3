"""Autocast of a step that is traced for a GPU casts as CUDA does, although its tensors are on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.ir import Phase, Trace
from remat.ir._torch import (
    FakeTensorMode,
    TorchDispatchMode,
    enable_python_dispatcher,
    ops_with_kernel,
)
from remat.ir.device_autocast import CUDA_POLICIES, Policy, cuda_autocast
from remat.ir.device_kernels import cuda_kernels
from remat.passes import eager_trace

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    with FakeTensorMode():
        yield


def half(*sizes: int) -> Tensor:
    return torch.empty(sizes or (4, 4), dtype=BF16)


def full(*sizes: int) -> Tensor:
    return torch.empty(sizes or (4, 4))


def labels() -> Tensor:
    return torch.zeros(4, dtype=torch.int64)


def image() -> Tensor:
    return half(1, 1, 4, 4)


def attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x)


LOWER: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: functional.linear(full(), full()),
    "matmul": lambda: full() @ full(),
    "einsum": lambda: torch.einsum("ij,jk->ik", full(), full()),
    "mv": lambda: full().mv(full(4)),
    "addr": lambda: torch.addr(full(), full(4), full(4)),
    "multi_dot": lambda: torch.linalg.multi_dot([full(), full(), full()]),
    "conv2d": lambda: functional.conv2d(full(1, 1, 4, 4), full(1, 1, 3, 3)),
    "conv2d same": lambda: functional.conv2d(full(1, 1, 4, 4), full(1, 1, 3, 3), padding="same"),
    "prelu": lambda: functional.prelu(full(), full(1)),
    "gru_cell": lambda: nn.GRUCell(4, 4)(full(), full()),
    "attention": lambda: attention(full(1, 1, 4, 8)),
}
WIDE: dict[str, Callable[[], Tensor]] = {
    "exp": lambda: half().exp(),
    "log": lambda: half().log(),
    "rsqrt": lambda: half().rsqrt(),
    "pow": lambda: half() ** 2,
    "pow of a tensor": lambda: half() ** half(),
    "pow of a number": lambda: 2 ** half(),
    "reciprocal": lambda: half().reciprocal(),
    "divided number": lambda: 1 / half(),
    "softplus": lambda: functional.softplus(half()),
    "layer_norm": lambda: functional.layer_norm(half(), (4,), full(4), full(4)),
    "rms_norm": lambda: functional.rms_norm(half(), (4,), full(4)),
    "group_norm": lambda: functional.group_norm(half(), 2, full(4), full(4)),
    "cosine_similarity": lambda: functional.cosine_similarity(half(), half()),
    "cross_entropy": lambda: functional.cross_entropy(half(), labels()),
    "smooth labels": lambda: functional.cross_entropy(half(), labels(), label_smoothing=0.1),
    "nll_loss": lambda: functional.nll_loss(half(), labels()),
    "kl_div": lambda: functional.kl_div(half(), half(), reduction="sum"),
    "l1_loss": lambda: functional.l1_loss(half(), half()),
    "mse_loss": lambda: functional.mse_loss(half(), half()),
    "bce_with_logits": lambda: functional.binary_cross_entropy_with_logits(half(), half()),
    "cdist": lambda: torch.cdist(half(), half()),
    "renorm": lambda: half().renorm(2, 0, 1.0),
    "logsumexp": lambda: half().logsumexp(0),
    "upsample": lambda: functional.interpolate(image(), scale_factor=2),
    "bilinear upsample": lambda: functional.interpolate(image(), scale_factor=2, mode="bilinear"),
    "prod": lambda: half().prod(),
    "prod of a row": lambda: half().prod(1),
    "softmax": lambda: half().softmax(-1),
    "log_softmax": lambda: half().log_softmax(-1),
    "cumsum": lambda: half().cumsum(0),
    "cumprod": lambda: half().cumprod(0),
    "vector_norm": lambda: torch.linalg.vector_norm(half()),
    "matrix_norm": lambda: torch.linalg.matrix_norm(half()),
    "normalize": lambda: functional.normalize(half()),
    "sum": lambda: half().sum(),
    "sum of a row": lambda: half().sum(1, keepdim=True),
    "norm": lambda: torch.ops.aten.norm.Scalar(half()),
    "norm of a row": lambda: torch.ops.aten.norm.ScalarOpt_dim(half(), 2, [1]),
}
PROMOTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "atan2": torch.atan2,
    "dot": lambda x, y: x[0].dot(y[0]),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=1),
    "index_put": lambda x, y: x.index_put((labels(),), y),
    "scatter_add": lambda x, y: x.scatter_add(0, labels().expand(4, 4), y),
    "grid_sample": lambda x, y: functional.grid_sample(
        x.view(1, 1, 4, 4), y.view(1, 2, 4, 2), align_corners=False
    ),
}
LEFT_ALONE: dict[str, Callable[[], Tensor]] = {
    "mean": lambda: half().mean(),
    "gelu": lambda: functional.gelu(half()),
    "trace": lambda: half().trace(),
    "reflection_pad": lambda: functional.pad(image()[0], (1, 1), mode="reflect"),
    "max_pool3d": lambda: functional.max_pool3d(half(1, 1, 4, 4, 4), 2),
    "add": lambda: half() + half(),
    "cat": lambda: torch.cat([half(), half()]),
    "given type": lambda: half().softmax(-1, dtype=BF16),
    "sum in place": lambda: torch.sum(half(), 0, out=half(4)),
}


def autocast(*, cache: bool = True) -> torch.autocast:
    return torch.autocast("cpu", BF16, cache_enabled=cache)


@pytest.mark.parametrize("name", LOWER)
def test_products_run_in_the_type_of_autocast(name: str) -> None:
    with cuda_autocast(), autocast():
        assert LOWER[name]().dtype == BF16


@pytest.mark.parametrize("name", WIDE)
def test_sensitive_ops_run_in_float32(name: str) -> None:
    with cuda_autocast(), autocast():
        assert WIDE[name]().dtype == FP32


@pytest.mark.parametrize("name", PROMOTED)
def test_mixed_arguments_run_in_the_widest_type(name: str) -> None:
    op = PROMOTED[name]
    with cuda_autocast(), autocast():
        assert op(half(), half()).dtype == BF16
        assert op(half(), full()).dtype == op(full(), half()).dtype == FP32
        with pytest.raises(RuntimeError, match="Unexpected type"):
            op(half().to(torch.float16), half())


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_ops_are_left_alone(name: str) -> None:
    with cuda_autocast(), autocast():
        assert LEFT_ALONE[name]().dtype == BF16


def test_float64_and_integers_are_not_cast() -> None:
    wide = full().double()
    with cuda_autocast(), autocast():
        found = [wide @ wide, wide.exp(), wide.softmax(0), torch.atan2(wide, wide), wide.norm()]
        assert {x.dtype for x in found} == {torch.float64}
        assert torch.ops.aten.norm.Scalar(wide).dtype == torch.float64
        assert labels().sum().dtype == torch.int64


def test_cross_entropy_is_cast_inside() -> None:
    """It asks for a log-softmax in the type of its input; the CPU's autocast widens the input instead."""

    def made_by() -> list[str]:
        node = functional.cross_entropy(half().requires_grad_(), labels()).grad_fn
        names = []
        while node is not None:
            names.append(node.name().removesuffix("Backward0"))
            node = node.next_functions[0][0] if node.next_functions else None
        return names[:3]

    with autocast():
        assert made_by() == ["NllLoss", "LogSoftmax", "ToCopy"]
        with cuda_autocast():
            assert made_by() == ["NllLoss", "ToCopy", "LogSoftmax"]


def test_binary_cross_entropy_is_refused() -> None:
    with cuda_autocast():
        functional.binary_cross_entropy(full(), full())
        with autocast(), pytest.raises(RuntimeError, match="with_logits"):
            functional.binary_cross_entropy(full(), full())


def test_every_op_of_cudas_autocast_is_handled() -> None:
    cuda = set(ops_with_kernel("AutocastCUDA"))
    assert cuda == set(CUDA_POLICIES)
    before = set(ops_with_kernel("AutocastCPU"))
    with cuda_autocast():
        assert cuda < set(ops_with_kernel("AutocastCPU"))
    assert set(ops_with_kernel("AutocastCPU")) == before


def test_lists_of_the_documentation_are_in_those_of_the_module() -> None:
    """The docs name functions; those of them that are ops."""
    documented = {
        Policy.LOWER: "addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d linear matmul mm mv",
        Policy.FP32: "acos asin cosh cdist dist erfinv exp expm1 group_norm layer_norm log log10 "
        "log1p log2 l1_loss mse_loss nll_loss pdist reciprocal rsqrt sinh softplus renorm tan",
        Policy.SET_DTYPE: "cumprod cumsum prod sum softmax.int log_softmax.int",
        Policy.PROMOTE: "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot",
    }
    for policy, names in documented.items():
        assert {CUDA_POLICIES[f"aten::{name}"] for name in names.split()} == {policy}


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts casts."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def casts() -> Casts:
    return Casts()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("cache", "expected"), [(True, 1), (False, 3)])
def test_weights_share_the_cache_of_torch(cache: bool, expected: int) -> None:
    weight = nn.Parameter(full())
    x = half()
    with cuda_autocast(), casts() as counted:
        with autocast(cache=cache):
            torch.einsum("ij,jk->ik", x, weight)  # a kernel of the module
            functional.linear(x, weight)  # torch's own
            with autocast(cache=cache):
                weight.mv(x[0])
        assert counted.count == expected
        with autocast(cache=cache):
            weight.mv(x[0])  # the cache was cleared
        assert counted.count == expected + 1


def test_what_is_no_leaf_is_cast_each_time() -> None:
    weight = nn.Parameter(full())
    with cuda_autocast(), casts() as counted, autocast():
        for value in (weight * 2, weight.t(), full()):
            value.mv(half(4))
            value.mv(half(4))
    assert counted.count == 6


def test_nothing_happens_without_autocast() -> None:
    with cuda_autocast(), casts() as counted:
        found = [half().softmax(-1), half().sum(), half().exp(), half() @ half()]
        assert {x.dtype for x in found} == {BF16}
        with autocast(), torch.autocast("cpu", enabled=False):
            assert half().exp().dtype == BF16
    assert counted.count == 0


def test_all_is_put_back() -> None:
    def cpu() -> list[torch.dtype]:
        with autocast():
            return [
                x.dtype
                for x in (
                    half().softmax(-1),
                    half().prod(),
                    half().trace(),
                    functional.binary_cross_entropy(half(), half()),
                    functional.linear(full(), full()),
                    torch.cat([half(), full()]),
                )
            ]

    with enable_python_dispatcher():
        before = cpu()
    assert before[0] == BF16
    with cuda_autocast():
        with cuda_autocast(), autocast():
            assert half().softmax(-1).dtype == FP32
        with autocast(), enable_python_dispatcher():
            assert half().softmax(-1).dtype == FP32
            assert half().trace().dtype == BF16
    assert cpu() == before
    with pytest.raises(RuntimeError, match="with_logits"), cuda_autocast(), autocast():
        functional.binary_cross_entropy(half(), half())
    assert cpu() == before
    with enable_python_dispatcher():
        assert cpu() == before


def test_it_nests_with_the_kernels_of_cuda() -> None:
    query = full(1, 2, 8, 8).requires_grad_()
    with enable_python_dispatcher(), cuda_kernels(), cuda_autocast(), autocast():
        mixed = attention(query)
        assert mixed.dtype == BF16
        assert mixed.grad_fn is not None
        assert mixed.grad_fn.name() == "ScaledDotProductFlashAttentionBackward0"
        assert functional.dropout(mixed.softmax(-1), 0.1).dtype == FP32


class Block(nn.Module):
    """A transformer block whose attention is written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = x + self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)
        found: Tensor = y + self.out(y)  # the weight is used twice
        return found


BATCH, LENGTH, WIDTH = 2, 16, 8


@pytest.fixture(scope="module")
def traces() -> dict[bool, Trace]:
    """With the cache of autocast and without; made outside the fake mode of the tests."""
    found = {}
    for cache in (True, False):
        with cuda_autocast(), autocast(cache=cache):
            model, x = Block(WIDTH), full(BATCH, LENGTH, WIDTH)
            found[cache] = eager_trace(model, (x,), {}, loss_fn=lambda y: y.sum(), cuda=True)
    return found


def births(trace: Trace, target: str) -> list[int]:
    """Bytes of what the forward's calls of an op make."""
    return [
        int(block.size)
        for block in trace.blocks
        if block.birth >= 0
        and trace.instants[block.birth].target == f"aten.{target}.default"
        and trace.instants[block.birth].phase is Phase.FORWARD
    ]


def test_a_block_keeps_what_it_keeps_on_a_gpu(traces: dict[bool, Trace]) -> None:
    trace = traces[True]
    scores, rows = BATCH * LENGTH * LENGTH, BATCH * LENGTH
    assert births(trace, "_softmax") == [4 * scores]
    assert sorted(births(trace, "native_layer_norm")) == [4 * rows] * 2 + [4 * rows * WIDTH]
    weights = {2 * 3 * WIDTH * WIDTH, 2 * WIDTH * WIDTH}
    found = births(trace, "_to_copy")
    assert [size for size in found if size in weights] == sorted(weights, reverse=True)
    # of activations: the normalized rows, the scores up for the softmax and down after it, y
    assert sorted(set(found) - weights) == sorted({2 * rows * WIDTH, 4 * scores, 2 * scores})


def test_without_the_cache_a_weight_is_cast_at_each_use(traces: dict[bool, Trace]) -> None:
    found = births(traces[False], "_to_copy")
    assert found.count(2 * WIDTH * WIDTH) == 2
