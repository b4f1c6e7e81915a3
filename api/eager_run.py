"""The original forward, run by eager on copies of all that it reads."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.ir._torch import reparametrize
from remat.ir.checkpoints import run_once
from remat.ir.functional import registered_tensors
from remat.ir.structure import put_tensors, take_tensors


@dataclass(frozen=True, slots=True)
class Eager:
    """A forward that eager has run, on copies."""

    copies: Sequence[torch.Tensor]
    """Of the primals."""
    outputs: Sequence[torch.Tensor]
    running: Callable[[], AbstractContextManager[None]]
    """Context in which its backward runs."""

    def gradients(
        self, primals: Sequence[int], given: Mapping[int, torch.Tensor], *, keep: bool
    ) -> dict[int, torch.Tensor | None]:
        """Gradients of primals.

        Args:
            primals: their positions; each requires a gradient.
            given: gradients of outputs, by position.
            keep: others are asked for later.
        """
        with self.running():
            found = torch.autograd.grad(
                [self.outputs[i] for i in given],
                [self.copies[i] for i in primals],
                list(given.values()),
                retain_graph=keep,
                allow_unused=True,
            )
        return dict(zip(primals, found, strict=True))


def eager_forward(
    model: nn.Module,
    forward: Callable[..., Any],
    pattern: object,
    names: Sequence[str],
    primals: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run a forward on copies of all that it reads.

    Args:
        model: whose tensors are replaced meanwhile.
        forward: its original one, bound.
        pattern: of the call.
        names: of its parameters and buffers.
        primals: these, and more.
        copies: of these, then of the arguments.

    Returns:
        What stands in the place of each parameter and buffer afterwards, and the output tensors.
    """
    count = len(names)
    copy_of = {id(t): copy for t, copy in zip(primals[:count], copies[:count], strict=True)}
    slots = {name: copy_of[id(tensor)] for name, tensor in registered_tensors(model).items()}
    args, kwargs = put_tensors(pattern, copies[count:])
    with reparametrize(model, slots), run_once():
        output = forward(*args, **kwargs)
        after = [
            getattr(model.get_submodule(path), key)
            for path, _, key in (name.rpartition(".") for name in names)
        ]
    return after, take_tensors(output)[0]
