"""Two tensors, compared bit for bit, and how they differ."""

import torch


def differs(mine: torch.Tensor | None, eager: torch.Tensor | None) -> str:
    """How a tensor differs from eager's, for people; empty if it does not. NaN equals NaN."""
    if mine is None or eager is None:
        return "" if mine is eager else f"{_text(mine)}, and eager has {_text(eager)}"
    if (mine.shape, mine.dtype, mine.requires_grad and mine.grad_fn is None) != (
        eager.shape,
        eager.dtype,
        eager.requires_grad and eager.grad_fn is None,
    ):
        return f"{_text(mine)}, and eager has {_text(eager)}"
    mine, eager = mine.detach(), eager.detach()
    if torch.equal(mine, eager):
        return ""
    unequal = (mine != eager) & ~(mine.isnan() & eager.isnan())
    count = int(unequal.sum())
    if not count:
        return ""
    wide = torch.complex128 if mine.is_complex() else torch.float64
    most = (mine.to(wide) - eager.to(wide))[unequal].abs().max().item()
    return f"{count} of {mine.numel()} elements of {_text(mine)} differ, by up to {most:.3g}"


def _text(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
