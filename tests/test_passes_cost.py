from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from remat.passes import Cost, costs, device, timed_costs

aten = torch.ops.aten
CPU = device("cpu")


def nodes(function: Callable[..., Any], *inputs: Tensor, symbolic: bool = False) -> list[Node]:
    graph = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def cost(function: Callable[..., Any], *inputs: Tensor) -> Cost:
    (found,) = costs(nodes(function, *inputs), CPU)
    return found


def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)


def test_matrix_product() -> None:
    found = cost(torch.mm, torch.empty(3, 5), torch.empty(5, 7))
    assert (found.flops, found.bytes) == (2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7))


def test_batched_product_in_bfloat16() -> None:
    half = torch.bfloat16
    found = cost(torch.bmm, torch.empty(2, 3, 5, dtype=half), torch.empty(2, 5, 7, dtype=half))
    assert (found.flops, found.bytes) == (2 * 2 * 3 * 5 * 7, 2 * 2 * (3 * 5 + 5 * 7 + 3 * 7))


def test_convolution() -> None:
    found = cost(torch.conv2d, torch.empty(2, 3, 9, 9), torch.empty(4, 3, 3, 3))
    assert found.flops == 2 * (2 * 4 * 7 * 7) * (3 * 3 * 3)


def test_attention_on_the_cpu_is_two_products() -> None:
    found = costs(nodes(attend, *(torch.empty(2, 3, 8, 4) for _ in range(3))), CPU)
    assert found[0].flops == 2 * (2 * 2 * 3 * 8 * 8 * 4)


def test_training_step_counts_as_in_torch() -> None:
    def step(x: Tensor, kernel: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        loss = (torch.conv2d(x, kernel).mean((2, 3)) @ weight).sum()
        return torch.autograd.grad(loss, (kernel, weight))

    inputs = [torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(4, 6)]
    inputs = [t.requires_grad_() for t in inputs]
    with FlopCounterMode(display=False) as counter:
        step(*inputs)
    assert sum(found.flops for found in costs(nodes(step, *inputs), CPU)) == (
        counter.get_total_flops()
    )


def test_views_and_uninitialised_tensors_cost_nothing() -> None:
    def views(x: Tensor) -> Any:
        return x.t(), x.view(-1)[2:], torch.chunk(x, 2), x.new_empty(4), x.expand(5, 2, 3).detach()

    chain = nodes(views, torch.empty(2, 3))
    assert {*costs(chain, CPU), *timed_costs(chain)} == {Cost(0, 0, 0)}


def test_results_of_a_multiple_result_op_are_free_to_take() -> None:
    first, *rest = costs(nodes(lambda x: x.sort(0), torch.empty(4)), CPU)
    assert first.bytes == 16 + 16 + 32
    assert set(rest) <= {Cost(0, 0, 0)}


def test_only_what_is_touched_is_counted() -> None:
    x = torch.empty(100)
    assert cost(torch.neg, x.expand(50, 100)).bytes == 4 * (100 + 50 * 100)
    assert cost(torch.neg, x[:10]).bytes == 4 * (10 + 10)
    assert cost(torch.neg, x.as_strided((10, 10), (1, 1))).bytes == 4 * (19 + 100)
    assert cost(lambda a: a * a, x).bytes == 4 * (100 + 100)
    ids = torch.zeros(3, dtype=torch.int64)
    found = cost(torch.embedding, torch.empty(1000, 8), ids)
    assert found.bytes == 3 * 8 + 4 * (3 * 8 + 3 * 8)


def test_time_is_the_roofline() -> None:
    gpu = device("a100-80gb")
    small, *_ = costs(nodes(torch.neg, torch.empty(0)), gpu)
    assert small.time_ns == round(1e9 * gpu.launch_s)
    n = 1024
    half = torch.empty(n, n, dtype=torch.bfloat16, device="meta")
    (product,) = costs(nodes(torch.mm, half, half), gpu)
    seconds = max(2 * n**3 / 312e12, 6 * n**2 / 2039e9) / gpu.efficiency + gpu.launch_s
    assert product.time_ns == round(1e9 * seconds)


def test_float32_products_use_tf32_when_torch_does() -> None:
    x = torch.empty(2048, 2048, device="meta")
    (strict,) = costs(nodes(torch.mm, x, x), device("a100"))
    torch.set_float32_matmul_precision("high")
    try:
        (fast,) = costs(nodes(torch.mm, x, x), device("a100"))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 2 * fast.time_ns < strict.time_ns


def test_symbolic_sizes_are_taken_at_the_binding() -> None:
    chain = nodes(torch.mm, torch.empty(6, 8), torch.empty(8, 9), symbolic=True)
    product = chain[-1]
    left: Any = product.args[0]
    right: Any = product.args[1]
    symbols = [s.node.expr for s in (*left.meta["val"].shape, right.meta["val"].shape[1])]
    (found,) = costs([product], CPU, dict(zip(symbols, (100, 20, 30), strict=True)))
    assert found.flops == 2 * 100 * 20 * 30


def test_measured_times() -> None:
    def function(x: Tensor) -> Any:
        small = torch.nn.functional.dropout(x[:2, :2], 0.5)
        return small, x @ x, x @ x

    chain = nodes(function, torch.randn(300, 300))
    before = torch.get_rng_state()
    found = {node.name: result for node, result in zip(chain, timed_costs(chain), strict=True)}
    predicted = {node.name: result for node, result in zip(chain, costs(chain, CPU), strict=True)}
    assert all(
        (found[n].flops, found[n].bytes) == (c.flops, c.bytes) for n, c in predicted.items()
    )
    assert found["mm"] == found["mm_1"]
    assert found["mm"].time_ns > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cpu", "cpu"),
        ("A100", "a100-40gb"),
        ("cuda:A100-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_device_names_are_read_leniently(name: str, expected: str) -> None:
    assert device(name).name == expected


@pytest.mark.parametrize("name", ["", "cuda", "cuda:0", "H100 PCIe", "RTX A1000", "tpu"])
def test_unknown_device_lists_those_that_exist(name: str) -> None:
    with pytest.raises(
        ValueError, match="there are: cpu, rtx4090, a100-40gb, a100-80gb, generic-gpu, h100, h200"
    ):
        device(name)
