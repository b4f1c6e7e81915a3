from dataclasses import replace

import pytest
import sympy

from remat.ir import (
    BORDER,
    Graph,
    Op,
    Output,
    OutputKind,
    Phase,
    Role,
    Storage,
    Value,
    VerifyError,
    to_text,
    verify,
)

BYTES = [sympy.Integer(n) for n in (64, 128, 4, 4, 64)]


def small_graph() -> Graph:
    """y = f(w); loss = sum(view(y)); dw = g(tangent)."""
    return Graph(
        storages=(
            Storage("w", Role.PARAMETER, BYTES[0]),
            Storage("y", Role.ACTIVATION, BYTES[1]),
            Storage("loss", Role.OUTPUT, BYTES[2]),
            Storage("tangent", Role.TANGENT, BYTES[3]),
            Storage("dw", Role.GRADIENT, BYTES[4]),
        ),
        values=(
            Value("w", (0,), "f32[16]"),
            Value("y", (1,), "f32[32]"),
            Value("v", (1,), "f32[4, 8]"),
            Value("loss", (2,), "f32[]"),
            Value("tangent", (3,), "f32[]"),
            Value("border", (3,)),
            Value("dw", (4,), "f32[16]"),
        ),
        inputs=(0,),
        ops=(
            Op(
                "y",
                "f",
                Phase.FORWARD,
                (0,),
                1,
                (1,),
                sympy.Integer(8),
                module="a",
                source="m.py:1",
            ),
            Op("v", "view", Phase.FORWARD, (1,), 2, ()),
            Op("loss", "sum", Phase.FORWARD, (2,), 3, (2,)),
            Op("border", BORDER, Phase.FORWARD, (3,), 5, (3,)),
            Op("dw", "g", Phase.BACKWARD, (4,), 6, (4,)),
        ),
        outputs=(Output(3, OutputKind.RESULT, "0"), Output(6, OutputKind.GRADIENT, "w")),
        symbols={},
    )


def test_a_sound_graph_passes() -> None:
    verify(small_graph())


def test_text_form_is_stable() -> None:
    assert to_text(small_graph()) == (
        "input %w : parameter 64\n"
        "%y f32[32] = f(%w) ! 128 + 8 @ a m.py:1\n"
        "%v alias = view(%y)\n"
        "%loss f32[] = sum(%v) ! 4\n"
        "%border = remat.border(%loss) ! 4\n"
        "%dw f32[16] = g(%tangent) ! 64\n"
        "result 0 = %loss\n"
        "gradient w = %dw"
    )


def with_op(index: int, **changes: object) -> Graph:
    graph = small_graph()
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **changes)  # type: ignore[arg-type]
    return replace(graph, ops=tuple(ops))


def overwriting(read: int) -> Graph:
    """The small graph with ``v2 = f(y)``, written over y; the loss and the result are of `read` or v2."""
    graph = small_graph()
    over = Op("v2", "f", Phase.FORWARD, (2,), 7, (), overwrites=(1,))
    loss = replace(graph.ops[2], operands=(2 if read == 1 else 7,))
    outputs = (replace(graph.outputs[0], value=1), *graph.outputs[1:])
    return replace(
        graph,
        values=(*graph.values, Value("v2", (1,), "f32[32]")),
        ops=(*graph.ops[:2], over, loss, *graph.ops[3:]),
        outputs=outputs if read == 5 else graph.outputs,
    )


def test_what_is_written_over_an_operand_is_no_alias() -> None:
    graph = overwriting(7)
    verify(graph)
    assert "%v2 f32[32] = f(%v) ! in place of y" in to_text(graph)


@pytest.mark.parametrize(
    ("graph", "match"),
    [
        (with_op(1, name="y"), r"\(1\) more than one op is called 'y'"),
        (with_op(0, operands=(1,)), r"\(2\) reads 'y', not yet computed"),
        (with_op(0, operands=(4,)), r"\(2\) reads 'tangent'"),
        (with_op(3, target="f"), r"\(3\) there are 0 border ops"),
        (with_op(2, phase=Phase.BACKWARD), r"\(3\) a backward op before the border"),
        (with_op(4, phase=Phase.FORWARD), r"\(3\) a forward op after the border"),
        (with_op(2, allocates=(2, 1)), r"\(4\) allocates 'y', which exists already"),
        (with_op(2, allocates=()), r"\(5\) refers to 'loss'"),
        (with_op(0, scratch=sympy.Integer(-1)), r"\(6\) scratch of -1 bytes"),
        (with_op(0, overwrites=(0,)), r"\(8\) overwrites 'w'"),
        (with_op(2, overwrites=(1,)), r"\(8\) overwrites 'y'"),
        (overwriting(1), r"\(8\) reads 'v', overwritten by v2"),
        (overwriting(5), r"\(8\) output '0' is overwritten"),
    ],
)
def test_a_broken_graph_is_refused_with_its_surroundings(graph: Graph, match: str) -> None:
    with pytest.raises(VerifyError, match=match):
        verify(graph)


def test_the_error_marks_the_op() -> None:
    with pytest.raises(VerifyError, match=r"> %v alias = view\(%dw\)"):
        verify(with_op(1, operands=(6,)))
