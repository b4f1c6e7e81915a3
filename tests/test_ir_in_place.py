"""Every form in the table: the same bits and not a byte more, whatever the layout."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from remat.ir.in_place import TABLE, in_place, overwritable
from remat.passes import Call, measure_scratch

A = torch.ops.aten
X, Y, MASK, ZERO, DTYPE = "x", "y", "mask", "zero", "dtype"
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "aten._log_softmax.default": (X, -1, False),
    "aten._log_softmax_backward_data.default": (X, Y, -1, DTYPE),
    "aten._softmax.default": (X, -1, False),
    "aten._softmax_backward_data.default": (X, Y, -1, DTYPE),
    "aten.add.Tensor": (X, Y),
    "aten.clamp.default": (X, 0.2, 0.7),
    "aten.clamp_max.default": (X, 0.7),
    "aten.clamp_min.default": (X, 0.3),
    "aten.div.Scalar": (X, 0.3),
    "aten.div.Tensor": (X, Y),
    "aten.div.Tensor_mode": (X, Y),
    "aten.elu_backward.default": (X, 1.0, 1.0, 1.0, False, Y),
    "aten.gelu_backward.default": (X, Y),
    "aten.hardsigmoid_backward.default": (X, Y),
    "aten.hardtanh_backward.default": (X, Y, 0.2, 0.7),
    "aten.leaky_relu_backward.default": (X, Y, 0.1, False),
    "aten.masked_fill.Scalar": (X, MASK, 0.3),
    "aten.masked_fill.Tensor": (X, MASK, ZERO),
    "aten.maximum.default": (X, Y),
    "aten.minimum.default": (X, Y),
    "aten.mul.Scalar": (X, 0.3),
    "aten.mul.Tensor": (X, Y),
    "aten.pow.Tensor_Scalar": (X, 3),
    "aten.pow.Tensor_Tensor": (X, Y),
    "aten.sigmoid_backward.default": (X, Y),
    "aten.silu_backward.default": (X, Y),
    "aten.softplus_backward.default": (X, Y, 1.0, 20.0),
    "aten.sub.Tensor": (X, Y),
    "aten.tanh_backward.default": (X, Y),
    "aten.threshold_backward.default": (X, Y, 0.5),
    "aten.where.self": (MASK, X, Y),
}
"""Arguments of the ops that take more than X."""
KEYWORDS: dict[str, dict[str, Any]] = {
    "aten.add.Tensor": {"alpha": 2},
    "aten.div.Tensor_mode": {"rounding_mode": "floor"},
    "aten.gelu.default": {"approximate": "tanh"},
    "aten.gelu_backward.default": {"approximate": "tanh"},
}
DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
"""With the type in which to compare bits."""
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "channels last": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}
SMALL, LARGE = (2, 3, 5, 7), (4, 3, 40, 97)
"""Fewer elements than a few vector registers hold, and enough for several threads."""
CASES = [
    *product([SMALL], DTYPES, LAYOUTS),
    (LARGE, torch.float32, "contiguous"),
    (LARGE, torch.bfloat16, "transposed"),
]


def one_op(op: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """A node that calls an op on placeholders for its tensors, with values as lifting finds them."""
    graph = fx.Graph()

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder("x")
        node.meta["val"] = leaf
        return node

    kwargs = KEYWORDS.get(str(op), {})
    node = graph.call_function(op, tuple(map(placed, arguments)), kwargs)
    node.meta["val"] = op(*arguments, **kwargs)
    return node


def called(node: fx.Node, over: fx.Node | None = None) -> Call:
    """The call that a node stands for, on copies; in the form that writes over an operand."""
    copies = {n: deepcopy(n.meta["val"]) for n in node.all_input_nodes}
    args: Any = map_arg(node.args, copies.__getitem__)
    if over is None:
        return Call(node.target, args, node.kwargs)  # type: ignore[arg-type]
    form, place = in_place(node, copies[over])
    return Call(form, args, {**node.kwargs, **place})


def forms(node: fx.Node) -> list[Call]:
    """Each form of a node; checks that it writes the same bits over the operand, and into nothing else."""
    result = node.meta["val"]
    made = [called(node, over) for over in overwritable(node)]
    for call in made:
        written = call.target(*call.args, **call.kwargs)
        assert (written.dtype, written.stride()) == (result.dtype, result.stride())
        bits = DTYPES[result.dtype]
        assert torch.equal(written.view(bits), result.view(bits))
        assert any(written is leaf for leaf in (*call.args, *call.kwargs.values()))
    return made


def check_scratch(nodes: list[fx.Node]) -> None:
    """No form of any node takes another number of bytes than the node."""
    calls = [(called(node), form) for node in nodes for form in forms(node)]
    found = measure_scratch([call for pair in calls for call in pair])
    assert calls
    assert all(scratch.origin == "measured" for scratch in found)
    assert [scratch.bytes for scratch in found[::2]] == [scratch.bytes for scratch in found[1::2]]


def tensors(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> dict[Any, Any]:
    made = [LAYOUTS[layout](torch.randn(shape)) for _ in range(3)]
    zero = torch.zeros((), dtype=dtype)
    return {
        X: made[0].to(dtype),
        Y: made[1].to(dtype),
        MASK: made[2] > 0,
        ZERO: zero,
        DTYPE: dtype,
    }


@pytest.mark.parametrize("op", TABLE, ids=str)
def test_a_form_in_the_table_gives_the_same_bits_and_takes_no_byte_more(op: Any) -> None:
    torch.manual_seed(0)
    letters = ARGUMENTS.get(str(op), (X,))
    nodes: list[fx.Node] = []
    for shape, dtype, layout in CASES:
        known = tensors(shape, dtype, layout)
        node = one_op(op, tuple(known.get(letter, letter) for letter in letters))
        result = node.meta["val"]
        alike = [
            n
            for n in node.all_input_nodes
            if (v := n.meta["val"]).dtype == result.dtype and v.stride() == result.stride()
        ]
        over_first = op in (A.relu.default, A.masked_fill.Scalar, A.masked_fill.Tensor)
        assert overwritable(node) == (alike[:1] if over_first else alike)
        nodes.append(node)
    check_scratch(nodes)


@pytest.mark.parametrize("op", [op for op in TABLE if ARGUMENTS.get(str(op)) == (X, Y)], ids=str)
def test_what_stands_beside_the_overwritten_operand_may_be_anything(op: Any) -> None:
    torch.manual_seed(0)
    nodes: list[fx.Node] = []
    for dtype in DTYPES:
        x = torch.rand(6, 70).to(dtype)
        besides: list[Any] = [torch.rand(6, 70).to(dtype)]
        if not str(op).startswith(
            ("aten.gelu", "aten.silu", "aten.hardsigmoid")
        ):  # of equal shapes
            besides += [torch.rand(70).to(dtype), torch.tensor(0.3), torch.tensor(0.3).double()]
        if op in (A.add.Tensor, A.sub.Tensor, A.mul.Tensor, A.div.Tensor):
            besides.append(0.3)
        nodes += [one_op(op, (x, beside)) for beside in besides]
        assert nodes[-1].all_input_nodes[0] in overwritable(nodes[-1])
    check_scratch(nodes)


@pytest.mark.parametrize("op", TABLE, ids=str)
def test_nothing_is_overwritten_where_operands_are_laid_out_differently(op: Any) -> None:
    letters = ARGUMENTS.get(str(op), (X,))
    known = tensors(SMALL, torch.float32, "contiguous")
    first = LAYOUTS["transposed"](known.get(letters[0], known[X]))
    arguments = [first, *(known.get(letter, letter) for letter in letters[1:])]
    node = one_op(op, tuple(arguments))
    full = [n for n in node.all_input_nodes if n.meta["val"].shape == first.shape]
    assert len(full) == 1 or overwritable(node) == []


def test_an_operand_that_is_no_whole_block_of_the_result_is_left_alone() -> None:
    x, row = torch.rand(6, 70), torch.rand(70)
    for op, *arguments in (
        (A.add.Tensor, x[:, ::2], row[::2]),  # parts of blocks
        (A.add.Tensor, x[1:], x[1:]),  # the same one twice, and not the whole
        (A.mul.Tensor, x, x),
        (A.mul.Tensor, x, x.view(6, 70)),
        (A.exp.default, row.expand(6, 70)),
        (A.add.Tensor, x.bfloat16(), x),  # only x has the type of the result
        (A.exp.default, torch.arange(6)),
    ):
        expected = [x] if arguments[0].dtype == torch.bfloat16 else []
        node = one_op(op, tuple(arguments))
        assert [n.meta["val"] is x for n in overwritable(node)] == [True] * len(expected)
