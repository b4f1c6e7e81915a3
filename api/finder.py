"""Which modules of a running script to plan, and when.

Definitions.
    (1) A *training call* is a call of an `nn.Module` in training mode with gradients enabled.
    (2) The module to plan is the outermost one in a training call that owns parameters which an optimizer
        of the script holds. Wrappers that only pass the call on (`DistributedDataParallel`) are looked
        through. Outermost calls begin first, so the first call that qualifies is the one.
    (3) A parameter is *settled* when the module that it belongs to has been found. An optimizer is settled
        when all its parameters are, or once it has stepped twice: what has not been called by then is
        not part of the step.

`nn.Module.__call__` is replaced from the start, and put back as soon as there are optimizers and all
are settled; a later optimizer replaces it again. So a module is found in time for its first training
call, whose forward already runs under the plan.

Not found: modules that are run by other means than a call (`module.forward(x)`, `functional_call`), and
models of processes that the script starts itself.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .optimizers import watch_optimizers

SHARE = 0.05
"""Modules that own a smaller part of what an optimizer holds are no models: left as they are."""
STEPS = 2
_PASS_ON = ("DistributedDataParallel", "DataParallel")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Plan = Callable[[nn.Module, Arguments, int], None]


class Finder:
    """Calls `plan` for each module that is found, before its first planned call.

    `plan` gets the module, the arguments of the call, and the number of its earlier training calls.
    """

    def __init__(self, plan: Plan) -> None:
        """Find nothing yet: `install` begins.

        Args:
            plan: what to do with a module.
        """
        self.plan = plan
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.small: Counter[str] = Counter()
        """Classes of modules that own little: training calls of each."""
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._found: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._early: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._open: dict[int, float] = {}
        """Parameters that are not settled, by identity: which part of what their optimizer holds."""
        self._restore_call: Callable[[], None] | None = None

    def install(self) -> None:
        """Begin to watch the optimizers that are made, and the modules that are called."""
        original = Optimizer.__init__
        finder = self

        @functools.wraps(original)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            finder._made(optimizer)

        Optimizer.__init__ = init  # type: ignore[assignment, method-assign]
        watch_optimizers(self)
        self._watch_calls()

    def _made(self, optimizer: Optimizer) -> None:
        self.optimizers.add(optimizer)
        self._look_again()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """An optimizer that has stepped often enough is settled, whatever it holds."""
        if self._restore_call is None or optimizer not in self.optimizers:
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._look_again()

    def _look_again(self) -> None:
        """Find out which parameters are not settled; watch calls only while there are some."""
        settled = {id(p) for module in self._found for p in module.parameters()}
        unsettled = [o for o in self.optimizers if self._steps.get(o, 0) < STEPS]
        self._open = {}
        for optimizer in unsettled:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            count = max(1, sum(map(_size, held)))
            self._open |= {id(p): _size(p) / count for p in held if id(p) not in settled}
        if self._open:
            self._watch_calls()
        elif self.optimizers:
            self._unwatch_calls()

    def _watch_calls(self) -> None:
        if self._restore_call is not None:
            return
        original = nn.Module.__call__

        @functools.wraps(original)
        def hooked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module.training and torch.is_grad_enabled():
                self._entering(module, args, kwargs)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = hooked  # type: ignore[method-assign]

        def restore() -> None:
            if nn.Module.__call__ is hooked:  # else somebody has wrapped it since: `hooked` stays
                nn.Module.__call__ = original  # type: ignore[method-assign]

        self._restore_call = restore

    def _unwatch_calls(self) -> None:
        if self._restore_call is not None:
            self._restore_call()
            self._restore_call = None

    def _entering(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training call begins."""
        if self._restore_call is None or torch.compiler.is_compiling() or passes_on(module):
            return
        own = [self._open[id(p)] for p in module.parameters() if id(p) in self._open]
        if not own:
            if module not in self._found:
                self._early[module] = self._early.get(module, 0) + 1
        elif sum(own) < SHARE:
            self.small[type(module).__name__] += 1
        else:
            self._found.add(module)
            self._look_again()
            self.plan(module, (args, kwargs), self._early.get(module, 0))


def _size(parameter: torch.Tensor) -> int:
    return 1 if is_lazy(parameter) else parameter.numel()  # a lazy one has no size yet


def passes_on(module: nn.Module) -> bool:
    """The module hands the call on to another one that is the model."""
    if type(module).__name__ in _PASS_ON:
        return True
    # Lightning under DDP puts training_step in the place of forward for one call.
    patched = vars(module).get("forward")
    return str(getattr(patched, "__qualname__", "")).startswith("_ForwardRedirection.")
