"""What modules hold in Python that a trace has read, and whether it has changed since.

Watched, of the model and all its submodules: attributes (plain ones, such as a dropout probability or a mode,
by value; all others by identity), added attributes, submodules by identity, names that share a parameter or
buffer, and hooks of submodules. The root's own hooks run outside the plan.

Not noticed: changes inside lists, dicts and other objects that a module refers to; attributes of classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from .outside import Outside, Remedy

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_UNREAD = frozenset(vars(nn.Module())) - {"training"} | {
    "gradient_checkpointing",
    "_is_full_backward_hook",
    "remat",
    "_remat_meta",
    "_remat_forward",
}
"""Attributes that are no state of the user's, and a flag that a plan does not depend on: it decides itself
what is computed again. Registries are compared on their own."""
_FEW = (bool, type(None), torch.dtype, torch.device)
"""Types with few values, so that each value can have its plan; likewise functions."""
_PURE = (
    "torch.nn.utils",
    "transformers.utils.output_capturing",
    "transformers.modeling_utils",
    "peft",
)
"""Modules whose hooks do nothing but compute: `spectral_norm` and the like, collection of outputs,
`enable_input_require_grads`."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A snapshot that is cheap to compare with the present."""

    readers: tuple[tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, Any]], ...]
    """Each reads the watched attributes of one module, or its submodules."""
    values: list[tuple[Any, ...]]
    """What each read then."""
    tensors: tuple[tuple[Mapping[str, Any], str, torch.Tensor], ...]
    """Tensors among these, with their places: one that is equal is another one all the same."""
    names: tuple[str, ...]
    tables: tuple[Mapping[str, Any], ...]
    """Attributes of each module."""
    paths: tuple[str, ...]
    """Where each module is."""
    counts: list[int]
    """How many attributes each has."""
    computed: frozenset[str]
    """Attributes that hooks compute for every forward."""
    tied: tuple[tuple[Mapping[str, Any], str, Mapping[str, Any], str], ...]
    """Further names of a tensor, with the place of its first name."""
    quiet: tuple[Mapping[int, Any], ...]
    """Hook tables that are empty."""
    hooked: tuple[tuple[Mapping[int, Any], tuple[int, ...]], ...]
    """Hook tables that are not, with the ids of their hooks."""

    def change(self) -> Outside | None:
        """What has changed; None if nothing has."""
        try:
            present = [read(holder) for read, holder in self.readers]
        except KeyError as error:
            return Outside(f"attribute {error} has been removed")
        same = all([holder[key] is tensor for holder, key, tensor in self.tensors])
        if not (same and _all_equal(present, self.values)):
            flat = zip(chain(*present), chain(*self.values), self.names, strict=True)
            for now, value, name in flat:
                if found := _changed(name, now, value):
                    return found
        if any([holder.get(key) is not first.get(k) for holder, key, first, k in self.tied]):
            return Outside("parameters that were tied no longer are")
        if any(self.quiet) or any([tuple(held) != ids for held, ids in self.hooked]):
            return self._other_hooks()
        counts = list(map(len, self.tables))
        if counts != self.counts:
            if found := self._added():
                return found
            self.counts[:] = counts
        return None

    def _added(self) -> Outside | None:
        known = set(self.names)
        for number, (table, path) in enumerate(zip(self.tables, self.paths, strict=True)):
            for key in table:
                name = f"{path}.{key}".lstrip(".")
                if _is_watched(key, root=not number) and name not in known | self.computed:
                    return Outside(f"attribute {name} has been added", Remedy.PLAN)
        return None

    def _other_hooks(self) -> Outside:
        """Hooks that only compute can be planned; what others do would not happen in a planned step."""
        tables = [held for held in self.quiet if held]
        tables += [held for held, ids in self.hooked if tuple(held) != ids]
        pure = all(_is_pure(hook) for held in tables for hook in held.values())
        return Outside(
            "hooks of a submodule have been added or removed",
            Remedy.PLAN if pure else Remedy.NONE,
        )


