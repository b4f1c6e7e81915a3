"""What modules hold in Python that a trace has read, and whether it has changed since.

Watched, of the model and all its submodules: attributes (plain ones, such as a dropout probability or a mode,
by type and value; all others by identity), added attributes, submodules by identity, added submodules,
parameters and buffers that are added or no longer None, names that share one, and hooks of submodules. The
root's own hooks run outside the plan. Globals that forwards read, too: see `global_state`.

A dict has a version, which torch reads in C++ and which is another one whenever the dict has changed; so a
call reads one number for each module, and looks into those whose number is another one.

Not noticed: changes inside lists, dicts and other objects that a module refers to; attributes of classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.ir._torch import dict_version

from .global_state import globals_read
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


_SUBMODULE = "submodule"
_REGISTRIES = ("_parameters", "_buffers", "_modules")
Place = tuple[Mapping[str, Any], str]


@dataclass(frozen=True, slots=True)
class Watched:
    """Attributes of one module, or its submodules, and what they were."""

    path: str
    """Of the module."""
    table: dict[str, Any]
    what: str
    """An attribute or a submodule, in words."""
    ignored: frozenset[str] | None
    """Keys that are no state of the user's; None: all others."""
    values: Mapping[str, Any]

    def change(self) -> Outside | None:
        """What has changed; None if nothing has."""
        for key, was in self.values.items():
            if key not in self.table:
                return Outside(f"{self.what} {self._name(key)} has been removed")
            if found := _changed(self._name(key), self.table[key], was):
                return found
        if self.ignored is None:
            return None
        if self.what == _SUBMODULE and list(self.table) != list(self.values):
            changed = "added" if len(self.table) > len(self.values) else "put in another order"
            return Outside(f"submodules of {self.path or 'the model'} are {changed}", Remedy.PLAN)
        for key in self.table:
            if key not in self.values and key not in self.ignored:
                return Outside(f"{self.what} {self._name(key)} has been added", Remedy.PLAN)
        return None

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}".lstrip(".")


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A snapshot that is cheap to compare with the present."""

    watched: tuple[Watched, ...]
    tables: tuple[dict[str, Any], ...]
    """Of these."""
    versions: list[int]
    """Of the tables, when they were last looked into."""
    tied: tuple[tuple[Place, Place], ...]
    """Further places of a tensor, each with its first one."""
    absent: tuple[Place, ...]
    """Where a parameter or buffer is None."""
    empty: tuple[Mapping[Any, Any], ...]
    """Tables of parameters, buffers, submodules and hooks that hold nothing."""
    registered: tuple[Mapping[str, Any], ...]
    """Tables of parameters and buffers that hold some."""
    counts: list[int]
    """How many they hold."""
    hooked: tuple[tuple[Mapping[int, Any], tuple[int, ...]], ...]
    """Hook tables that hold some, with the ids of these."""

    def change(self) -> Outside | None:
        """What has changed; None if nothing has."""
        if any(self.empty) or any([tuple(held) != ids for held, ids in self.hooked]):
            return self._registered_or_hooked()
        versions = list(map(dict_version, self.tables))
        if versions != self.versions:
            for watched, now, was in zip(self.watched, versions, self.versions, strict=True):
                if now != was and (found := watched.change()):
                    return found
            self.versions[:] = versions
        if any([table.get(key) is not first.get(k) for (table, key), (first, k) in self.tied]):
            return Outside("parameters that were tied no longer are")
        values = [table.get(key) for table, key in self.absent]
        if values.count(None) < len(values) or list(map(len, self.registered)) != self.counts:
            return _REGISTERED
        return None

    def conditions(self) -> int:
        """How many things are compared."""
        kept = (self.tied, self.absent, self.empty, self.registered, self.hooked)
        return sum(len(one.values) for one in self.watched) + sum(map(len, kept))

    def _registered_or_hooked(self) -> Outside:
        """Hooks that only compute can be planned; what others do would not happen in a planned step."""
        held = [table for table in self.empty if table]
        if any(type(key) is str for table in held for key in table):
            return _REGISTERED
        held += [table for table, ids in self.hooked if tuple(table) != ids]
        pure = all(_is_pure(hook) for table in held for hook in table.values())
        return Outside(
            "hooks of a submodule have been added or removed",
            Remedy.PLAN if pure else Remedy.NONE,
        )


_REGISTERED = Outside("a parameter, buffer or submodule has been added or removed", Remedy.PLAN)


def module_state(model: nn.Module) -> ModuleState:
    """The present state of a model."""
    modules = dict(model.named_modules())
    watched = []
    for path, module in modules.items():
        watched.append(_attributes(path, module, root=module is model))
        if children := vars(module)["_modules"]:
            watched.append(Watched(path, children, _SUBMODULE, frozenset(), dict(children)))
    for table, values in globals_read(model).values():
        name = str(table.get("__name__", ""))
        watched.append(Watched(name, table, "global", None, values))
    tables = [vars(module)[kind] for module in modules.values() for kind in _REGISTRIES[:2]]
    hooks = [vars(m)[kind] for m in modules.values() if m is not model for kind in _HOOKS]
    registries = [vars(module)[kind] for module in modules.values() for kind in _REGISTRIES]
    registered = tuple(table for table in tables if table)
    return ModuleState(
        watched=tuple(watched),
        tables=tuple(one.table for one in watched),
        versions=[-1] * len(watched),
        tied=tuple(_tied(model)),
        absent=tuple(
            (table, key) for table in tables for key, value in table.items() if value is None
        ),
        empty=tuple(table for table in registries + hooks if not table),
        registered=registered,
        counts=list(map(len, registered)),
        hooked=tuple((held, tuple(held)) for held in hooks if held),
    )


def _attributes(path: str, module: nn.Module, *, root: bool) -> Watched:
    """The attributes of a module; what is put around the root's forward is none."""
    ignored = _UNREAD | _computed(module) | ({"forward"} if root else set())
    table = vars(module)
    values = {key: value for key, value in table.items() if key not in ignored}
    return Watched(path, table, "attribute", ignored, values)


def _is_pure(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_PURE)


def _computed(module: nn.Module) -> set[str]:
    """Attributes that torch's own pre-forward hooks compute anew: `spectral_norm`, `weight_norm`, pruning."""
    hooks = vars(module)["_forward_pre_hooks"].values()
    return {getattr(hook, key, "") for hook in hooks for key in ("name", "_tensor_name")}


def _changed(name: str, now: object, was: object) -> Outside | None:
    if now is was or (type(now) is type(was) and _is_same(now, was)):
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


def _is_same(now: object, was: object) -> bool:
    """Whether two of a type are equal; a tensor that is equal is another one all the same."""
    if isinstance(now, torch.Tensor | nn.Module):
        return False
    try:
        return bool(now == was)
    except Exception:  # arrays, and whatever else users compare in their own way
        return False


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _tied(model: nn.Module) -> list[tuple[Place, Place]]:
    first: dict[int, Place] = {}
    found = []
    for module in model.modules():
        for table in (vars(module)["_parameters"], vars(module)["_buffers"]):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) in first:
                    found.append(((table, key), first[id(tensor)]))
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
