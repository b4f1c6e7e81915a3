"""Known values: real twins of the small fake tensors whose contents do not depend on floats.

A step may branch on values (a mask that is all ones, a random draw against a layer drop rate). Real
eager takes the branch of the real values, so the trace must know them.

Definition. A storage is *known* if it
    (1) is there before the step, with data, and is integer, boolean or a single number, or
    (2) is written by an op all of whose tensor operands are known,
and has at most `LIMIT` elements. Symbolic sizes have their example's values here, so a branch is that
of the example. The twin of a known storage is a real storage with the same bytes,
obtained by executing the same ops. A write by an op that (2) does not cover makes its operands
unknown.

Random draws are made from the present random state, without the draws of unknown tensors: the branch
is one that eager may take, not always the one that it takes next.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.fx.node import map_aggregate

from remat.ir._torch import FakeTensor, no_dispatch
from remat.ir.symbols import hint, hints

from .realize import flat_tensors, leaves

LIMIT = 1_000_000
"""Elements."""


class KnownValues:
    """The twins of the known storages that are alive."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._twins: dict[int, torch.UntypedStorage] = {}

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Make the storage of `fake` known, by a copy of the values of `real`, if it is small."""
        small = 1 if real.is_floating_point() or real.is_complex() else LIMIT
        if real.numel() > small:
            return
        if real.is_meta or isinstance(real, FakeTensor):
            return
        with no_dispatch(), torch.no_grad():
            copy: torch.UntypedStorage = real.cpu().clone().untyped_storage()
        if copy.nbytes() == hint(fake.untyped_storage().nbytes()):
            self._twins[fake.untyped_storage()._cdata] = copy

    def forget(self, storage: int) -> None:
        """The storage is gone, or no longer known."""
        self._twins.pop(storage, None)

    def value(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Real twin of a fake tensor; None if it is not known."""
        twin = self._twins.get(fake.untyped_storage()._cdata)
        if twin is None:
            return None
        with no_dispatch():
            empty = torch.empty(0, dtype=fake.dtype)
            return empty.set_(
                twin, hint(fake.storage_offset()), hints(fake.size()), hints(fake.stride())
            )

    def item(self, fake: torch.Tensor) -> bool | int | float | complex | None:
        """The value of a fake tensor with one element; None if it is not known."""
        value = self.value(fake)
        if value is None:
            return None
        with no_dispatch():
            number: bool | int | float | complex = value.item()
            return number

    def execute(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Repeat on real values what `op` has done on fake ones with the result `out`."""
        operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = flat_tensors(out)
        small = all(t is None or prod(hints(t.shape)) <= LIMIT for t in results)
        if small and self._all_known(operands) and self._on_cpu(results):
            try:
                self._repeat(op, args, kwargs, results)
                return
            except (RuntimeError, NotImplementedError, TypeError, IndexError):
                pass  # no such kernel, or values that it refuses: unknown
        if op._schema.is_mutable:
            for operand in operands:
                self.forget(operand.untyped_storage()._cdata)

    def _all_known(self, operands: list[torch.Tensor]) -> bool:
        return all(
            not isinstance(t, FakeTensor) or t.untyped_storage()._cdata in self._twins
            for t in operands
        )

    def _on_cpu(self, results: tuple[torch.Tensor | None, ...]) -> bool:
        return all(t is None or t.device.type == "cpu" for t in results)

    def _repeat(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: tuple[torch.Tensor | None, ...],
    ) -> None:
        def twin(leaf: Any) -> Any:
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                return leaf.node.hint
            return self.value(leaf) if isinstance(leaf, FakeTensor) else leaf

        real_args: Any = map_aggregate(args, twin)
        real_kwargs: Any = map_aggregate(dict(kwargs), twin)
        with no_dispatch(), torch.no_grad():
            reals = flat_tensors(op(*real_args, **real_kwargs))
        for fake, real in zip(results, reals, strict=True):
            if fake is None or real is None:
                continue
            storage = real.untyped_storage()
            same = (
                hints(fake.stride()) == real.stride()
                and hint(fake.storage_offset()) == real.storage_offset()
            )
            if same and storage.nbytes() == hint(fake.untyped_storage().nbytes()):
                self._twins[fake.untyped_storage()._cdata] = storage
