"""Read a published rematerialization graph (JSON, networkx node-link) as a `Problem`.

Three kinds of file: MOCCASIN's random layered graphs (their order is stored), graphs of traced programs
(their node ids are the order), and Checkmate's Keras graphs (order = networkx's topological sort, with
which the published budgets agree). A node is an op with one storage; memory while it runs is its own
output and every earlier output that is still read.
"""

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from remat.solvers import Op, Problem


def load_graph(path: Path) -> Problem:
    """The graph as a problem whose budget is 0; set it with ``dataclasses.replace``.

    Raises:
        ValueError: it has a cycle, a negative size or time, or an edge from or to no node; no node at all.
        KeyError: a field is missing.
    """
    data: dict[str, Any] = json.loads(path.read_text())
    graph = data["graph"]
    links = data["links"] if "links" in data else data["edges"]
    if "order" in graph:
        nodes = {x["name"]: (int(x["out_cost"]), int(x["duration"])) for x in data["nodes"]}
        edges = [(e["0"], e["1"]) for e in links]
        order: Sequence[Hashable] = graph["order"]
    else:
        nodes = {x["id"]: (int(x["cost_ram"]), int(x["cost_cpu"])) for x in data["nodes"]}
        edges = [(e["source"], e["target"]) for e in links]
        in_id_order = graph.get("keep_order") or str(graph.get("name", "")).startswith("dtr_")
        order = sorted(nodes) if in_id_order else _topological(list(nodes), edges)
    if not order or len(set(order)) != len(nodes) or any(min(x) < 0 for x in nodes.values()):
        raise ValueError("no node, a cycle, or a size or time below zero")
    position = {node: i for i, node in enumerate(order)}
    if any(end not in position for edge in edges for end in edge):
        raise ValueError("an edge leads from or to no node")
    if any(position[source] >= position[target] for source, target in edges):
        raise ValueError("an edge leads backward in the order of execution")
    reads: list[set[int]] = [set() for _ in order]
    for source, target in edges:
        reads[position[target]].add(position[source])
    ops = tuple(
        Op(cost=nodes[node][1], reads=tuple(sorted(reads[i])), writes=(i,))
        for i, node in enumerate(order)
    )
    sizes = tuple(nodes[node][0] for node in order)
    return Problem(ops, sizes, (-1,) * len(ops), resident=0, budget=0)


def _topological(
    nodes: Sequence[Hashable], edges: Sequence[tuple[Hashable, Hashable]]
) -> list[Hashable]:
    """Generation by generation, each in order of discovery, as networkx.topological_sort does."""
    waiting = dict.fromkeys(nodes, 0)
    targets: dict[Hashable, list[Hashable]] = {node: [] for node in nodes}
    for source, target in edges:
        waiting[target] += 1
        targets[source].append(target)
    generation = [node for node in nodes if not waiting[node]]
    order: list[Hashable] = []
    while generation:
        following: list[Hashable] = []
        for node in generation:
            order.append(node)
            for target in targets[node]:
                waiting[target] -= 1
                if not waiting[target]:
                    following.append(target)
        generation = following
    return order
