"""What modules hold in Python that a trace has read, and whether it has changed since.

Watched, of the model and all its submodules: plain attributes (numbers, strings, flags, None, and tuples of
them: a dropout probability, a mode, a layer's index), submodules by identity, names that share a
parameter or buffer, and hooks of submodules. The root's own hooks run outside the plan.

Not noticed: changes inside lists, dicts and other objects that a module refers to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from torch import nn

from .outside import Outside, Remedy

_PLAIN = (bool, int, float, str, type(None))
_UNREAD = ("gradient_checkpointing", "_is_full_backward_hook")
"""What a plan does not depend on: it decides itself what is computed again, and hooks are compared."""
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

    readers: tuple[tuple[Callable[[Any], Any], Mapping[str, Any]], ...]
    """Each reads the watched attributes of one module, or its submodules."""
    values: list[Any]
    """What they read then."""
    keys: tuple[tuple[str, tuple[str, ...]], ...]
    """Path of the module, and the names, of each reader."""
    tied: tuple[tuple[Mapping[str, Any], str, Mapping[str, Any], str], ...]
    """Further names of a tensor, with the place of its first name."""
    quiet: tuple[Mapping[int, Any], ...]
    """Hook tables that are empty."""
    hooked: tuple[tuple[Mapping[int, Any], tuple[int, ...]], ...]
    """Hook tables that are not, with the ids of their hooks."""

    def change(self) -> Outside | None:
        """What has changed; None if nothing has. A flag has few values, so each can have its plan."""
        try:
            same = [read(holder) for read, holder in self.readers] == self.values
        except KeyError:
            same = False
        if not same and (found := self._other_attribute()):
            return found
        if any([holder.get(key) is not first.get(k) for holder, key, first, k in self.tied]):
            return Outside("parameters that were tied no longer are")
        if any(self.quiet) or any([tuple(held) != ids for held, ids in self.hooked]):
            return self._other_hooks()
        return None

    def _other_attribute(self) -> Outside | None:
        for (_, holder), values, (path, keys) in zip(
            self.readers, self.values, self.keys, strict=True
        ):
            for key, value in zip(keys, values if len(keys) > 1 else (values,), strict=True):
                now = holder.get(key)
                if now is value or now == value:
                    continue
                name = f"{path}.{key}".lstrip(".")
                if isinstance(value, nn.Module):
                    return Outside(f"{name} has been replaced")
                flag = type(now) is bool and type(value) is bool
                return Outside(
                    f"{name} is {now!r}, and was {value!r} when it was planned",
                    Remedy.PLAN if flag else Remedy.NONE,
                )
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
    watched: list[tuple[str, Mapping[str, Any], tuple[str, ...]]] = []
    for path, module in model.named_modules():
        own, children = vars(module), vars(module)["_modules"]
        plain = tuple(k for k, value in own.items() if _is_plain(value) and k not in _UNREAD)
        watched += [(path, own, plain), (path, children, tuple(children))]
    watched = [each for each in watched if each[2]]
    readers = tuple((itemgetter(*keys), holder) for _, holder, keys in watched)
    hooks = [
        vars(child)[kind] for child in model.modules() if child is not model for kind in _HOOKS
    ]
    return ModuleState(
        readers=readers,
        values=[read(holder) for read, holder in readers],
        keys=tuple((path, keys) for path, _, keys in watched),
        tied=tuple(_tied(model)),
        quiet=tuple(held for held in hooks if not held),
        hooked=tuple((held, tuple(held)) for held in hooks if held),
    )


def _is_pure(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_PURE)


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
