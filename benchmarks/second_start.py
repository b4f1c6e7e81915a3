"""How long planning takes in the second process that plans a step, on a GPT-2 of 12 layers x 256.

Each start is a process of its own. The first plans; the second finds the program by its recording; a third
one finds the plan only, by the captured graph, as where a step cannot be recorded.

    python -m benchmarks.second_start [--time-limit-s 3]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BUDGET = "170MB"
"""About the middle between the least peak and eager's."""


def main() -> None:
    """Print one line for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit-s", type=float, default=3.0)
    parser.add_argument("--folder", type=Path, help="plan once, in this folder (used by itself)")
    arguments = parser.parse_args()
    if arguments.folder:
        print(json.dumps(planning(arguments.folder, arguments.time_limit_s)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first start", "second start", "second start, plan only"):
            if start.endswith("only"):
                for program in Path(folder).glob("*.program"):
                    program.unlink()
            command = [sys.executable, "-m", "benchmarks.second_start", "--folder", folder]
            command += ["--time-limit-s", str(arguments.time_limit_s)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(f"{start}: {found['processor']:.2f} s of processor time, {found['wall']:.2f} s")
            print(f"    {found['parts']}")


def planning(folder: Path, time_limit_s: float) -> dict[str, Any]:
    """Seconds that one planning takes, its imports not among them."""
    from remat import optimize_checkpoints

    from .guard import gpt2

    model, batch = gpt2()
    example = {**batch, "use_cache": False}
    wall, processor = time.perf_counter(), time.process_time()
    planned: Any = optimize_checkpoints(
        model, BUDGET, (), example, cache_dir=folder, time_limit_s=time_limit_s
    )
    assert not planned.remat.plan.is_eager
    return {
        "processor": time.process_time() - processor,
        "wall": time.perf_counter() - wall,
        "parts": {part: round(s, 2) for part, s in planned.remat.planned.seconds.items()},
    }


if __name__ == "__main__":
    main()
