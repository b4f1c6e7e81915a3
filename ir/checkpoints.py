"""Checkpointing that a model does itself, left out of its trace.

`torch.utils.checkpoint` runs a part of the forward again in backward. A trace would hold both runs, and a
plan could not choose any more. So each such part is traced once, and the plan decides what is run again.
All that calls `torch.utils.checkpoint` is covered, whoever imported it: transformers, diffusers, own code.

The reentrant kind gives its outputs a gradient only if one of the tensors that are handed to it has one; that
is kept.

Not handled: ``preserve_rng_state=False`` with dropout inside, where eager draws another mask in backward, and
its gradients are of another function; checkpointing that does not use torch's.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint


@contextlib.contextmanager
def run_once() -> Iterator[list[str]]:
    """Run checkpointed functions once; yields a list that gets the name of each function."""
    seen: list[str] = []

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        seen.append(_name(function))
        needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with contextlib.nullcontext() if needed else torch.no_grad():
            return function(*args)

    def twice(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        seen.append(_name(function))
        yield  # the function runs here

    with mock.patch.multiple(
        torch.utils.checkpoint,
        CheckpointFunction=SimpleNamespace(apply=reentrant),
        _checkpoint_without_reentrant_generator=twice,
    ):
        yield seen


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
