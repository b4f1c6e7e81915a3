"""`python -m remat run` as users run it: real processes, the scripts of `examples/scripts`."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from remat.cli import main

SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "scripts"
LAUNCH = (sys.executable, "-m", "remat", "run")
QUIET = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", "TOKENIZERS_PARALLELISM": "false"}


def start(*command: object, cwd: Path | None = None, **environment: str) -> "Ended":
    kept = {k: v for k, v in os.environ.items() if not k.startswith("REMAT_")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | QUIET | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def ours(self) -> str:
        return "\n".join(line for line in self.err.splitlines() if line.startswith("remat:"))

    def bytes(self, what: str) -> int:
        found = re.search(rf"  {what} .* ([0-9,]+) B", self.ours)
        assert found, self.err
        return int(found.group(1).replace(",", ""))

    @property
    def calls(self) -> tuple[int, int]:
        found = re.search(r"calls +(\d+) planned, (\d+) not", self.ours)
        assert found, self.err
        return int(found.group(1)), int(found.group(2))


def torchrun(port: int) -> tuple[object, ...]:
    run = (sys.executable, "-m", "torch.distributed.run")
    return (*run, "--nproc-per-node", 2, "--master-port", port)


def check(plain: Ended, launched: Ended, steps: int, unplanned: int = 0) -> None:
    """The same output; every training step planned, but those that are counted; under the budget."""
    assert plain.code == 0, plain.err
    assert launched.code == 0, launched.err
    assert launched.out == plain.out
    assert len(re.findall("^step .* loss", plain.out, re.MULTILINE)) == steps
    assert "NOTHING" not in launched.ours
    assert launched.calls == (steps - unplanned, unplanned)
    assert "time predicted" in launched.ours  # not eager's own step
    budget = launched.bytes("budget")
    assert launched.bytes("predicted") <= budget
    assert 0.9 * launched.bytes("predicted") <= launched.bytes("measured") <= budget


OPTIONS = ("--measure", "--time-limit-s", 2)


def test_an_own_loop_on_text_trains_under_its_budget(tmp_path: Path) -> None:
    script = SCRIPTS / "nanogpt.py"
    plain = start(sys.executable, script)
    reports, kept = tmp_path / "reports", tmp_path / "plans"
    launch = (*LAUNCH, "--budget", "6MB", *OPTIONS, "--cache-dir", kept)
    launched = start(*launch, "--report", reports, script)
    check(plain, launched, steps=8)
    # The loss of the last step is a tensor that the loop holds beside the planned step.
    assert launched.bytes("measured") == launched.bytes("predicted") + 4
    assert sorted(file.name for file in reports.iterdir()) == [
        *("GPT-0.html", "GPT-0.json", "GPT-0.txt")
    ]
    again = start(*launch, script)
    check(plain, again, steps=8)
    assert "1 plans made, 1 of them found in the cache" in again.ours
    assert again.ours.replace(", 1 of them found in the cache", "") == launched.ours


@pytest.mark.slow
def test_an_own_loop_that_accumulates_is_planned_for_resident_gradients() -> None:
    script = (SCRIPTS / "nanogpt.py", "--accumulate", 2, "--steps", 8)
    launched = start(*LAUNCH, "--budget", "6500kB", *OPTIONS, *script)
    check(start(sys.executable, *script), launched, steps=16)
    assert "2 plans made" in launched.ours


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_transformers_trainer(accumulate: int) -> None:
    script = (SCRIPTS / "trainer_gpt2.py", "--accumulate", accumulate)
    plain = start(sys.executable, *script)
    launched = start(*LAUNCH, "--budget", "5500kB", *OPTIONS, *script)
    assert launched.out == plain.out
    if accumulate == 1:  # else the Trainer logs once for several calls
        check(plain, launched, steps=8)
    assert launched.calls == (8 * accumulate, 0)
    assert "optimizer AdamW, found" in launched.ours


@pytest.mark.slow
def test_lightning() -> None:
    script = SCRIPTS / "lightning_classifier.py"
    launched = start(*LAUNCH, "--budget", "2600kB", *OPTIONS, script)
    check(start(sys.executable, script), launched, steps=10, unplanned=1)
    assert (
        "1 x original forward, no cap: tensor argument 0 is float32[24, 1, 8, 8]" in launched.ours
    )


@pytest.mark.slow
def test_lightning_with_a_dynamic_batch_plans_the_last_one_too() -> None:
    script = SCRIPTS / "lightning_classifier.py"
    dynamic = '{"input": {"0": "batch"}}'
    launched = start(*LAUNCH, "--budget", "2600kB", *OPTIONS, "--dynamic", dynamic, script)
    check(start(sys.executable, script), launched, steps=10)


@pytest.mark.slow
def test_lightning_under_ddp_plans_the_net_inside() -> None:
    script = (SCRIPTS / "lightning_classifier.py", "--strategy", "ddp", "--devices", 2)
    plain = start(*torchrun(29631), *script)
    launched = start(
        *torchrun(29632), "-m", "remat", "run", "--budget", "2600kB", *OPTIONS, *script
    )
    assert plain.code == launched.code == 0, launched.err
    printed = r"step \d+ loss \d+\.\d+|validation \d\.\d+"  # two processes write between each other's lines
    losses = sorted(re.findall(printed, plain.out))
    assert len(losses) == 2 * 6
    assert sorted(re.findall(printed, launched.out)) == losses
    assert "Sequential: trained under a plan" in launched.ours
    assert launched.calls == (4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [LAUNCH, ("accelerate", "launch", "--cpu", "-m", "remat", "run")]
)
def test_accelerate(launcher: tuple[str, ...]) -> None:
    script = SCRIPTS / "accelerate_accumulate.py"
    if launcher[0] == "accelerate":
        module = ("accelerate.commands.accelerate_cli", *launcher[1:])
        launcher = (sys.executable, "-m", *module)
    launched = start(*launcher, "--budget", "4450kB", *OPTIONS, script)
    check(start(sys.executable, script), launched, steps=13, unplanned=1)


@pytest.mark.slow
def test_ddp_under_torchrun() -> None:
    script = SCRIPTS / "ddp.py"
    plain = start(*torchrun(29633), script)
    launched = start(*torchrun(29634), "-m", "remat", "run", "--budget", "900kB", *OPTIONS, script)
    check(plain, launched, steps=7)
    assert launched.ours.count("trained under a plan") == 1  # rank 0 speaks for all


SCRIPT = """
import os, sys, helper
print(sys.argv[1:], sys.path[0], __name__, sys.modules["__main__"].__file__, sep="|")
print([f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("REMAT_")])
if "exit" in sys.argv:
    sys.exit(7)
