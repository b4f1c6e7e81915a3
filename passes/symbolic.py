"""A planned step with symbolic sizes: its trace, and the calls of its kernels.

The rewritten graph is lifted with its symbols. Scratch is fitted (`scratch_fit`), and so is a loss outside
the model, which is traced at several sizes: the same ops, whose bytes are polynomials.

What is fitted is a prediction at sizes that were not sampled. The bytes at one size are exact in the trace
of `emitted_at`, and only those are compared with a budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import sympy

from remat.ir import Block, Trace, UnsupportedGraphError
from remat.ir.domain import Domain
from remat.ir.lift import Loss, Measured

from .emit import Emitted, held_by
from .prepare import Prepared, calls_of, loss_at, ops_of
from .realize import Call
from .scratch_fit import fit_scratch, interpolated, products, samples

POINTS = 16
"""Sizes at which a loss is traced."""
DEGREE = 2
"""Highest power of a symbol in the bytes of a loss."""


@dataclass(frozen=True, slots=True)
class SymbolicStep:
    """A planned step at all sizes of a domain."""

    trace: Trace
    """Forward, backward and optimizer step, in the names of the sizes."""
    calls: tuple[Call | None, ...]
    """The kernel of every instant, described; None for the border, a loss, and the optimizer's."""
    symbols: Mapping[sympy.Symbol, int]
    """With the numbers that the plan was made at."""
    domain: Domain


def symbolic_step(emitted: Emitted, domain: Domain) -> SymbolicStep:
    """The step of a program that was written out at one size, at all sizes.

    Args:
        emitted: the program.
        domain: where its graph holds.

    Raises:
        UnsupportedGraphError: the loss cannot be followed at other sizes.
    """
    at, rewritten = emitted.prepared, emitted.rewritten
    names = [node.name for node in ops_of(at.capture.joint)]
    calls = dict(zip(names, calls_of(at.capture), strict=True))
    fitted = fit_scratch(list(calls.values()), domain.symbols, domain.conditions)
    measured = {name: Measured(fit.bytes) for name, fit in zip(calls, fitted, strict=True)}
    loss, targets = _fitted_loss(at, domain) if at.loss else (None, at.targets)
    step = replace(at, measured=measured, loss=loss, targets=targets, sizes={})
    graph, _, trace = held_by(rewritten, step, emitted.protocol, emitted.extra, emitted.optimizer)
    origins = rewritten.origins()
    kernels = [calls.get(origins.get(op.name, op.name)) for op in graph.ops]
    if loss is not None:
        kernels[graph.border : graph.border + 1] = [None] * len(loss.trace.instants)
    kernels += [None] * (len(trace.instants) - len(kernels))
    return SymbolicStep(trace, tuple(kernels), domain.symbols, domain)


def _fitted_loss(prepared: Prepared, domain: Domain) -> tuple[Loss, tuple[Block, ...]]:
    """The loss outside the model, and its targets, with sizes as polynomials."""
    points = list(islice(samples(domain.symbols, domain.conditions), POINTS))
    found: list[tuple[Loss, tuple[Block, ...]]] = []
    for point in points:
        sizes = {**domain.fixed, **{str(symbol): size for symbol, size in point.items()}}
        loss, targets = loss_at(prepared, sizes)
        assert loss is not None
        found.append((loss, targets))
    first, _ = found[0]
    kinds = {tuple((b.name, b.birth, b.death) for b in loss.trace.blocks) for loss, _ in found}
    if len(kinds) > 1 or len({len(loss.trace.instants) for loss, _ in found}) > 1:
        raise UnsupportedGraphError(
            "loss_fn does other things at other sizes, which a plan with dynamic sizes cannot follow. "
            "Compute the loss in the model, or leave dynamic out."
        )
    blocks = zip(*(loss.trace.blocks for loss, _ in found), strict=True)
    instants = zip(*(loss.trace.instants for loss, _ in found), strict=True)
    kept = zip(*(each for _, each in found), strict=True)
    trace = Trace(
        tuple(replace(i[0], scratch=_fitted([x.scratch for x in i], points)) for i in instants),
        tuple(replace(b[0], size=_fitted([x.size for x in b], points)) for b in blocks),
    )
    sized = (replace(b[0], size=_fitted([x.size for x in b], points)) for b in kept)
    return replace(first, scratch=0, trace=trace), tuple(sized)


def _fitted(
    sizes: Sequence[sympy.Expr], points: Sequence[Mapping[sympy.Symbol, int]]
) -> sympy.Expr:
    """The polynomial that has these values at the points."""
    if len(set(sizes)) == 1:
        return sizes[0]
    known = [(point, int(size)) for point, size in zip(points, sizes, strict=True)]
    symbols = list(points[0])
    for degree in range(1, DEGREE + 1):
        exact = interpolated(products(symbols, [degree] * len(symbols)), known)
        if exact is not None:
            return exact
    raise UnsupportedGraphError(
        "the memory of loss_fn is no polynomial of the sizes. Compute the loss in the model, or leave "
        "dynamic out."
    )
