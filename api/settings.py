"""Options from outside the code: the command line, the environment, a project's file.

Definition. For every option, the first source that sets it decides:
    (1) the argument in the code
    (2) the command line of `python -m remat run`
    (3) the environment, ``REMAT_TIME_LIMIT_S``
    (4) the table ``[tool.remat]`` of the pyproject.toml nearest to the script, ``time_limit_s``
    (5) the default.
The command line is handed on through the environment, so that it also reaches (1)'s functions in the
script and the processes that the script starts. The budget has two names, of which one source may use one.

Nothing here imports torch: a script may want to set up the environment before it does so itself.
"""

import functools
import inspect
import json
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from remat.passes.devices import device

from .budget import budget_bytes

P = ParamSpec("P")
R = TypeVar("R")
TABLE = "[tool.remat]"


class SettingError(ValueError):
    """An option that cannot be read; says where it comes from."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option, as it is written outside the code."""

    name: str
    read: Callable[[Any], Any]
    """From text, or from a value of TOML; raises ValueError or TypeError."""
    help: str
    metavar: str = ""
    """Empty: a switch."""
    option: str = ""
    """What it sets, if that has another name."""

    @property
    def key(self) -> str:
        """Name of the option that it sets."""
        return self.option or self.name

    @property
    def flag(self) -> str:
        """On the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return "REMAT_" + self.name.upper()


@dataclass(frozen=True, slots=True)
class Settings:
    """The options that are set, by name, and where."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an option; the default if it is not set."""
        return self.values.get(key, default)


def _budget(given: Any) -> float | str:
    if isinstance(given, str):
        given = given.strip()
        with_unit = not given.replace(".", "", 1).isdigit()
        given = given if with_unit else float(given)
    budget_bytes(given, memory=2**40)
    return given  # type: ignore[no-any-return]


def _number(least: float, *, open_end: bool) -> Callable[[Any], float]:
    def read(given: Any) -> float:
        if isinstance(given, bool):
            raise TypeError("it must be a number")
        number = float(given)
        if not number >= least or (open_end and number == least):
            raise ValueError(f"it must be {'above' if open_end else 'at least'} {least:g}")
        return number

    return read


def _switch(given: Any) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True}
    known |= {"0": False, "false": False, "no": False, "off": False, "": False}
    if (text := str(given).strip().lower()) not in known:
        raise ValueError("it must be 1 or 0")
    return known[text]