if "fail" in sys.argv:
    raise ValueError("as the user wrote it")
if "interrupt" in sys.argv:
    raise KeyboardInterrupt
if "late" in sys.argv:
    import atexit
    atexit.register(lambda: print("at exit", __name__, helper.__name__))
assert "torch" not in sys.modules
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "helper.py").write_text("")
    (tmp_path / "pkg" / "train.py").write_text(SCRIPT)
    return tmp_path / "pkg" / "train.py"


@pytest.mark.parametrize(
    "how",
    [
        "fail",
        "late",
        pytest.param("exit", marks=pytest.mark.slow),
        pytest.param("interrupt", marks=pytest.mark.slow),
    ],
)
def test_a_script_ends_as_it_does_without_us(script: Path, how: str) -> None:
    arguments = (how, "--gap", "1", "--", "-m")
    plain = start(sys.executable, "pkg/train.py", *arguments, cwd=script.parent.parent)
    launched = start(
        *LAUNCH, "--budget-gb", 1, "pkg/train.py", *arguments, cwd=script.parent.parent
    )
    assert launched.code == plain.code == {
        "exit": 7, "fail": 1, "interrupt": -signal.SIGINT
    }.get(how, 0)  # fmt: skip
    expected = plain.out.replace("[]", "['REMAT_BUDGET_GB=1']")
    assert launched.out == expected
    own = launched.err.replace("remat: NOTHING RAN UNDER A PLAN. torch was not imported.\n", "")
    assert own == plain.err
    assert own != launched.err


