"""Where an op comes from: module path and the user's source line, for every op of a trace.

While a module is traced, a stack of module paths is kept by global forward hooks, and every torch
function call is annotated with the path on top and with the innermost Python frame outside torch. The
annotation travels with the nodes, also to the backward ops that autograd derives from them. The same look
at every call refuses tensors that need a gradient and are no input.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from .refusals import refuse_hidden_leaves

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_KEY = "remat_origin"
_GIVEN = "remat_origin_given"


class _Annotate(TorchFunctionMode):
    """Annotates what is traced inside a torch function call with its origin."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = paths

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        origin = (self.paths[-1] if self.paths else "", _user_line())
        with annotate({_KEY: origin}):
            result = func(*args, **(kwargs or {}))
        refuse_hidden_leaves((args, kwargs), result, origin[1])
        return result


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH, _OURS, "<")):
            return f"{Path(filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@contextlib.contextmanager
def record_origins(module: nn.Module) -> Iterator[None]:
    """Annotate everything traced inside with the path below `module` and the user's source line."""
    names = {id(child): name for name, child in module.named_modules()}
    paths: list[str] = []

    def enter(child: nn.Module, args: object) -> None:
        paths.append(names.get(id(child), paths[-1] if paths else ""))

    def leave(child: nn.Module, args: object, output: object) -> None:
        paths.pop()

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with _Annotate(paths):
            yield
    finally:
        for handle in handles:
            handle.remove()


def give_origin(node: fx.Node, path: str, line: str) -> None:
    """Say where a node comes from, if a trace of its graph cannot see that: its code is generated."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _GIVEN: (path, line)}


def origin_of(node: fx.Node) -> tuple[str, str]:
    """Module path and source line of a traced node; empty strings if unknown."""
    custom = node.meta.get("custom") or {}
    path, line = custom.get(_GIVEN) or custom.get(_KEY, ("", ""))
    return path, line
