"""How planning time grows with depth: the same GPT with 12 to 96 layers, a line each.

    python -m benchmarks.depth [--layers 12,24,48,96] [--fraction .5] [--time-limit 60]

The model (width 1024, 8 x 1024 tokens) is captured without memory, for a named GPU. A line has: layers,
capture_seconds, then what `benchmarks.graphs` prints for the fraction of the program's own peak.
"""

import argparse
import json
import sys
import time
from fractions import Fraction
from functools import partial
from typing import Any

from torch import nn

from remat.solvers import Limits

from .graphs import solve
from .real_models import Case, gpt2
from .step import capture_step


def _gpt(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    return gpt2(8, n_embd=1024, n_head=16, n_layer=layers, vocab_size=8192)


def main() -> int:
    """Print the lines; return the exit status."""
    parser = argparse.ArgumentParser(description="Planning time by depth")
    parser.add_argument("--layers", default="12,24,48,96")
    parser.add_argument(
        "--fraction", default=".5", type=Fraction, help="of the program's own peak"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each solve")
    parser.add_argument("--gap", type=float, default=0.005, help="0.005: half a point")
    parser.add_argument("--device", default="a100-80gb", help="whose speed and kernels count")
    arguments = parser.parse_args()
    limits = Limits(time_s=arguments.time_limit, gap=arguments.gap)
    for layers in map(int, arguments.layers.split(",")):
        start = time.perf_counter()
        case = Case(
            f"gpt_{layers}", "bf16, 8 x 1024", r"transformer\.h\.\d+", partial(_gpt, layers)
        )
        step = capture_step(case, arguments.device)
        captured = round(time.perf_counter() - start, 1)
        line = {"layers": layers, "capture_seconds": captured}
        print(json.dumps(line | solve(step.problem, arguments.fraction, limits)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
