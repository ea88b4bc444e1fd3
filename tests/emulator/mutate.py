"""Breaks compiled kernels in one place at a time and counts what the cases of cases.py notice: `make mutate`.

Comparisons become their neighbours (`<` to `<=`, `>=` to `>`), barriers go, waits let more copies fly, operands of
products are swapped. Noticed is what makes a case fail. Of a comparison that nothing notices, the machine says whether
its operands were ever equal: if never, a denser case might; if they were, both answers gave the same result.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
from collections import Counter
from pathlib import Path

from .device import ARCH  # first: cases import pc  # isort: skip
from .cases import CASES, QUICK, run
from .program import Program, edited, program
from .ptx import EmulationError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"
NEIGHBOURS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
KINDS = {
    "comparison": (r"setp\.(lt|le|gt|ge)\.([su]\d\d)", lambda match: f"setp.{NEIGHBOURS[match[1]]}.{match[2]}"),
    "barrier": (r"bar\.sync\s+0;", lambda match: ""),
    "wait": (r"cp\.async\.wait_group\s+\d+", lambda match: "cp.async.wait_group 9"),
    "operand": (
        r"(mma\.sync\S+\s+\{[^}]*\}, \{ )(%r\d+), (%r\d+)",
        lambda match: f"{match[1]}{match[3]}, {match[2]}",
    ),
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel broken in one place: at `span` of its text, which is the instruction of number `index`."""

    kind: str
    case: str
    kernel: Program
    index: int
    span: tuple[int, int]
    replacement: str

    @property
    def text(self) -> str:
        """The broken kernel."""
        ptx, (start, end) = self.kernel.ptx, self.span
        return ptx[:start] + self.replacement + ptx[end:]


def mutants(case: str) -> list[Mutant]:
    """Of everything that a case runs."""
    seen: dict[str, str] = {}

    def look(name: str, ptx: str) -> str:
        seen[ptx] = name
        return ptx

    with edited(look):
        run(case)
    found = []
    for ptx, name in seen.items():
        kernel = program(name, ptx)
        ran = kernel.counts()[0]
        at_line = {i.statement.line: k for k, i in enumerate(kernel.code) if ran[k]}
        for kind, (pattern, change) in KINDS.items():
            for match in re.finditer(pattern, ptx):
                index = at_line.get(ptx.count("\n", 0, match.start()) + 1)
                if index is not None:
                    found.append(Mutant(kind, case, kernel, index, match.span(), change(match)))
    return found


def noticed(mutant: Mutant) -> bool:
    """Whether the case fails with it."""
    original, broken = mutant.kernel.ptx, mutant.text
    try:
        with edited(lambda name, ptx: broken if ptx == original else ptx):
            run(mutant.case)
    except (AssertionError, EmulationError, RuntimeError):
        return True
    return False


def outcome(mutant: Mutant) -> str:
    """Noticed, no effect (the boundary was met and both answers are right), or not met."""
    before = mutant.kernel.counts()[1][mutant.index]
    if noticed(mutant):
        return "noticed"
    if mutant.kind != "comparison":
        return "not noticed"
    run(mutant.case)
    return "no effect" if mutant.kernel.counts()[1][mutant.index] > before else "not met"


def main() -> int:
    """Samples mutants of every kind and prints what became of them, by place in the source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="of each kind")
    parser.add_argument("--case", default="", help="only cases whose name matches this; default: CI's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="the table into docs/numerics.md")
    given = parser.parse_args()
    names = [name for name in (CASES if given.case else QUICK) if re.search(given.case, name)]
    everything = [mutant for name in names for mutant in mutants(name)]
    found: Counter[tuple[str, str]] = Counter()
    for kind in KINDS:
        pool = [mutant for mutant in everything if mutant.kind == kind]
        for mutant in random.Random(given.seed).sample(pool, min(given.count, len(pool))):
            result = outcome(mutant)
            found[kind, result] += 1
            print(
                f"{kind}, {result}: {mutant.case}, {mutant.kernel.name}, {mutant.kernel.place(mutant.index)}",
                flush=True,
            )
    lines = [
        "| broken | of | noticed | boundary met, no effect | boundary not met, or not noticed |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        total = sum(count for (k, _), count in found.items() if k == kind)
        missed = found[kind, "not met"] + found[kind, "not noticed"]
        cells = (total, found[kind, "noticed"], found[kind, "no effect"], missed)
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    table = "\n".join([f"Of {ARCH}, {len(everything):,} places in {len(names)} cases, drawn at random:", "", *lines])
    print(table)
    if given.write:
        text = PAGE.read_text(encoding="utf-8")
        start, end = text.index("<!-- mutants -->"), text.index("<!-- /mutants -->")
        PAGE.write_text(f"{text[:start]}<!-- mutants -->\n{table}\n{text[end:]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
