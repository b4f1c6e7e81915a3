"""Tensors that are alike, in all layers: one row for each kind.

Definition. Two tensors are alike if the same op of the same source line makes them with the same type and
shape, in modules that differ in numbers only (``layers.0.mlp``, ``layers.1.mlp``: ``layers.*.mlp``), for the
same role and decision. Tensors from before the step, and gradients, are alike by folded name. An op that
makes several tensors of a group is counted once in its time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from remat.passes.composition import fold

from .step_report import RECOMPUTED, SAVED, HeldTensor, Timeline


@dataclass(frozen=True, slots=True)
class Alike:
    """Tensors that are alike."""

    role: str
    module: str
    """Folded."""
    op: str
    """Empty for tensors from before the step."""
    source: str
    text: str
    decision: str
    reason: str
    """Of the first."""
    count: int
    bytes: int
    """Sum."""
    recompute_ns: int
    """Sum of the predicted times of the ops that make them."""

    @property
    def place(self) -> str:
        """Where they are made, folded: module, else source line, else the role."""
        return self.module or self.source or self.role


def alike(tensors: Iterable[HeldTensor]) -> tuple[Alike, ...]:
    """Fold tensors, the most bytes first."""
    groups: dict[tuple[str, str, str, str, str, str], list[HeldTensor]] = {}
    for tensor in tensors:
        named = not tensor.op or tensor.role == "gradient"
        place = fold(tensor.name) if named else fold(tensor.module)
        key = (tensor.role, place, tensor.op, tensor.source, tensor.text, tensor.decision)
        groups.setdefault(key, []).append(tensor)
    rows = [
        Alike(
            *key,
            members[0].reason,
            len(members),
            sum(tensor.bytes for tensor in members),
            sum({tensor.birth: tensor.recompute_ns for tensor in members}.values()),
        )
        for key, members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def decisions(timeline: Timeline) -> tuple[Alike, ...]:
    """What is decided of the activations of forward, folded, the most bytes first; without repetitions."""
    decided = (SAVED, RECOMPUTED)
    later = (i for i, op in enumerate(timeline.ops) if op.phase != "forward")
    border = next(later, len(timeline.ops))
    made = (t for t in timeline.tensors if t.decision in decided and 0 <= t.birth < border)
    return alike(tensor for tensor in made if tensor.bytes)
