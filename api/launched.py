"""What happens to the modules that a launched script trains: planned in place, watched, reported.

A module is planned on its first training call with what the trainer passes. Whatever fails leaves it as
it was, with one message, unless the user wants the error. Every plan counts what else of the script's
is on the device then; on a GPU the allocator knows, on CPU only the parameters of other optimizers, with
their gradients and state, and forwards that other plans have outstanding are known.
"""

import inspect
import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.ir import Role, UnsupportedGraphError
from remat.ir.structure import take_tensors
from remat.passes import Plan, StepProtocol, optimizer_trace

from .assumed_loss import assumed_loss
from .beside import MODELS
from .dropin import Remat
from .finder import Arguments, Finder
from .identity import restore
from .optimize import optimize_checkpoints
from .settings import Settings
from .stats import Stats
from .step_peak import StepPeak
from .summary import plan_as_json, rank, say


@dataclass
class Found:
    """One module that the script trains."""

    name: str
    early: int
    """Training calls before it was found."""
    stats: Stats = field(default_factory=Stats)
    plan: Plan | None = None
    """The last one that was made."""
    explained: str = ""
    failure: str = ""
    """Why it is, from some time on, trained as before."""
    by_script: bool = False
    """The script has planned it itself."""
    other_bytes: int = 0
    """What the plan counts beside the module's own step."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    remat: "weakref.ref[Remat] | None" = None
    peak: StepPeak | None = None


class _PlanFailedError(Exception):
    """Planning has failed; the message is out."""


class Launched:
    """The modules of one run."""

    def __init__(self, settings: Settings) -> None:
        """Find nothing yet: `begin` does.

        Args:
            settings: of the run; they include a budget.
        """
        self.settings = settings
        self.found: list[Found] = []
        self.finder = Finder(self._adopt)

    def begin(self) -> None:
        """From now on, what the script trains is planned."""
        self.finder.install()

    def _adopt(self, module: nn.Module, arguments: Arguments, early: int) -> None:
        """Make a module that is about to be called a drop-in."""
        found = Found(type(module).__name__, early, device=next(module.parameters()).device)
        self.found.append(found)
        found.by_script = hasattr(type(module), "_remat_base")
        if found.by_script:
            self._observe(module, found)
            return
        found.other_bytes = beside(module, arguments, self.finder.optimizers) + self._outstanding()
        try:
            _refuse(module)
            optimize_checkpoints(
                module,
                self.settings.values["budget_gb"],
                inplace=True,
                loss_fn=assumed_loss,
                protocol=StepProtocol(other_bytes=found.other_bytes),
                **_options(self.settings),
            )
        except Exception as error:
            if self._raises():
                raise
            self._failed(found, error)
        else:
            MODELS.pop(vars(module)["remat"].number)  # `other_bytes` has what others would count
            self._observe(module, found)

    def _observe(self, module: nn.Module, found: Found) -> None:
        """Follow the plans that are made for a drop-in; none of this is in the way of a planned call."""
        remat: Remat = vars(module)["remat"]
        found.remat, found.stats = weakref.ref(remat), remat.stats
        make, call = remat.make, remat.call
        module_ref = weakref.ref(module)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if found.peak is not None:
                found.peak.stop()
            try:
                entry = make(*args, **kwargs)
            except Exception as error:
                if found.by_script or self._raises():
                    raise
                self._failed(found, error)
                raise _PlanFailedError from error
            self._planned(found, args[0], remat)
            return entry

        def guarded(model: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            try:
                return call(model, forward, args, kwargs)
            except _PlanFailedError:
                module = module_ref()
                assert module is not None
                if found.plan is None:
                    restore(module)
                else:
                    remat.disable()
            return forward(*args, **kwargs)

        remat.make = observed  # type: ignore[method-assign]
        remat.call = guarded  # type: ignore[method-assign]

    def _planned(self, found: Found, module: nn.Module, remat: Remat) -> None:
        """A plan has been made."""
        found.plan, found.explained = remat.plan, remat.explain()
        if found.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(found.device)  # planning has run kernels
        elif self.settings.get("measure") and found.peak is None:
            found.peak = StepPeak(module, remat)
        if (folder := self.settings.get("report_dir")) and rank() == 0:
            self._write(found, Path(folder))

    def _write(self, found: Found, folder: Path) -> None:
        """The plan as JSON and text; what cannot be written is no reason to stop training."""
        stem = f"{found.name}-{self.found.index(found)}"
        assert found.plan is not None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{stem}.json").write_text(json.dumps(plan_as_json(found.plan), indent=1))
            (folder / f"{stem}.txt").write_text(found.explained + "\n")
        except OSError as error:
            say(f"the report of {found.name} could not be written: {error}")

    def _failed(self, found: Found, error: Exception) -> None:
        found.failure = f"{type(error).__name__}: {error}"
        of = "" if rank() == 0 else f" (rank {rank()})"
        say(f"{found.name} is trained as before{of}, without a memory cap. {found.failure}")

    def _raises(self) -> bool:
        return bool(self.settings.get("on_failure", "warn") == "raise")

    def _outstanding(self) -> int:
        """Bytes that forwards of other planned modules hold now, on CPU; a GPU's allocator counts them."""
        remats = [found.remat() for found in self.found if found.remat is not None]
        return sum(
            remat.left_bytes()
            for remat in remats
            if remat is not None and remat.plan is not None and remat.plan.device == "cpu"
        )

    def finish(self) -> None:
        """Bring what is known of the plans up to date, at the end of the run."""
        for found in self.found:
            if found.peak is not None:
                found.peak.stop()
            remat = found.remat() if found.remat is not None else None
            if remat is not None and remat.plan is not None:
                found.explained = remat.explain()
                if (folder := self.settings.get("report_dir")) and rank() == 0:
                    self._write(found, Path(folder))


