"""Fake twins of tensors: sizes, strides, types and device, no data.

A tensor without data (meta, or fake already) gets a fake on the CPU. Sizes that `dynamic` names become
symbols, one per name; those of a part of a larger tensor, whose strides do not follow from its sizes, stay
numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._torch import (
    ConstantSource,
    DimDynamic,
    FakeTensor,
    FakeTensorMode,
    StatelessSymbolicContext,
)

Dynamic = Mapping[str, Mapping[int, str]]
"""Argument name -> dimension -> the user's name for its size."""


def sizes_of(
    tensors: Sequence[torch.Tensor], names: Sequence[str], dynamic: Dynamic
) -> dict[str, int]:
    """The number of every size that `dynamic` names, in these tensors.

    Args:
        tensors: arguments.
        names: argument name of each tensor.
        dynamic: which sizes are named.

    Raises:
        ValueError: one name has two numbers, or a tensor has no such dimension.
    """
    found: dict[str, int] = {}
    where: dict[str, str] = {}
    for argument, tensor in zip(names, tensors, strict=True):
        for dim, name in dynamic.get(argument, {}).items():
            if dim >= tensor.dim():
                raise ValueError(
                    f"{argument} has {tensor.dim()} dimensions, and dynamic names {dim}: there is no "
                    f"dimension {dim}, counted from 0"
                )
            size = int(tensor.shape[dim])
            if found.setdefault(name, size) != size:
                raise ValueError(
                    f"{name} is {found[name]} in {where[name]} and {size} in {argument}"
                )
            where.setdefault(name, argument)
    return found


def fake_tensors(
    mode: FakeTensorMode,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str] = (),
    dynamic: Dynamic | None = None,
) -> tuple[list[torch.Tensor], dict[str, str]]:
    """Fakes of `tensors` in `mode`, and the user's name of each symbol made for them.

    Args:
        mode: the fake mode that will own them.
        tensors: real, fake or meta tensors.
        names: argument name of each tensor; needed for `dynamic`.
        dynamic: which sizes become symbols.
    """
    fakes: list[torch.Tensor] = []
    symbols: dict[str, torch.SymInt] = {}
    for i, tensor in enumerate(tensors):
        wanted = (dynamic or {}).get(names[i], {}) if names else {}
        if wanted:
            fake = _symbolic(mode, tensor, f"{names[i]}_{i}", wanted)
            for dim, name in wanted.items():
                size = fake.shape[dim]
                if name in symbols:
                    torch._check(size == symbols[name])  # type: ignore[no-untyped-call]
                elif isinstance(size, torch.SymInt):
                    symbols[name] = size
        else:
            fake = _static(mode, tensor)
        fakes.append(fake.requires_grad_(tensor.requires_grad))
    return fakes, {str(size.node.expr): name for name, size in symbols.items()}


def _static(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )


def _symbolic(
    mode: FakeTensorMode, tensor: torch.Tensor, source: str, wanted: Mapping[int, str]
) -> torch.Tensor:
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[
            DimDynamic.DYNAMIC if dim in wanted else DimDynamic.STATIC
            for dim in range(tensor.dim())
        ]
    )
    real = not (tensor.is_meta or isinstance(tensor, FakeTensor))
    template = tensor.detach() if real else _on_meta(tensor)
    fake = mode.from_tensor(template, source=ConstantSource(source), symbolic_context=context)
    if _symbols(fake.stride()) - _symbols(fake.shape):  # part of a larger tensor
        return _static(mode, tensor)
    return fake if real else _static(mode, fake)


def _symbols(sizes: Sequence[int | torch.SymInt]) -> set[Any]:
    return {s for n in sizes if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def is_fake(tensor: torch.Tensor) -> bool:
    """The tensor has no data: it is fake or on the meta device."""
    return tensor.is_meta or isinstance(tensor.data, FakeTensor)
