"""The original forward, run by eager on copies of all that it reads."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.ir._torch import reparametrize
from remat.ir.checkpoints import run_once
from remat.ir.structure import put_tensors, take_tensors

_DEVICES = ("cpu", "cuda")


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
    slots = {
        f"{path}.{key}".lstrip("."): copy_of[id(tensor)]
        for path, child in model.named_modules()
        for key, tensor in (*child._parameters.items(), *child._buffers.items())
        if tensor is not None
    }
    args, kwargs = put_tensors(pattern, copies[count:])
    with reparametrize(model, slots), run_once():
        output = forward(*args, **kwargs)
        after = [
            getattr(model.get_submodule(path), key)
            for path, _, key in (name.rpartition(".") for name in names)
        ]
    return after, take_tensors(output)[0]


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """What autocast casts to on each kind of device; None where it is off."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    )


@contextlib.contextmanager
def autocast(dtypes: Sequence[torch.dtype | None], *, cached: bool) -> Iterator[None]:
    """Autocast as it was.

    Args:
        dtypes: from `autocast_dtypes`.
        cached: casts are kept.
    """
    with contextlib.ExitStack() as stack:
        for device, dtype in zip(_DEVICES, dtypes, strict=True):
            if dtype is not None or torch.is_autocast_enabled(device):
                stack.enter_context(
                    torch.autocast(
                        device, dtype=dtype, enabled=dtype is not None, cache_enabled=cached
                    )
                )
        yield
