"""The user's say: which results are kept and which are made again, whatever the solver would choose.

A pattern is ``module glob::op glob``; either part may be left out: ``layers.*`` is every op in these
modules, ``::aten.mm*`` are these ops anywhere. In a glob, ``*`` stands for any text, dots included.

Definitions.
    (1) A pattern matches an op of forward that writes memory (a view writes none), if the module glob
        matches the path of the module that called it, or of one around it, and the op glob matches its
        target, such as ``aten.mm.default``.
    (2) *save*: what a matching op writes is never computed again, so it stays until its last use.
    (3) *recompute*: nothing that a matching op writes is alive while the border op runs, so backward finds
        none of it kept. It is not said where it is made again, nor what is kept for that.

Both are hard constraints. A pattern that matches nothing, or that cannot be kept whatever the budget, is an
error that names it. Whether patterns leave the budget feasible is found by the planner.

Not handled: ops of backward, which are never repeated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from remat.ir import Graph, Op, PatternError

from .liveness import holders
from .protocol import StepProtocol

SHOWN = 3
"""Names that an error suggests."""


@dataclass(frozen=True, slots=True)
class Patterns:
    """What the user demands."""

    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def named(self) -> str:
        """All of them, for people."""
        kinds = (("save", self.save), ("recompute", self.recompute))
        return ", ".join(f"{kind} {pattern!r}" for kind, group in kinds for pattern in group)

    def each_left_out(self) -> Iterator[tuple[str, "Patterns"]]:
        """Every pattern, for people, with the others."""
        for i, pattern in enumerate(self.save):
            rest = (*self.save[:i], *self.save[i + 1 :])
            yield f"save {pattern!r}", Patterns(rest, self.recompute)
        for i, pattern in enumerate(self.recompute):
            rest = (*self.recompute[:i], *self.recompute[i + 1 :])
            yield f"recompute {pattern!r}", Patterns(self.save, rest)


@dataclass(frozen=True, slots=True)
class Demands:
    """What the patterns mean in one graph."""

    saved: frozenset[int] = frozenset()
    """Graph ops that may not be executed again."""
    absent: frozenset[int] = frozenset()
    """Graph storages that may not be alive while the border runs."""


def demands(graph: Graph, patterns: Patterns, protocol: StepProtocol) -> Demands:
    """Find the ops that patterns match.

    Args:
        graph: the joint graph.
        patterns: what the user demands.
        protocol: what the caller keeps.

    Raises:
        PatternError: a pattern matches nothing, or cannot be kept; says why, or what is near.
    """
    saved: dict[int, str] = {}
    for pattern in patterns.save:
        saved |= dict.fromkeys(_matches(graph, "save", pattern), pattern)
    kept = {
        storage for storage, until in holders(graph, protocol, {}).items() if until >= graph.border
    }
    kept |= {s for value in graph.ops[graph.border].operands for s in graph.values[value].storages}
    later = {
        storage
        for op in graph.ops[graph.border + 1 :]
        for value in op.operands
        for storage in graph.values[value].storages
    }
    absent: set[int] = set()
    for pattern in patterns.recompute:
        for i in _matches(graph, "recompute", pattern):
            op = graph.ops[i]
            why = ""
            if i in saved:
                why = f"save {saved[i]!r} matches it too"
            elif op.pinned and not later.isdisjoint(op.allocates):
                why = f"backward needs its result, and it cannot be repeated: {op.pinned}"
            elif not kept.isdisjoint(op.allocates):
                why = "its result is an output of the step, which is kept until backward begins"
            if why:
                where = " ".join(part for part in (op.name, op.module, op.source) if part)
                raise PatternError(
                    f"recompute {pattern!r} matches {op.target} ({where}), but {why}. "
                    "Narrow the pattern to other modules or ops."
                )
            absent |= {*op.allocates}
    return Demands(frozenset(saved), frozenset(absent))


def _matches(graph: Graph, kind: str, pattern: str) -> list[int]:
    """The ops that a pattern matches, at least one."""
    modules, _, targets = pattern.partition("::")
    able = [(i, op) for i, op in enumerate(graph.ops[: graph.border]) if op.allocates]
    inside = [(i, op) for i, op in able if not modules or _is_inside(op, modules)]
    found = [i for i, op in inside if not targets or fnmatchcase(op.target, targets)]
    if not found:
        raise PatternError(
            f"{kind} {pattern!r} matches no op of forward that writes memory. "
            + (_near_ops(inside, modules, targets) if inside else _near_modules(able, modules))
        )
    return found


def _is_inside(op: Op, glob: str) -> bool:
    return any(fnmatchcase(path, glob) for path in _paths(op))


def _paths(op: Op) -> list[str]:
    """Path of the module that called it, and of every one around it."""
    parts = op.module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _near_modules(ops: Sequence[tuple[int, Op]], glob: str) -> str:
    paths = list(dict.fromkeys(path for _, op in ops for path in _paths(op) if path))
    near = get_close_matches(glob, paths, SHOWN, cutoff=0.0)
    return f"No module that runs ops matches {glob!r}; the nearest are {', '.join(near)}."


def _near_ops(ops: Sequence[tuple[int, Op]], modules: str, glob: str) -> str:
    targets = list(dict.fromkeys(op.target for _, op in ops))
    near = get_close_matches(glob, targets, SHOWN, cutoff=0.0)
    where = f"in {modules!r} " if modules else ""
    return f"The ops {where}that are nearest to {glob!r} are {', '.join(near)}."