def _options(settings: Settings) -> dict[str, Any]:
    """The settings that are options of `optimize_checkpoints`."""
    known = inspect.signature(optimize_checkpoints).parameters
    return {k: v for k, v in settings.values.items() if k in known and k != "budget_gb"}


def _refuse(module: nn.Module) -> None:
    """Raise for wrappers that a plan would be lost in."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if compiled or hasattr(module, "_orig_mod"):
        raise UnsupportedGraphError(
            "it is compiled by torch.compile, which decides itself what is saved for backward"
        )
    if type(module).__name__ == "FullyShardedDataParallel":
        raise UnsupportedGraphError(
            "it is sharded. Plan its blocks before they are sharded: optimize_checkpoints(block, ...), then "
            "fully_shard(block)"
        )


def beside(module: nn.Module, arguments: Arguments, optimizers: Iterable[Optimizer]) -> int:
    """Bytes on the device during a step that are not the module's own.

    Args:
        module: about to be called in training.
        arguments: of the call.
        optimizers: all of the script's.
    """
    own = [*module.parameters(), *module.buffers()]
    mine = {id(p) for p in own}
    others: dict[int, torch.Tensor] = {}
    coming = 0
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        outside = [p for p in held if id(p) not in mine]
        others |= {id(p): p for p in outside}
        coming += sum(p.nbytes for p in outside if p.requires_grad and p.grad is None)
        if outside and not any(p in optimizer.state for p in outside):
            trace = optimizer_trace(outside, optimizer)
            state = [b for b in trace.blocks if b.role is Role.OPTIMIZER_STATE]
            coming += sum(int(block.size) for block in state)
    device = own[0].device
    if device.type == "cuda":
        known = [*own, *_gradients(own), *take_tensors(arguments)[0]]
        known += [t for o in optimizers for t in _state(o, mine)]
        return coming + max(0, torch.cuda.memory_allocated(device) - unique_bytes(known, device))
    present = [*others.values(), *_gradients(others.values())]
    present += [t for o in optimizers for t in _state(o, set(others))]
    return coming + unique_bytes(present, device)


def _gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t.grad for t in tensors if t.is_leaf and t.grad is not None]


def _state(optimizer: Optimizer, parameters: set[int]) -> list[torch.Tensor]:
    """Tensors of an optimizer's state for some parameters."""
    return [
        tensor
        for parameter, state in optimizer.state.items()
        if id(parameter) in parameters
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]


def unique_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the storages of tensors on a device, each counted once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (t.untyped_storage() for t in tensors if t.device == device)
    }
    return sum(storages.values())
