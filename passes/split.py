"""Split: a rewritten joint graph to a forward graph and the stages of backward.

Every part is a `GraphModule` that takes its inputs as one list, empties the list, and drops every
intermediate after its last use, so that what is alive while it runs is what liveness says.

The forward graph returns updates, results, saved values and sizes. A stage takes what it needs of primals,
tangents, saved values and earlier stages' values by name, and returns the gradients it delivers and
what later stages need. `joined` makes one backward graph of the stages, for reading.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from remat.ir import OutputKind
from remat.ir._torch import BoxedCodeGen
from remat.ir.lift import Signature
from remat.ir.sizes import is_number

from .rewrite import Rewritten


@dataclass(frozen=True, slots=True)
class Stage:
    """One slice of backward."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    """Names of what it reads, in order."""
    dropped: tuple[bool, ...]
    """Per input: no later stage reads it."""
    kept: tuple[str, ...]
    """Names of what it returns for later stages, after the gradients."""
    gradients: tuple[str, ...]
    """Targets of the gradients that it returns, first."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A planned step as graphs that can run."""

    forward: fx.GraphModule
    mutations: tuple[str, ...]
    """Targets of the updates, the first outputs of forward."""
    results: int
    """Number of results, which follow."""
    saved: tuple[str, ...]
    """Names of the saved values, which follow."""
    numbers: tuple[str, ...]
    """Names of the sizes that backward reads, the last outputs of forward."""
    primals: tuple[str, ...]
    """Names of the inputs of forward, in order; backward refers to them by these names."""
    tangents: tuple[str, ...]
    """Names of the tangents, in order."""
    stages: tuple[Stage, ...]


def split_joint(rewritten: Rewritten, signature: Signature) -> Parts:
    """Cut a rewritten joint graph at the border and at the ends of the stages."""
    joint = rewritten.joint
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    placeholders = [node.name for node in joint.graph.nodes if node.op == "placeholder"]
    count = len(placeholders) - len(signature.gradient_results)
    primals, tangents = placeholders[:count], placeholders[count:]
    cut = next(i for i, node in enumerate(nodes) if node.name == rewritten.border)
    forward, backward = nodes[:cut], nodes[cut:]
    outputs = list(zip(joint.graph.output_node().args[0], signature.outputs, strict=True))  # type: ignore[arg-type]
    early: list[fx.Node | None] = [
        n for n, (kind, _) in outputs if kind is not OutputKind.GRADIENT
    ]
    gradients = [
        (node, target)
        for node, (kind, target) in outputs
        if kind is OutputKind.GRADIENT and isinstance(node, fx.Node)
    ]
    of_forward = {node.name: node for node in forward}
    kept = [of_forward[name] for name in _reads(backward) if name in of_forward]
    saved = [node for node in kept if not is_number(node)]
    numbers = [node for node in kept if is_number(node)]
    stages = _stages(rewritten, backward, gradients)
    return Parts(
        forward=_module(joint, forward, primals, [*early, *saved, *numbers]),
        mutations=tuple(t for _, (kind, t) in outputs if kind is OutputKind.MUTATION),
        results=sum(kind is OutputKind.RESULT for _, (kind, _) in outputs),
        saved=tuple(node.name for node in saved),
        numbers=tuple(node.name for node in numbers),
        primals=tuple(primals),
        tangents=tuple(tangents),
        stages=stages,
    )


def joined(parts: Parts) -> fx.GraphModule:
    """The stages of backward in one graph, to be read: gradients in the order in which they are made."""
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen())
    made: dict[str, fx.Node] = {}
    constants: dict[str, Any] = {}
    own = {node.name for s in parts.stages for node in s.module.graph.nodes if node.op == _CALL}
    for name in dict.fromkeys(name for stage in parts.stages for name in stage.inputs):
        if name not in own:
            made[name] = graph.placeholder(name)
    gradients: list[fx.Node] = []
    for stage in parts.stages:
        for node in stage.module.graph.nodes:
            if node.op == "placeholder":
                if node.name not in own:
                    made[node.name].meta = dict(node.meta)
            elif node.op != "output" and node.name not in made:
                made[node.name] = graph.node_copy(node, lambda n: made[n.name])
                if node.op == "get_attr":
                    constants[str(node.target)] = getattr(stage.module, str(node.target))
        outputs: Any = stage.module.graph.output_node().args[0]
        gradients += [made[node.name] for node in outputs[: len(stage.gradients)]]
    graph.output(tuple(gradients))
    return fx.GraphModule(constants, graph)


_CALL = "call_function"


def _reads(nodes: Sequence[fx.Node]) -> list[str]:
    """Names of what `nodes` read and do not compute, in order of first use."""
    own = {node.name for node in nodes}
    found: dict[str, None] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand.name not in own and operand.op != "get_attr":
                found[operand.name] = None
    return list(found)


def _stages(
    rewritten: Rewritten, backward: Sequence[fx.Node], gradients: Sequence[tuple[fx.Node, str]]
) -> tuple[Stage, ...]:
    position = {node.name: i for i, node in enumerate(backward)}
    cuts = [position[end] + 1 for end in rewritten.stage_ends[:-1]] + [len(backward)]
    slices = [list(backward[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    needs = [_reads(part) for part in slices]
    stages: list[Stage] = []
    for i, part in enumerate(slices):
        ready = [g for g in gradients if rewritten.delivered[g[1]] == i]
        own = {node.name for node in part}
        inputs = list(needs[i])
        inputs += [
            node.name for node, _ in ready if node.name not in own and node.name not in inputs
        ]
        keep = {name for read in needs[i + 1 :] for name in read}
        keep |= {node.name for node, target in gradients if rewritten.delivered[target] > i}
        kept = [node for node in part if node.name in keep]
        stages.append(
            Stage(
                module=_module(rewritten.joint, part, inputs, [node for node, _ in ready] + kept),
                inputs=tuple(inputs),
                dropped=tuple(name not in keep for name in inputs),
                kept=tuple(node.name for node in kept),
                gradients=tuple(target for _, target in ready),
            )
        )
    return tuple(stages)


def _module(
    joint: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[str],
    outputs: Sequence[fx.Node | None],
) -> fx.GraphModule:
    """A graph module of `nodes` with boxed inputs."""
    graph = fx.Graph()
    graph.set_codegen(BoxedCodeGen())
    made: dict[str, fx.Node] = {}
    by_name = {node.name: node for node in joint.graph.nodes}
    for name in inputs:
        made[name] = graph.placeholder(name)
        made[name].meta = dict(by_name[name].meta)
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and operand.name not in made:
                made[operand.name] = graph.node_copy(operand)
        made[node.name] = graph.node_copy(node, lambda n: made[n.name])
    graph.output(tuple(None if node is None else made[node.name] for node in outputs))
    return fx.GraphModule(joint, graph)
