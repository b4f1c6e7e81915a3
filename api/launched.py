"""What happens to the modules that a launched script trains: planned in place, watched, reported.

A module is planned on its first training call with what the trainer passes. Whatever fails leaves it as
it was, with one message, unless the user wants the error. Every plan counts what else of the script's
is on the device then (see `script_memory`).
"""

import inspect
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat.ir import UnsupportedGraphError
from remat.passes import Plan, StepProtocol

from .assumed_loss import assumed_loss
from .dropin import Remat
from .failure import ALWAYS_RAISED, GivenUpError
from .finder import Arguments, Finder
from .identity import restore
from .optimize import optimize_checkpoints
from .script_memory import beside, outstanding_bytes
from .settings import Settings
from .stats import Stats
from .step_peak import StepPeak
from .summary import rank, say


@dataclass
class Found:
    """One module that the script trains."""

    name: str
    early: int
    """Training calls before it was found."""
    stats: Stats = field(default_factory=Stats)
    reported: int = 0
    """Plans that a report has been written of."""
    latest: Plan | None = None
    """The last one that was made."""
    plan: Plan | None = None
    """The one with the largest peak of all that were made."""
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
        others = [f.remat() for f in self.found if f.remat is not None]
        try:
            _refuse(module)
            found.other_bytes = beside(module, arguments, self.finder.optimizers)
            found.other_bytes += outstanding_bytes(others)
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
            remat: Remat = vars(module)["remat"]
            # `other_bytes` has what would be counted for other drop-ins.
            remat.options = replace(remat.options, sees_others=False)
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
                if found.plan is None:
                    found.failure = f"{type(error).__name__}: {error}"
                # A call of another kind that cannot be planned falls back by itself.
                by_itself = found.plan is not None and not isinstance(error, ALWAYS_RAISED)
                if by_itself or found.by_script or self._raises():
                    raise
                self._failed(found, error)
                raise GivenUpError from error
            self._planned(found, args[0], remat)
            return entry

        def guarded(model: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            try:
                return call(model, forward, args, kwargs)
            except GivenUpError:
                module = module_ref()
                assert module is not None
                if found.plan is None:
                    remat.disable()  # it misses no training calls
                    restore(module)
                    return forward(*args, **kwargs)
                remat.refuse(args, kwargs, found.failure)
            return call(model, forward, args, kwargs)

        remat.make = observed  # type: ignore[method-assign]
        remat.call = guarded  # type: ignore[method-assign]

    def _planned(self, found: Found, module: nn.Module, remat: Remat) -> None:
        """A plan has been made."""
        plan = remat.plan
        found.latest = plan
        found.reported += 1
        text = remat.explain()
        self._write(found, remat, text)
        if plan is not None and (found.plan is None or plan.peak_bytes >= found.plan.peak_bytes):
            found.plan, found.explained = plan, text
        if found.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(found.device)  # planning has run kernels
        elif self.settings.get("measure") and found.peak is None:
            found.peak = StepPeak(module, remat)

    def _write(self, found: Found, remat: Remat, text: str, *, at_end: bool = False) -> None:
        """The plan in use as page, JSON and text; what cannot be written is no reason to stop training.

        Args:
            found: a module.
            remat: of its drop-in.
            text: that explains the plan.
            at_end: pictures are there; the text has counts that have grown.
        """
        folder = self.settings.get("report_dir")
        if not folder or rank() != 0:
            return
        stem = f"{found.name}-{self.found.index(found)}"
        if (number := found.reported) > 1:
            stem += f"-plan-{number}"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{stem}.txt").write_text(text + "\n")
            if not at_end:
                report = remat.report()
                report.save(Path(folder) / f"{stem}.html")
                report.save(Path(folder) / f"{stem}.json")
        except (
            Exception
        ) as error:  # the eager step may be followed once more, which runs the user's code
            say(f"no report of {found.name}: {type(error).__name__}: {error}")

    def _failed(self, found: Found, error: Exception) -> None:
        found.failure = f"{type(error).__name__}: {error}"
        of = "" if rank() == 0 else f" (rank {rank()})"
        say(f"{found.name} is trained as before{of}, without a memory cap. {found.failure}")

    def _raises(self) -> bool:
        return bool(self.settings.get("on_failure", "warn") == "raise")

    def finish(self) -> None:
        """Bring what is known of the plans up to date, at the end of the run."""
        for found in self.found:
            if found.peak is not None:
                found.peak.stop()
            remat = found.remat() if found.remat is not None else None
            if remat is None or remat.plan is None:
                continue
            if remat.plan == found.plan:
                found.explained = remat.explain()
            if remat.plan == found.latest:
                self._write(found, remat, remat.explain(), at_end=True)


def _options(settings: Settings) -> dict[str, Any]:
    """The settings that are options of `optimize_checkpoints`."""
    known = inspect.signature(optimize_checkpoints).parameters
    return {k: v for k, v in settings.values.items() if k in known and k != "budget_gb"}


def _refuse(module: nn.Module) -> None:
    """Raise for a compiled module, in which a plan would be lost; wrappers are refused by all plans."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    if compiled or hasattr(module, "_orig_mod"):
        raise UnsupportedGraphError(
            "it is compiled by torch.compile, which decides itself what is saved for backward"
        )
