"""A loss in the place of one that nobody has told us: what it takes is counted, it is never run.

A script computes its loss from what the model returns. If that holds a loss, there is nothing more to it.
If not, and for outputs that turn out to be used beside that loss, a cross-entropy over the last dimension is
assumed: it keeps the logarithms of the probabilities, and makes two tensors of the outputs' size in backward.
Few losses take more; one that does (several terms over large outputs) makes the step's peak higher than
predicted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from remat.ir.structure import loss_of, take_tensors


def assumed_loss(output: Any, used: Sequence[int] = ()) -> Tensor:
    """A scalar made of a model's output.

    Args:
        output: the one called loss in it is it; or its 0-dimensional tensors are; else all that can have a
            gradient are taken for logits.
        used: positions of output tensors of which the script has turned out to compute a loss, too.
    """
    every = take_tensors(output)[0]
    tensors = [t for t in every if t.is_floating_point() and t.requires_grad]
    loss, scalars = loss_of(output), [t for t in tensors if t.dim() == 0]
    first = [loss] if loss is not None else scalars or tensors
    more = [every[i] for i in used if i < len(every) and every[i].requires_grad]
    more = [t for t in more if not any(t is other for other in first)]
    terms = [t if t.dim() == 0 else _cross_entropy(t) for t in (*first, *more)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _cross_entropy(logits: Tensor) -> Tensor:
    if logits.dim() < 2:
        return logits.square().mean()
    rows = logits.flatten(0, -2)
    return functional.cross_entropy(
        rows, torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device)
    )