def module_state(model: nn.Module) -> ModuleState:
    """The present state of a model."""
    readers: list[tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, Any]]] = []
    tensors: list[tuple[Mapping[str, Any], str, torch.Tensor]] = []
    names: list[str] = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        own, children = vars(module), vars(module)["_modules"]
        computed = _computed(module)
        watched = [k for k in own if _is_watched(k, root=module is model) and k not in computed]
        tensors += [(own, k, own[k]) for k in watched if isinstance(own[k], torch.Tensor)]
        for table, keys in ((own, watched), (children, list(children))):
            if keys:
                keys += keys[:1] if len(keys) == 1 else []  # else it would not be a tuple
                readers.append((itemgetter(*keys), table))
                names += [f"{path}.{key}".lstrip(".") for key in keys]
    hooks = [
        vars(child)[kind] for child in model.modules() if child is not model for kind in _HOOKS
    ]
    return ModuleState(
        readers=tuple(readers),
        values=[read(holder) for read, holder in readers],
        tensors=tuple(tensors),
        names=tuple(names),
        tables=tuple(map(vars, modules.values())),
        paths=tuple(modules),
        counts=[len(vars(module)) for module in modules.values()],
        computed=frozenset(
            f"{path}.{key}".lstrip(".") for path, m in modules.items() for key in _computed(m)
        ),
        tied=tuple(_tied(model)),
        quiet=tuple(held for held in hooks if not held),
        hooked=tuple((held, tuple(held)) for held in hooks if held),
    )


def _all_equal(these: list[tuple[Any, ...]], those: list[tuple[Any, ...]]) -> bool:
    """Equal, or the very same; False if users compare in their own way, and it fails."""
    try:
        return these == those
    except Exception:  # arrays
        return False


def _is_pure(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_PURE)


def _computed(module: nn.Module) -> set[str]:
    """Attributes that torch's own pre-forward hooks compute anew: `spectral_norm`, `weight_norm`, pruning."""
    hooks = vars(module)["_forward_pre_hooks"].values()
    return {getattr(hook, key, "") for hook in hooks for key in ("name", "_tensor_name")}


def _is_watched(key: str, *, root: bool) -> bool:
    """Whether an attribute is state; what is put around the root's forward is not."""
    return key not in _UNREAD and not (root and key == "forward")


def _changed(name: str, now: object, was: object) -> Outside | None:
    if now is was or (type(now) is type(was) and _is_plain(was) and now == was):
        return None
    if not (_is_plain(now) and _is_plain(was)):
        few = callable(now) and callable(was) and not isinstance(was, nn.Module)
        few = few or (isinstance(now, _FEW) and isinstance(was, _FEW))
        return Outside(f"{name} has been replaced", Remedy.PLAN if few else Remedy.NONE)
    few = isinstance(now, _FEW) and isinstance(was, _FEW)
    return Outside(
        f"{name} is {now!r}, and was {was!r} when it was planned",
        Remedy.PLAN if few else Remedy.NONE,
    )


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _tied(model: nn.Module) -> list[tuple[Mapping[str, Any], str, Mapping[str, Any], str]]:
    first: dict[int, tuple[Mapping[str, Any], str]] = {}
    found = []
    for module in model.modules():
        for table in (vars(module)["_parameters"], vars(module)["_buffers"]):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) in first:
                    found.append((table, key, *first[id(tensor)]))
                else:
                    first[id(tensor)] = (table, key)
    return found


def traced_hooks(model: nn.Module) -> list[str]:
    """Names of submodules with hooks, beyond those that libraries add and that only compute (`_PURE`)."""
    return [
        name
        for name, child in model.named_modules()
        if name
        and any(not _is_pure(hook) for kind in _HOOKS for hook in vars(child)[kind].values())
    ]
