from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.profiler import ProfilerActivity, profile

from remat.measure import measure_peak
from remat.passes import Call, Scratch, measure_scratch

aten = torch.ops.aten
exact = settings(max_examples=25, deadline=None, derandomize=True)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


def shadow(value: Any) -> Any:
    """The same argument on `meta`; tensors that share a storage do not share it any more."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        base = torch.empty(leaf.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
        empty = torch.empty(0, dtype=leaf.dtype, device="meta")
        return empty.set_(base.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

    return map_aggregate(value, copy)


def peak(run: Callable[[], object]) -> int:
    """Like `measure_peak`, without the garbage collection, which takes longer than most ops."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    del result
    events: Any = record.profiler
    memory = [e for e in events.kineto_results.events() if e.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    changes: list[int] = [event.nbytes() for event in memory]
    return max(accumulate(changes, initial=0))


def check(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Scratch:
    """Scratch predicted from metadata alone explains the peak measured on the given data."""
    (found,) = measure_scratch([Call(target, shadow(args), kwargs)])
    result = target(*args, **kwargs)
    held = {t.untyped_storage() for t in tensors(args)}
    new = {s: s.nbytes() for t in tensors(result) if (s := t.untyped_storage()) not in held}
    leaves = result if isinstance(result, list | tuple) else (result,)
    assert found.outputs == tuple(
        leaf.untyped_storage().nbytes() if isinstance(leaf, Tensor) else 0 for leaf in leaves
    )
    assert found.bytes + sum(new.values()) == peak(lambda: target(*args, **kwargs))
    assert found.bytes >= 0
    return found


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attention(size: int) -> list[Any]:
    return [torch.randn(2, 2, size, 16) for _ in range(3)]


@pytest.mark.parametrize("size", [8, 33])
def test_kernels_with_scratch(threads: int, size: int) -> None:
    torch.manual_seed(0)
    x, image = torch.randn(4, size), torch.randn(2, 8, size, size)
    weight, ids = torch.randn(16, 8, 3, 3), torch.randint(0, 10, (4, size))
    scale = torch.rand(8)
    wide = torch.randn(4, size, 24)
    conv: list[Any] = [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    check(aten.convolution.default, image, weight, *conv)
    check(aten.convolution.default, image.transpose(2, 3), weight, *conv)
    check(
        aten.convolution_backward.default,
        torch.randn(2, 16, size, size),
        image,
        weight,
        *conv,
        [True, True, False],
    )
    check(aten.native_batch_norm.default, image, scale, scale, scale, scale, True, 0.1, 1e-5)
    check(aten.native_group_norm.default, image, scale, scale, 2, 8, size * size, 4, 1e-5)
    check(aten.native_layer_norm.default, wide, [24], torch.rand(24), torch.rand(24), 1e-5)
    check(aten.native_layer_norm.default, wide.transpose(0, 1), [24], None, None, 1e-5)
    check(aten.native_dropout.default, x, 0.1, True)
    check(aten.bernoulli.p, x, 0.5)
    check(aten.embedding.default, torch.randn(10, 24), ids.t())
    check(aten.embedding_dense_backward.default, wide, ids, 10, -1, False)
    check(aten.embedding_dense_backward.default, wide.transpose(0, 1), ids.t(), 10, -1, False)
    check(aten._embedding_bag.default, torch.randn(10, 24), ids.flatten(), torch.arange(4))
    check(aten.index.Tensor, wide, [None, ids[0] % 4])
    check(aten.index_put.default, wide, [ids % 4], torch.randn(4, size, size, 24), True)
    check(aten.nll_loss_forward.default, x, torch.tensor([1, 0, 3, 2]), None, 1, -100)
    check(aten.sort.default, x, 0)
    check(aten.topk.default, x, 3, 0)
    check(aten.cumsum.default, x, 0)
    check(aten._safe_softmax.default, x, -1)
    check(aten._softmax.default, x.t(), 0, False)
    check(aten._softmax_backward_data.default, x.t(), x.t(), 0, torch.float32)
    check(aten.max_pool2d_with_indices.default, image, [2, 2])
    check(aten.upsample_bilinear2d.default, image, [2 * size, 2 * size], False)
    check(aten._to_copy.default, x, dtype=torch.bfloat16)
    check(aten.copy.default, wide[:, 1:, 2:], torch.zeros(24 - 2))
    check(aten.randn.default, [size, 3], device=torch.device("cpu"))
    check(aten.cat.default, [x, x.to(torch.float64)])
    check(aten.add_.Tensor, x, 1.0)
    check(aten.addmm.default, torch.randn(8), x, torch.randn(8, size).t())
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (t.to(dtype) for t in attention(size))
        check(aten.bmm.default, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
        check(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, True)


def test_scratch_of_attention_depends_on_the_threads() -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    for count in (1, 2):
        torch.set_num_threads(count)
        attend = aten._scaled_dot_product_flash_attention_for_cpu.default
        found.append(check(attend, *attention(512)).bytes)
    torch.set_num_threads(before)
    assert found[0] < found[1]


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
sizes = st.integers(0, 40)


def random(shape: tuple[int, ...], dtype: torch.dtype, step: int = 1) -> Tensor:
    return (torch.rand(*shape, step) * 4).to(dtype)[..., 0]


@exact
@given(st.tuples(sizes, sizes), dtypes, dtypes, st.integers(1, 2), st.booleans())
def test_pointwise(
    shape: tuple[int, int], left: torch.dtype, right: torch.dtype, step: int, transposed: bool
) -> None:
    a, b = random(shape, left, step), random(shape, right)
    if transposed:
        a, b = a.t(), b.t()
    check(aten.mul.Tensor, a, b)
    check(aten.add.Tensor, a, b[:1])
    check(aten.where.self, a > 0, a, b)
    check(aten.mul.Tensor, a, 2.0)
    check(aten.eq.Scalar, a, 1)
    if a.is_floating_point():
        check(aten.gelu_backward.default, a, a)


@exact
@given(sizes, sizes, sizes, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_matrix_products(m: int, k: int, n: int, dtype: torch.dtype, transposed: bool) -> None:
    a, b = (
        random((m, k), dtype),
        random((n, k), dtype).t() if transposed else random((k, n), dtype),
    )
    check(aten.mm.default, a, b)
    check(aten.addmm.default, random((n,), dtype), a, b)
    check(aten.bmm.default, a.expand(3, m, k), b.expand(3, k, n))


@settings(exact, max_examples=15)
@given(st.tuples(st.integers(1, 60), st.integers(1, 60)), dtypes, st.sampled_from([0, 1]))
def test_reductions(shape: tuple[int, int], dtype: torch.dtype, dim: int) -> None:
    a = random(shape, dtype)
    check(aten.sum.dim_IntList, a, [dim], True)
    check(aten.amax.default, a, [dim])
    check(aten.cumsum.default, a, dim)
    if a.is_floating_point():
        check(aten.mean.dim, a.t(), [dim])
        check(aten.var_mean.correction, a, [dim])
        check(aten._log_softmax.default, a, dim, False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16, track_running_stats=False)
        self.layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(self.layer(hidden).mean(1)), y)


def test_live_storages_and_scratch_explain_the_peak_of_a_whole_step() -> None:
    torch.manual_seed(0)
    net = Net()
    inputs = (torch.randn(4, 3, 12, 12), torch.randint(0, 10, (4,)))

    def step(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = torch.func.functional_call(net, parameters, (x, y))
        return torch.autograd.grad(loss, list(parameters.values()))

    parameters = dict(net.named_parameters())
    graph = make_fx(step, tracing_mode="fake")(parameters, *inputs)
    nodes = list(graph.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}

    def value(leaf: Any) -> Any:
        return leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf

    calls = {
        node: Call(node.target, map_aggregate(node.args, value), map_aggregate(node.kwargs, value))
        for node in nodes
        if node.op == "call_function"
    }
    scratch = dict(zip(calls, measure_scratch(list(calls.values())), strict=True))
    birth: dict[Any, int] = {}
    death: dict[Any, int] = {}
    size: dict[Any, int] = {}
    for node in nodes[:-1]:
        if node.op == "get_attr":
            continue
        last = max((place[user] for user in node.users), default=len(nodes))
        result = value(node) if isinstance(value(node), list | tuple) else (value(node),)
        made = scratch[node].outputs if node in scratch else (0,) * len(result)
        for tensor, real in zip(result, made, strict=True):
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            birth.setdefault(storage, place[node])
            size.setdefault(storage, real)
            death[storage] = max(death.get(storage, 0), last)
    levels = [
        scratch[node].bytes + sum(size[s] for s in size if birth[s] <= i <= death[s])
        for node, i in place.items()
        if node in scratch
    ]
    flat = torch.utils._pytree.tree_leaves((parameters, *inputs))

    def run() -> object:
        return torch.fx.Interpreter(graph).run(*flat, enable_io_processing=False)

    with torch.no_grad():
        measured = measure_peak(run)
    assert max(levels) == measured


def test_views_are_not_executed() -> None:
    x = torch.empty(10**6, 10**6, device="meta")
    chunks, row = measure_scratch(
        [Call(aten.split.Tensor, (x, 500000)), Call(aten.select.int, (x, 0, 3))]
    )
    assert chunks == Scratch(0, (4 * 10**12,) * 2, chunks.origin)
    assert (row.bytes, row.outputs, row.origin) == (0, (4 * 10**12,), "formula")


def test_none_in_a_result_keeps_its_place() -> None:
    grad, x, weight = torch.ones(1, 2, 4), torch.ones(1, 3, 4), torch.ones(2, 3, 1)
    args = (grad, x, weight, None, [1], [0], [1], False, [0], 1, [False, True, False])
    (found,) = measure_scratch([Call(aten.convolution_backward.default, args)])
    assert found.outputs == (0, 24, 0)


def test_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    calls = [
        Call(aten.native_dropout.default, (torch.empty(5, 7), 0.5, True)),
        Call(aten.bernoulli.p, (torch.empty(77), 0.5), {"generator": generator}),
    ]
    assert all(found.origin == "measured" for found in measure_scratch(calls))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), state)


def test_arguments_are_untouched() -> None:
    x = torch.full((3,), 5.0)
    measure_scratch([Call(aten.add_.Tensor, (x, x))])
    assert x.tolist() == [5.0] * 3


def test_symbolic_sizes_are_taken_at_the_binding() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic = mode.from_tensor(torch.empty(6, 8))
    symbol = symbolic.shape[0].node.expr  # type: ignore[attr-defined]
    call = Call(aten.native_dropout.default, (symbolic, 0.5, True))
    bound = {symbol: 100} | {s.node.expr: 8 for s in symbolic.shape[1:]}  # type: ignore[attr-defined]
    (found,) = measure_scratch([call], bound)
    assert isinstance(symbol, sympy.Symbol)
    assert found == check(aten.native_dropout.default, torch.randn(100, 8), 0.5, True)
    assert measure_scratch([call])[0].origin == "unknown"


@pytest.mark.parametrize(
    "call",
    [
        Call(aten.add.Tensor, (torch.empty(2**16, 2**16, device="meta"), 1)),
        Call(aten.expand_copy.default, (torch.empty(1, device="meta"), [2**40])),
        Call(aten.mm.default, (torch.empty(2, 3), torch.empty(2, 3))),
        Call(aten.linalg_cholesky_ex.default, ("no tensor",)),
    ],
)
def test_what_cannot_be_executed_is_reported(call: Call) -> None:
    (found,) = measure_scratch([call])
    assert (found.bytes, found.outputs, found.origin) == (0, (), "unknown")
