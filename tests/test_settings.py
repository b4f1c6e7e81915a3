"""Options from outside the code: which source decides, and what is said of one that cannot be read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from remat import optimize_checkpoints, plan_checkpoints
from remat.settings import SETTINGS, SettingError, Settings, hand_on, load, with_settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.setenv(setting.variable, "")  # so that what a test leaves behind is undone
        monkeypatch.delenv(setting.variable)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "pyproject.toml").write_text(
        '[tool.remat]\nbudget = "8GB"\ngap = 0.5\ntime-limit-s = 7\nsave = ["a.*", "::aten.mm*"]\n'
        'dynamic = {input_ids = {0 = "batch"}}\nverify = true\n'
    )
    return tmp_path / "scripts" / "train.py"


def test_the_command_line_beats_the_environment_beats_the_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**command_line: str) -> Settings:
        return load(command_line, project)

    assert found().values == {
        "budget_gb": "8GB",
        "gap": 0.5,
        "time_limit_s": 7.0,
        "save": ("a.*", "::aten.mm*"),
        "dynamic": {"input_ids": {0: "batch"}},
        "verify": True,
    }
    assert found().origins["gap"] == f"[tool.remat] in {project.parent.parent / 'pyproject.toml'}"
    monkeypatch.setenv("REMAT_GAP", "0.25")
    monkeypatch.setenv("REMAT_BUDGET_GB", "20")
    monkeypatch.setenv("REMAT_VERIFY", "0")
    assert (found().get("gap"), found().get("budget_gb")) == (0.25, 20.0)
    assert found().get("verify") is False
    assert found(gap="0.1", budget="80%").get("gap") == 0.1
    assert found(gap="0.1", budget="80%").get("budget_gb") == "80%"


def test_the_nearest_project_alone_counts(project: Path) -> None:
    (project.parent / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    assert load({}, project).values == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget_gb", "much"),
        ("budget", "-3GB"),
        ("time_limit_s", "0"),
        ("gap", "nan"),
        ("verify", "perhaps"),
        ("on_new_size", "shrug"),
        ("dynamic", '["batch"]'),
        ("dynamic", "{"),
        ("cost_model", "abacus"),
        ("optimizer", ""),
    ],
)
def test_what_cannot_be_read_is_said_with_its_origin(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variable = f"REMAT_{name.upper()}"
    with pytest.raises(SettingError, match=f"--{name.replace('_', '-')} on the command line"):
        load({name: value}, tmp_path)
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError, match=f"{variable} in the environment: {name} = "):
        load({}, tmp_path)


def test_a_project_with_an_unknown_option_or_bad_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.remat]\nbudgett = 3\n")
    with pytest.raises(SettingError, match=rf"{file}: .* has 'budgett'"):
        load({}, tmp_path)
    file.write_text("[tool.remat\n")
    with pytest.raises(SettingError, match=f"{file} cannot be read"):
        load({}, tmp_path)


def test_explicit_arguments_beat_all(monkeypatch: pytest.MonkeyPatch) -> None:
    @with_settings
    def function(budget_gb: float, *, gap: float = 0.01, time_limit_s: float = 60.0) -> Any:
        return budget_gb, gap, time_limit_s

    monkeypatch.setenv("REMAT_GAP", "0.3")
    monkeypatch.setenv("REMAT_BUDGET_GB", "20")
    hand_on({"time_limit_s": "5"})
    assert function(1.0) == (1.0, 0.3, 5.0)
    assert function(1.0, gap=0.2) == (1.0, 0.2, 5.0)


def test_a_budget_handed_on_replaces_the_other_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REMAT_BUDGET_GB", "20")
    hand_on({"budget": "80%"})
    assert load({}, tmp_path).get("budget_gb") == "80%"


def test_disabled_the_original_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_DISABLE", "1")
    batch = torch.ones(2, 4)
    model: Any = optimize_checkpoints(nn.Linear(4, 4), "1B", (batch,))
    model(batch).sum().backward()
    assert model.remat.plan is None
    assert model.remat.stats.planned == 0
    with pytest.raises(ValueError, match="REMAT_DISABLE is set"):
        plan_checkpoints(nn.Linear(4, 4), 1, (batch,))
    monkeypatch.setenv("REMAT_DISABLE", "0")
    model = optimize_checkpoints(nn.Linear(4, 4), 1, (batch,))
    assert model.remat.plan is not None
