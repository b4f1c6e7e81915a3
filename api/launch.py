"""`python -m remat run`: run a training script unchanged, with what it trains planned.

The script runs as `__main__`, as the interpreter would run it: arguments, `sys.path[0]`, exit status
and traceback are its own. torch is not imported before the script imports it, since what a script puts
in the environment (thread counts, visible devices, logging) is read then.

A script in a folder or archive, and a module (``-m``), are run by `runpy`.
"""

import argparse
import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from remat.ir import InfeasibleBudgetError

from .settings import SETTINGS, SettingError, Settings, hand_on, load

USAGE = 2
INFEASIBLE = 3
NO_BUDGET = (
    "no budget, and no GPU to take one from: give --budget-gb 8, --budget 80%, REMAT_BUDGET_GB, or "
    "budget_gb under [tool.remat] in pyproject.toml"
)


def add_run(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "run",
        help="run a training script under a memory budget",
        usage="%(prog)s [--budget-gb GB | --budget SIZE] [options] (script.py | -m module) [argument ...]",
        description="Run a training script unchanged, with the peak memory of its training step under a "
        "budget. Every option can also be set in the environment (REMAT_TIME_LIMIT_S) or under "
        "[tool.remat] in the pyproject.toml nearest to the script (time_limit_s).",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for setting in SETTINGS:
        flags = [setting.flag, *(["--report"] if setting.name == "report_dir" else [])]
        if setting.metavar:
            parser.add_argument(
                *flags, dest=setting.name, metavar=setting.metavar, help=setting.help
            )
        else:
            action = argparse.BooleanOptionalAction
            parser.add_argument(*flags, dest=setting.name, action=action, help=setting.help)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Run what the command line names; returns the exit status if the script does not."""
    given = vars(arguments)
    names = {setting.name for setting in SETTINGS}
    command_line = {
        name: {True: "1", False: "0"}.get(value, value)
        for name, value in given.items()
        if name in names
    }
    is_module = "module" in given
    target = [*given.get("module", ()), *given.get("target", ())]
    if not is_module and target[:1] == ["--"]:
        del target[0]
    if not target:
        return _usage("no script: remat run [options] train.py, or -m module")
    script = Path.cwd() if is_module else Path(target[0])
    if not script.exists():
        return _usage(f"can't open file {target[0]!r}")
    try:
        settings = load(command_line, script)
    except SettingError as error:
        return _usage(str(error))
    hand_on(command_line)
    if settings.get("disable"):
        print("remat: disabled, the script runs as it is", file=sys.stderr)
    else:
        _watch(settings)
    sys.excepthook = _without_our_frames(sys.excepthook)
    try:
        execute(target, is_module=is_module)
    except InfeasibleBudgetError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return INFEASIBLE
    return 0


def _usage(message: str) -> int:
    print(f"remat: error: {message}", file=sys.stderr)
    return USAGE


def _watch(settings: Settings) -> None:
    """As soon as torch is there, watch what the script trains; sum up when it ends."""
    begun: list[Any] = []
    process = os.getpid()

    def begin() -> None:
        import torch

        options = settings
        if "budget_gb" not in options.values:
            if not torch.cuda.device_count():  # unlike is_available, leaves CUDA uninitialised
                atexit.unregister(sum_up)
                sys.exit(_usage(NO_BUDGET))
            options = Settings({**options.values, "budget_gb": "auto"}, options.origins)
        from .launched import Launched

        launched = Launched(options)
        launched.begin()
        begun.append(launched)

    def sum_up() -> None:
        if os.getpid() != process or os.environ.get("RANK", "0") != "0":
            return
        if not begun:
            print("remat: NOTHING RAN UNDER A PLAN. torch was not imported.", file=sys.stderr)
            return
        from .summary import summary

        begun[0].finish()
        print(summary(begun[0]), file=sys.stderr, flush=True)

    atexit.register(sum_up)
    _when_torch_is_imported(begin)


def execute(target: Sequence[str], *, is_module: bool) -> None:
    """Run a script or module with its arguments as `__main__`."""
    sys.argv = list(target)
    where = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target[0]))
    if not sys.flags.safe_path:
        sys.path[0] = where
    if is_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    elif os.path.isfile(target[0]) and target[0].endswith(".py"):
        exec(*_as_main(os.path.abspath(target[0])))
    else:
        runpy.run_path(target[0], run_name="__main__")


def _as_main(path: str) -> tuple[CodeType, dict[str, Any]]:
    """The code of a script, and the namespace of a new `__main__`, which stays for what runs at exit."""
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = loader.source_to_code(Path(path).read_bytes(), path)
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    return code, vars(module)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _without_our_frames(hook: Hook) -> Hook:
    """The hook, for tracebacks that begin where the script does."""

    def strip(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        ours, last = tb, None
        while ours is not None:
            if ours.tb_frame.f_code is execute.__code__:
                last = ours
            ours = ours.tb_next
        if last is not None:
            tb = last.tb_next
            while tb is not None and _is_machinery(tb.tb_frame.f_code.co_filename):
                tb = tb.tb_next
        hook(kind, error.with_traceback(tb), tb)

    return strip


def _is_machinery(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen ")


def _when_torch_is_imported(action: Callable[[], None]) -> None:
    """Call `action` as soon as torch has been imported."""
    if "torch" in sys.modules:
        action()
    else:
        # torch writes a line to the terminal whenever its profiler starts; planning uses it.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        sys.meta_path.insert(0, _TorchFinder(action))


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch where others find it, and acts after it has been executed."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self._asked = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Only for `torch` itself, however often it is looked for before it is imported."""
        if name != "torch" or self._asked:
            return None
        self._asked = True  # the others are asked below
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked = False
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        loader.exec_module = exec_module
        return spec
