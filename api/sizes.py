"""One plan at many sizes: whether it holds at a size, and what it takes there.

A plan *holds* at sizes if they lie in the domain of its graphs, if the arguments are laid out as the
graphs have them, and if its peak there is at most its budget. That peak is exact: the live ranges of the
same program with the bytes of these sizes, and what kernels were measured to take at them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.ir import GuardError, Trace, UnsupportedGraphError, VerifyError
from remat.ir._torch import FakeTensorMode
from remat.ir.domain import Sizes, bound, find_domain
from remat.ir.fake import Dynamic, sizes_of
from remat.ir.functional import argument_names
from remat.ir.structure import put_tensors, take_tensors
from remat.ir.symbols import Names
from remat.passes import Prepared, emitted_at, profile, resized
from remat.passes.eager import with_scratch
from remat.passes.realize import Call as OpCall
from remat.passes.realize import at, described, renamed

from .budget import in_units
from .guards import Call
from .outstanding import with_others
from .planned import Planned
from .request import Request, beside_eager


def trace_at(planned: Planned, sizes: Sizes) -> Trace:
    """The step of a plan at other sizes, exact there; that of an eager step has symbols.

    Args:
        planned: the plan.
        sizes: the number of every name, inside the plan's domain.
    """
    others = planned.request.protocol.forwards_outstanding - 1
    if planned.emitted is not None:
        trace = emitted_at(planned.emitted, sizes).trace
    elif (step := planned.details().eager) is None:
        trace = planned.trace
    else:
        prepared = planned.prepared
        found = prepared.scratch_of([at(call, bound(sizes)) for call in step.calls])
        trace = beside_eager(with_scratch(step.trace, found), planned.details().around)
    return with_others(trace, others)


def peak_at(planned: Planned, sizes: Sizes) -> int:
    """Peak of a plan at other sizes, bytes.

    Raises:
        GuardError: they are outside its domain.
    """
    if missing := [name for name in planned.domain.example if name not in sizes]:
        raise GuardError(f"the peak depends on {', '.join(missing)} too")
    if sizes == planned.domain.example:
        return planned.plan.peak_bytes
    if reason := planned.domain.why_not(sizes):
        raise GuardError(reason)
    return profile(trace_at(planned, sizes), bound(sizes)).peak


def why_not_at(planned: Planned, tensors: Sequence[torch.Tensor]) -> str:
    """Why a plan does not hold for a call with these tensor arguments; empty if it does."""
    request = planned.request
    sizes = request.sizes_in(tensors)
    named = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    if reason := planned.domain.why_not(sizes) or _layout(planned.prepared, tensors, sizes):
        return f"at {named} {reason}"
    peak, budget = peak_at(planned, sizes), planned.plan.budget_bytes
    if peak > budget:
        return f"at {named} the peak would be {peak} bytes ({in_units(peak)}), over the budget"
    return ""


def prepared_for(request: Request, known: Sequence[Planned]) -> Prepared | None:
    """The captured step for a request, from plans for the same model; None if it must be captured.

    Args:
        request: what is asked for now.
        known: plans that were made before.
    """
    wanted = request.protocol.gradient_outputs  # a capture is for these
    known = [planned for planned in known if planned.request.protocol.gradient_outputs == wanted]
    if not request.dynamic:
        return _prepared_of(known[0]) if known else None
    tensors, _ = take_tensors((request.args, dict(request.kwargs)))
    sizes = request.sizes
    for planned in known:
        prepared = planned.prepared
        same = planned.request.sizes == sizes
        if same and not _layout(prepared, tensors, prepared.sizes):
            return prepared
        captured = prepared.capture
        domain = find_domain(captured.joint, captured.sizes, captured.symbols)
        if not captured.symbols or domain.why_not(sizes):
            continue
        if not _layout(prepared, tensors, sizes):
            return resized(prepared, sizes)
    return None


def _prepared_of(planned: Planned) -> Prepared | None:
    """The captured step; None if it was not captured so far and is another one by now."""
    try:
        return planned.prepared
    except (VerifyError, UnsupportedGraphError):
        return None


def _layout(prepared: Prepared, tensors: Sequence[torch.Tensor], sizes: Sizes) -> str:
    """How arguments differ from those of a graph at some sizes; empty if they do not."""
    captured = prepared.capture
    first = len(captured.parameters) + len(captured.buffers)
    inputs = [node for node in captured.joint.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta["val"] for node in inputs[first : first + captured.arguments]]
    call = renamed(
        described(OpCall(torch.empty_like, tuple(fakes))), Names(captured.symbols).plain
    )
    for i, (spec, tensor) in enumerate(zip(at(call, bound(sizes)).args, tensors, strict=True)):
        if (spec.shape, spec.strides) != (tuple(tensor.shape), tensor.stride()):
            return (
                f"tensor argument {i} is {list(tensor.shape)} with strides {list(tensor.stride())}, "
                f"and the graph takes {list(spec.shape)} with strides {list(spec.strides)}"
            )
    return ""


def at_sizes(forward: Callable[..., Any], call: Call, dynamic: Dynamic, sizes: Sizes) -> Call:
    """A call with arguments of other sizes; those that change have no data.

    Raises:
        ValueError: a name is not in `dynamic`.
    """
    tensors, pattern = take_tensors(call)
    names = argument_names(forward, pattern, len(tensors))
    known = sizes_of(tensors, names, dynamic)
    if unknown := [name for name in sizes if name not in known]:
        raise ValueError(f"plan_at names {unknown[0]!r}, which dynamic does not")
    wanted = {**known, **sizes}
    if wanted == known:
        return call
    mode = FakeTensorMode()
    changed: list[torch.Tensor] = []
    for tensor, name in zip(tensors, names, strict=True):
        shape = [
            wanted[dynamic[name][dim]] if dim in dynamic.get(name, {}) else size
            for dim, size in enumerate(tensor.shape)
        ]
        if shape != list(tensor.shape):
            device = "cpu" if tensor.is_meta else tensor.device
            with mode:
                fake = torch.empty(shape, dtype=tensor.dtype, device=device)
            tensor = fake.requires_grad_(tensor.requires_grad)
        changed.append(tensor)
    found: Call = put_tensors(pattern, changed)
    return found
