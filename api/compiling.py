"""A drop-in inside code that `torch.compile` captures.

A plan would be lost there, whatever the drop-in did: the compiler takes the planned graph apart and
decides anew what is saved. So Dynamo captures the original forward, without a graph break. With our own
backend the graph is planned again, by the drop-in's options unless `torch.compile` was given some; with any
other there is a warning.
"""

import weakref
from typing import TYPE_CHECKING, Any

from torch import fx

from remat.ir._torch import comptime, innermost_backend

if TYPE_CHECKING:
    from .options import Options

BACKEND = "remat"
"""Name of our backend."""

_options: "weakref.WeakKeyDictionary[fx.Graph, Options]" = weakref.WeakKeyDictionary()


def options_inside(graph: fx.Graph) -> "Options | None":
    """Options of the drop-in whose forward is in a graph that Dynamo has captured, if there is one."""
    return _options.get(graph)


def note_capture(remat: object) -> None:
    """Called by the forward of a drop-in that trains: does something only while Dynamo captures it.

    Args:
        remat: of the drop-in.
    """
    comptime(_captured)


def _captured(context: Any) -> None:
    """Runs while Dynamo captures `note_capture`."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    variable = context.get_local("remat")._i_will_not_complain_if_bc_breaks_VariableTracker()
    remat: Any = variable.realize().value
    remat.stepping.captured = True
    inner = innermost_backend(translator.output.compiler_fn)
    name = getattr(inner, "compiler_name", None) or getattr(inner, "__name__", str(inner))
    if name == BACKEND:
        _options[context.graph()] = remat.options
        return
    remat.warn(
        "compiled",
        f"remat: torch.compile(backend={name!r}) captures the original forward of an optimised model, so "
        "its plan is not used and its budget is not kept. torch.compile(..., backend='remat') plans "
        "what it captures under the same budget.",
        stacklevel=3,
    )
