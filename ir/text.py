"""The stable text form of a graph: one line for each input, op and output; for tests and errors.

    input %primals_1 : parameter 4096
    %addmm f32[8, 128] = aten.addmm.default(%primals_2, %view, %t) ! 4096 + 64 @ h.0.mlp mlp.py:12
    %view alias = aten.view.default(%addmm)
    border(%loss) ! 4
    ...
    gradient primals_1 = %mm_1

After ``!`` stand the bytes that an op allocates, or what it writes over, then its scratch if it has any;
after ``@`` module path and source line. Sizes are printed as sympy prints them. Storages have no names of
their own here: they are told apart by the op that allocates them.
"""

from .graph import Graph, Op


def to_text(graph: Graph) -> str:
    """All of a graph."""
    inputs = [_input(graph, value) for value in graph.inputs]
    ops = [op_text(graph, op) for op in graph.ops]
    outputs = [f"{o.kind} {o.target} = %{graph.values[o.value].name}" for o in graph.outputs]
    return "\n".join([*inputs, *ops, *outputs])


def _input(graph: Graph, value: int) -> str:
    held = graph.values[value]
    sizes = " ".join(f"{graph.storages[s].role} {graph.storages[s].size}" for s in held.storages)
    return f"input %{held.name} : {sizes}".rstrip(" :")


def op_text(graph: Graph, op: Op) -> str:
    """One op."""
    operands = ", ".join(f"%{graph.values[value].name}" for value in op.operands)
    result = graph.values[op.result]
    kind = "alias" if graph.is_alias(op) else result.text
    line = f"%{result.name} {kind}".rstrip() + f" = {op.target}({operands})"
    if op.allocates:
        line += " ! " + ", ".join(str(graph.storages[s].size) for s in op.allocates)
    if op.overwrites:
        line += " ! in place of " + ", ".join(graph.storages[s].name for s in op.overwrites)
    if op.scratch:
        line += f" + {op.scratch}"
    if op.module or op.source:
        line += " @ " + " ".join(part for part in (op.module, op.source) if part)
    return line


def around(graph: Graph, op: int, lines: int = 5) -> str:
    """The ops before and after one, with a mark at it; for errors."""
    first = max(0, op - lines)
    return "\n".join(
        f"{'>' if i == op else ' '} {op_text(graph, graph.ops[i])}"
        for i in range(first, min(len(graph.ops), op + lines + 1))
    )
