"""Outputs that may receive a gradient for which a plan was not made, and what it takes to do without it.

Definitions.
    (1) An output is *spare* if it requires a gradient in eager, and the plan gives it none.
    (2) A step that sends a gradient into a spare output is run again, by eager: see `rerun`. What has to be
        remembered of a forward for that is known of each plan beforehand, from its graphs.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from remat.ir.canonical import is_random
from remat.passes import Parts


@dataclass(frozen=True, slots=True)
class Spare:
    """The spare outputs of a plan."""

    outputs: tuple[int, ...]
    primals: tuple[int, ...]
    """What these outputs depend on and the plan has no gradient of: those of them that require one have it
    through spare outputs alone."""
    updated: tuple[int, ...]
    """Primals that the step updates in place, in order."""
    read: tuple[int, ...]
    """Those of them on whose values before the step its outputs depend."""
    unsaved: tuple[int, ...]
    """The other primals that autograd does not save for the plan, so that it would not notice a change."""
    random: bool
    """The forward draws random numbers."""


def spare_of(
    parts: Parts,
    results: tuple[bool, ...],
    planned: Collection[int],
    position: Mapping[str, int],
    saved: Collection[int],
) -> Spare | None:
    """The spare outputs of a plan; None if there are none.

    Args:
        parts: its graphs.
        results: per output tensor: it requires a gradient.
        planned: outputs that it was made for.
        position: of every primal, by name.
        saved: primals that autograd saves.
    """
    outputs = tuple(i for i, grad in enumerate(results) if grad and i not in planned)
    if not outputs:
        return None
    made = parts.forward.graph.output_node().args[0]
    assert isinstance(made, tuple | list)
    first = len(parts.mutations)
    behind = _behind([made[first + i] for i in outputs])
    behind_all = _behind([made[first + i] for i, grad in enumerate(results) if grad])
    trained = {target for stage in parts.stages for target in stage.gradients}
    updated = tuple(sorted(position[name] for name in parts.mutations))
    return Spare(
        outputs,
        tuple(i for name, i in position.items() if name in behind and name not in trained),
        updated,
        tuple(i for i in updated if parts.primals[i] in behind_all),
        tuple(i for i in position.values() if i not in updated and i not in saved),
        any(map(is_random, parts.forward.graph.nodes)),
    )


def _behind(values: list[object]) -> set[str]:
    """Names of all that values are computed from."""
    found: set[str] = set()
    left = [value for value in values if isinstance(value, fx.Node)]
    while left:
        node = left.pop()
        if node.name not in found:
            found.add(node.name)
            left += _operands(node)
    return found


def _operands(node: fx.Node) -> list[fx.Node]:
    """What a value is computed from: in training, a batch norm only updates its statistics."""
    if node.target is operator.getitem:
        of, index = node.args
        assert isinstance(of, fx.Node)
        if of.target is _BATCH_NORM and of.args[5] is True and index in (0, 1, 2):
            return [value for value in of.args[:3] if isinstance(value, fx.Node)]
    return node.all_input_nodes


_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
