"""Reports and readings for the tests of HTML pages."""

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from viewed import report_of, small_reports

from remat.views.step_report import (
    NOT_NEEDED,
    RECOMPUTED,
    SAVED,
    ExecutedOp,
    FormulaText,
    HeldTensor,
    Point,
    StepReport,
    Timeline,
)

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


@cache
def deep(layers: int = 48, ops: int = 110) -> StepReport:
    """A plan as large as that of a GPT with so many layers: numbers at random, names like real ones."""
    rng = random.Random(0)
    parts = ("ln_1", "attn", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.act", "mlp")
    kinds = ("addmm.default", "view.default", "native_layer_norm.default", "bmm.default")
    half, n = layers * ops, layers * (2 * ops + 28)
    rows: list[ExecutedOp] = []
    held: list[HeldTensor] = []
    for layer in range(layers):
        for part in parts:
            for name in ("weight", "bias"):
                path = f"transformer.h.{layer}.{part}"
                size = rng.choice((6400, 10_240_000))
                for each, role in (
                    (f"{path}.{name}", "parameter"),
                    (f"{path}.m", "optimizer state"),
                ):
                    held.append(HeldTensor(each, role, size, -1, n, f"f32[{size}]", "", path, ""))
    for i in range(2 * half):
        layer = min(i, 2 * half - 1 - i) // ops
        path, kind = f"transformer.h.{layer}.{rng.choice(parts)}", f"aten.{rng.choice(kinds)}"
        phase, again = ("forward", False) if i < half else ("backward", rng.random() < 0.3)
        name = f"{kind.split('.')[1]}_{i}{'_again' * again}"
        source, time, size = (
            f"gpt.py:{rng.randrange(700)}",
            rng.randrange(10**6),
            rng.choice((4096, 10**7)),
        )
        rows.append(ExecutedOp(name, kind, phase, again, time, rng.choice((0, 12)), path, source))
        decision = RECOMPUTED if again else rng.choice((SAVED, NOT_NEEDED)) if i < half else ""
        death = 2 * half - 1 - i if decision == SAVED else min(i + rng.randrange(9), n)
        text, reason = (
            f"f32[8, {size // 32}]",
            f"kept for {name}: dearer to compute again" * bool(decision),
        )
        held.append(
            HeldTensor(
                name,
                "activation",
                size,
                i,
                death,
                text,
                kind,
                path,
                source,
                decision,
                reason,
                time,
            )
        )
    rows += [
        ExecutedOp(f"mul__{i}", "aten.mul_.Tensor", "optimizer step", False, 0, 12, "", "")
        for i in range(n - 2 * half)
    ]
    planned = Timeline("planned", tuple(rows), tuple(held))
    eager = replace(
        planned, program="eager", tensors=tuple(replace(t, bytes=t.bytes * 2) for t in held)
    )
    return report_of(planned, baseline=eager, budget_bytes=planned.peak + 10**6)


def complete() -> StepReport:
    """The real plan, with a frontier, formulas and sizes."""
    report = small_reports()["planned"]
    assert report.plan is not None
    assert report.baseline is not None
    low, high = report.plan.least_peak_bytes, report.baseline.peak
    budgets = [low + (high - low) * i // 4 for i in range(5)]
    curve = tuple(Point(b, b - 1, 0.3 / (i + 1), 0.2 / (i + 1)) for i, b in enumerate(budgets))
    formulas = (
        FormulaText("peak", "497,759,232 + Max(8·batch·seq, floor(seq/2)**2, 4,096)", ""),
        FormulaText("resident", "24·batch", ""),
    )
    return replace(report, frontier=curve, formulas=formulas, sizes={"batch": 64})


def number(part: "Locator") -> float:
    return float(part.locator("data").first.get_attribute("value") or "")


def listed(page: "Page", host: str) -> list[list[str]]:
    """Cells of all rows of a list of which only what is visible exists: name, bytes, ..."""
    return page.evaluate(  # type: ignore[no-any-return]
        """async (host) => {
          const list = document.querySelector(host);
          const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          const found = new Map();
          list.scrollTop = 0;
          for (;;) {
            await frame();
            for (const row of list.querySelectorAll(".row")) {
              const text = (cell) => (cell.querySelector("b, bdi") ?? cell).textContent;
              const cells = [...row.children].map((cell) => cell.querySelector("data")?.value ?? text(cell));
              found.set(+row.getAttribute("aria-rowindex"), cells);
            }
            if (list.scrollTop + list.clientHeight >= list.scrollHeight - 1) break;
            list.scrollTop += list.clientHeight / 2;
          }
          return [...found].sort((a, b) => a[0] - b[0]).map(([, cells]) => cells);
        }""",
        host,
    )
