"""PyTorch's own partitioner: `torch._functorch.config.activation_memory_budget`, with its three solvers.

Its forward and backward graphs are made by torch itself, from a copy of our joint graph, and taken op for
op in torch's order. Backward recomputes what forward has not saved, where torch's pass that mimics the
autograd engine puts it. Merging equal ops (`cse`) is switched off, so that all have the same ops to run;
everything else is torch's default. Cuts of the same graph with the same options are made once, and settings
that save the same values give one program.

A budget below 1 may repeat random ops, for which torch 2.13 draws new numbers; here they repeat correctly
and keep the state for it, which flatters the peer.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import config, partitioners

from benchmarks.step import Step
from remat.ir import OutputKind

SOLVERS = ("dp", "ilp", "greedy")
BUDGETS = tuple(i / 20 for i in range(20, -1, -1))


def torch_budgets(step: Step) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every solver at every budget; the budgets 1 and 0 do not depend on the solver."""
    capture = step.prepared.capture
    joint = _copy(capture.joint)
    outputs = sum(kind is not OutputKind.GRADIENT for kind, _ in step.prepared.signature.outputs)
    saved = _Saved(partitioners.choose_saved_values_set)
    with (
        patch.object(partitioners, "solve_min_cut", _Cuts(partitioners.solve_min_cut)),
        patch.object(partitioners, "estimate_runtime", cache(partitioners.estimate_runtime)),
        patch.object(partitioners, "choose_saved_values_set", saved),
        patch.object(fx.GraphModule, "recompile"),  # nothing here is run
    ):
        for budget in BUDGETS:
            for solver in SOLVERS if 0 < budget < 1 else SOLVERS[:1]:
                name = f"torch {solver} {budget:.2f}" if 0 < budget < 1 else f"torch {budget:.2f}"
                settings: dict[str, Any] = {
                    "cse": False,
                    "activation_memory_budget": budget,
                    "activation_memory_budget_solver": solver,
                }
                try:
                    with config.patch(settings), torch.no_grad():
                        parts = partitioners.min_cut_rematerialization_partition(
                            joint, [], num_fwd_outputs=outputs
                        )
                except _Known:
                    continue
                yield name, _executions(step, *parts)


def _copy(joint: fx.GraphModule) -> fx.GraphModule:
    """The graph anew, nodes with the same names and values; torch marks its nodes."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
    return fx.GraphModule(joint, graph)


def _executions(step: Step, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[int, ...]:
    """Problem ops in the order of the two graphs; what neither runs is run where it was."""
    number = {name: v for v, name in enumerate(step.names)}
    parts = [
        [number[node.name] for node in part.graph.nodes if node.name in number]
        for part in (forward, backward)
    ]
    found = [*parts[0], step.border, *parts[1]]
    seen = dict.fromkeys(found)
    for v in step.program:
        if v not in seen:
            found.insert(found.index(v - 1) + 1 if v else 0, v)
    return tuple(found)


class _Known(Exception):
    """The same values have been saved before."""


class _Saved:
    """`choose_saved_values_set` that stops at an answer which it has given before."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.known: set[tuple[str, ...]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> list[fx.Node]:
        saved: list[fx.Node] = self.choose(*args, **kwargs)
        key = tuple(sorted(node.name for node in saved))
        if key in self.known:
            raise _Known
        self.known.add(key)
        return saved


class _Cuts:
    """`solve_min_cut` that remembers its answers for one graph."""

    def __init__(self, solve: Any) -> None:
        self.solve = solve
        self.known: dict[object, Any] = {}

    def __call__(self, graph: fx.Graph, info: Any, options: Any, dont_ban: Any = None) -> Any:
        key = (str(options), tuple(sorted(node.name for node in dont_ban or ())))
        if key not in self.known:
            self.known[key] = self.solve(graph, info, options, dont_ban)
        saved, banned = self.known[key]
        return list(saved), banned
