"""One symbolic capture describes every size: its trace at a binding is that of a capture at the sizes."""

import pytest
import sympy
import torch
import zoo

from remat.ir import Graph, Trace, verify
from remat.ir.canonical import canonicalize, is_backward
from remat.ir.capture import Capture, capture
from remat.ir.lift import lift
from remat.passes import StepProtocol, holders, live_ranges, planned_trace, profile

BATCH, SEQ = (sympy.Symbol(name, positive=True, integer=True) for name in ("batch", "seq"))
DYNAMIC = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "labels")}


def lifted(captured: Capture) -> Graph:
    signature, mutated, gradients = captured.signature()
    canonicalize(captured.joint, mutated, gradients)
    nodes = [node for node in captured.joint.graph.nodes if node.op == "call_function"]
    border = next(node.name for node in nodes if is_backward(node))
    graph = lift(captured.joint, signature, border=border, symbols=captured.symbols)
    verify(graph)
    return graph


def traced(graph: Graph) -> Trace:
    held = holders(graph, StepProtocol(outputs_held=False), {})
    return planned_trace(graph, live_ranges(graph, held))


def batch(count: int, length: int) -> dict[str, object]:
    ids = torch.randint(0, 100, (count, length))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


@pytest.fixture(scope="module")
def graph() -> Graph:
    model = zoo.build("gpt2").model
    return lifted(capture(model, (), batch(2, 16), dynamic=DYNAMIC))


def test_sizes_are_polynomials_in_the_users_names(graph: Graph) -> None:
    assert graph.symbols == {BATCH: 2, SEQ: 16}
    sizes = {storage.size for storage in graph.storages if not storage.size.is_Integer}
    assert 16 * BATCH * SEQ**2 in sizes
    assert all(size.is_polynomial(BATCH, SEQ) for size in sizes)


def test_a_symbolic_capture_gives_the_bytes_of_other_sizes(graph: Graph) -> None:
    model = zoo.build("gpt2").model
    static = profile(traced(lifted(capture(model, (), batch(5, 30)))))
    there = profile(traced(graph), {BATCH: 5, SEQ: 30})
    assert there.peak == static.peak
    assert there.resident == static.resident
