"""A trace whose sizes are rounded up to whole blocks, for every binding of the symbols.

Definition. A size s becomes ``block * ceiling(s / block)``; s itself if every coefficient of its
expanded polynomial is a multiple of `block`, since symbols stand for integers. CUDA's caching
allocator counts blocks of 512 bytes, so the profile of the rounded trace is what it counts as
allocated, but for blocks that it does not split (`allocator.AllocatorUse.slack`).

Not handled: ``roundup_power2_divisions``. Sizes that are multiples of the block for another reason
(``256*n*(n + 1)``, say) keep their `ceiling`, and the right value.
"""

from dataclasses import replace

import sympy

from remat.ir import Trace


def rounded(trace: Trace, block: int = 512) -> Trace:
    """The trace with all sizes and scratch rounded up to multiples of `block` bytes."""
    sizes: dict[sympy.Expr, sympy.Expr] = {}

    def whole(size: sympy.Expr) -> sympy.Expr:
        if size not in sizes:
            sizes[size] = round_up(size, block)
        return sizes[size]

    return replace(
        trace,
        instants=tuple(replace(x, scratch=whole(x.scratch)) for x in trace.instants),
        blocks=tuple(replace(x, size=whole(x.size)) for x in trace.blocks),
    )


def round_up(size: sympy.Expr, block: int) -> sympy.Expr:
    """``block * ceiling(size / block)``, simplified where that is plainly `size`."""
    if size.is_Integer:
        return sympy.Integer(-(-int(size) // block) * block)
    expanded = sympy.expand(size)
    terms = expanded.as_coefficients_dict()
    if size.is_polynomial() and all(coefficient % block == 0 for coefficient in terms.values()):
        return size
    return block * sympy.ceiling(expanded / block)