def _choice(*words: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        if given not in words:
            raise ValueError(f"it must be one of {', '.join(words)}")
        return str(given)

    return read


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError("it must be text that is not empty")
    return given


def _optimizer(given: Any) -> str | None:
    return None if _text(given).lower() == "none" else _text(given)


def _cost_model(given: Any) -> str:
    if given not in ("roofline", "timed"):
        device(_text(given))
    return str(given)


def _patterns(given: Any) -> tuple[str, ...]:
    return tuple(map(_text, given.split(",") if isinstance(given, str) else given))


def _dynamic(given: Any) -> dict[str, dict[int, str]]:
    table = json.loads(given) if isinstance(given, str) else given
    if not isinstance(table, dict) or not all(isinstance(dims, dict) for dims in table.values()):
        raise TypeError('it must be like {"input_ids": {"0": "batch", "1": "seq"}}')
    return {
        argument: {int(dim): _text(name) for dim, name in dims.items()}
        for argument, dims in table.items()
    }


SETTINGS = (
    Setting(
        "budget_gb",
        _budget,
        'cap of the whole step: GB (10^9 bytes), or as for --budget; "auto" on a GPU if none is given',
        "GB",
    ),
    Setting(
        "budget", _budget, 'the same with a unit: 8GB, 24GiB, 80%%, "auto"', "SIZE", "budget_gb"
    ),
    Setting("optimizer", _optimizer, 'count this one instead of the script\'s; "none"', "NAME"),
    Setting("cost_model", _cost_model, "roofline, timed, or a device to predict for", "NAME"),
    Setting("time_limit_s", _number(0, open_end=True), "solver time, seconds", "S"),
    Setting("gap", _number(0, open_end=False), "stop this near to the least overhead", "FRACTION"),
    Setting("save", _patterns, "patterns of what is kept, with commas between", "PATTERNS"),
    Setting("recompute", _patterns, "patterns of what is recomputed", "PATTERNS"),
    Setting("dynamic", _dynamic, "sizes that change, as JSON by argument and dimension", "JSON"),
    Setting("on_new_size", _choice("replan", "refuse"), "replan or refuse", "WHAT"),
    Setting("on_failure", _choice("warn", "raise"), "warn (and train as before) or raise", "WHAT"),
    Setting("verify", _switch, "compare the first planned step with eager"),
    Setting("cache_dir", _text, "keep plans here, for the next start", "DIR"),
    Setting("report_dir", _text, "write reports here: page, JSON, text, and more", "DIR"),
    Setting("measure", _switch, "on CPU, measure one step's peak; slows three steps"),
    Setting("disable", _switch, "plan nothing"),
)


def load(command_line: Mapping[str, str], beside: Path) -> Settings:
    """The options that are set outside the code.

    Args:
        command_line: by name of the setting, as written.
        beside: the script, or the folder to begin the search for a pyproject.toml at.

    Raises:
        SettingError: one cannot be read.
    """
    known = {setting.name: setting for setting in SETTINGS}
    environment = {
        name: os.environ[setting.variable]
        for name, setting in known.items()
        if setting.variable in os.environ
    }
    file, table = _project(beside)
    if unknown := [name for name in table if name.replace("-", "_") not in known]:
        raise SettingError(f"{file}: {TABLE} has {unknown[0]!r}; there are {', '.join(known)}")
    sources: tuple[tuple[Callable[[Setting], str], Mapping[str, Any]], ...] = (
        (lambda setting: f"{TABLE} in {file}", {k.replace("-", "_"): v for k, v in table.items()}),
        (lambda setting: f"{setting.variable} in the environment", environment),
        (lambda setting: f"{setting.flag} on the command line", command_line),
    )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for where, given in sources:
        if {"budget", "budget_gb"} <= given.keys():
            both = [where(known[name]) for name in ("budget_gb", "budget")]
            raise SettingError(f"two budgets, by {both[0]} and {both[1]}: give one")
        for name, value in given.items():
            setting = known[name]
            origins[setting.key] = where(setting)
            try:
                values[setting.key] = setting.read(value)
            except (ValueError, TypeError) as error:
                raise SettingError(f"{where(setting)}: {name} = {value!r}: {error}") from error
    return Settings(values, origins)


def hand_on(command_line: Mapping[str, str]) -> None:
    """Put the command line's options where the script's own calls and processes find them."""
    given = {setting.name: setting for setting in SETTINGS if setting.name in command_line}
    if given.keys() & {"budget", "budget_gb"}:
        os.environ.pop("REMAT_BUDGET", None)
        os.environ.pop("REMAT_BUDGET_GB", None)
    for name, setting in given.items():
        os.environ[setting.variable] = command_line[name]


def _project(beside: Path) -> tuple[Path, Mapping[str, Any]]:
    """The nearest pyproject.toml and its table of ours."""
    start = beside.resolve()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return file, _table(file, file.stat().st_mtime_ns)
    return start, {}


@functools.lru_cache(maxsize=8)
def _table(file: Path, changed: int) -> Mapping[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("remat", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise SettingError(f"{file}: {TABLE} must be a table")
    return table


def _of_script() -> Settings:
    """What is set outside for the running script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return load({}, Path(script) if script else Path.cwd())


def is_disabled() -> bool:
    """Nothing is to be planned: ``REMAT_DISABLE=1``."""
    return bool(_of_script().get("disable", False))


def outside_settings(function: Callable[..., Any]) -> dict[str, Any]:
    """What is set outside for the running script, of the parameters of a function."""
    known = inspect.signature(function).parameters
    return {k: v for k, v in _of_script().values.items() if k in known}


def with_settings(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with options that a call leaves out taken from outside if they are set there."""
    parameters = inspect.signature(function).parameters.values()
    options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        outside = _of_script().values
        kwargs.update({k: v for k, v in outside.items() if k in options and k not in kwargs})
        return function(*args, **kwargs)

    return call