def test_a_module_is_run_as_python_does(script: Path) -> None:
    plain = start(sys.executable, "-m", "train", "fail", "--", "x", cwd=script.parent)
    launched = start(*LAUNCH, "--budget-gb=1", "-m", "train", "fail", "--", "x", cwd=script.parent)
    assert launched.code == plain.code == 1
    assert launched.out == plain.out.replace("[]", "['REMAT_BUDGET_GB=1']")
    assert "remat" not in launched.err.split("Traceback")[1].split("ValueError")[0]


def test_a_syntax_error_is_the_scripts_alone(script: Path) -> None:
    script.write_text("def f(:\n")
    plain, launched = start(sys.executable, script), start(*LAUNCH, "--budget-gb", 1, script)
    assert launched.code == plain.code == 1
    assert plain.err in launched.err
    assert "Traceback" not in launched.err


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--budget-gb", 1), {}, "no script"),
        (("--budget-gb", 1, "none.py"), {}, "can't open file 'none.py'"),
        (("--budget", "8 bananas", "train.py"), {}, "--budget on the command line: budget = '8 bananas'"),
        (("--budget", "1GB", "train.py"), {"REMAT_GAP": "x"}, "REMAT_GAP in the environment: gap = 'x'"),
        (("--budget", "1GB", "--budget-gb", 1, "train.py"), {}, "give one"),
        (("--on-failure", "cry", "train.py"), {}, "it must be one of warn, raise"),
        (("--cost-model", "abacus", "train.py"), {}, "--cost-model on the command line"),
    ],
)  # fmt: skip
def test_usage_errors_name_what_is_wrong_and_exit_with_2(
    script: Path,
    arguments: tuple[object, ...],
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(script.parent)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert main(["run", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("remat: error: ")
    assert message in said
    assert said.count("\n") == 1


def test_disabled_it_is_out_of_the_way(script: Path) -> None:
    ended = start(*LAUNCH, script, cwd=script.parent, REMAT_DISABLE="1")
    assert (ended.code, ended.ours) == (0, "remat: disabled, the script runs as it is")


TRAIN = """
import sys
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())
"""


@pytest.mark.slow
def test_without_a_budget_or_gpu_the_usage_is_explained(script: Path) -> None:
    script.write_text(TRAIN)
    ended = start(*LAUNCH, script, CUDA_VISIBLE_DEVICES="")
    assert ended.code == 2
    assert ended.ours.startswith("remat: error: no budget, and no GPU")
    assert ended.ours.count("remat:") == 1
    assert ended.out == ""


def test_an_infeasible_budget_that_nobody_catches_exits_with_3(script: Path) -> None:
    script.write_text(
        "from remat import InfeasibleBudgetError as E\nraise E('x', budget_bytes=1, least_peak_bytes=2)"
    )
    ended = start(*LAUNCH, "--budget", "1kB", script)
    assert ended.code == 3
    assert ended.err.startswith("Traceback")
    assert "train.py" in ended.err.splitlines()[1]


@pytest.mark.slow
def test_an_infeasible_budget_exits_with_3_if_it_is_to_be_raised(script: Path) -> None:
    script.write_text(TRAIN)
    command = (*LAUNCH, "--budget", "100B", script)
    ended = start(*command, REMAT_ON_FAILURE="raise")
    assert ended.code == 3
    assert "InfeasibleBudgetError: no plan fits a budget of 100 bytes" in ended.err
    assert "NOTHING RAN UNDER A PLAN" in ended.ours
    assert ended.out == ""


@pytest.mark.slow
def test_an_infeasible_budget_is_said_and_training_goes_on(script: Path) -> None:
    script.write_text(TRAIN)
    ended = start(*LAUNCH, "--budget", "100B", script)
    assert ended.code == 0
    assert ended.out
    assert "NOTHING RAN UNDER A PLAN" in ended.ours
