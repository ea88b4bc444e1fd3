"""Break compiled kernels in one place at a time, and count what the cases of cases.py notice: `make mutate`.

A comparison becomes its neighbour (`<` becomes `<=`, `>=` becomes `>`). A barrier is removed. A wait lets more copies
run. Two operands of a product are swapped. A case notices a mutant if it fails. All comparisons are tried, by their
places in the source (comparisons.py). equivalents.py has the reason why some change no result. The exit code is 1 if a
place is neither noticed nor explained, or, with --copies 0, if a reason is not needed. For a barrier that no case
misses, the program looks for the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from .device import ARCH  # first: cases import pc  # isort: skip
from . import launch
from .cases import CASES, run
from .comparisons import LEFT_OUT, NO_EFFECT, NOT_MET, NOTICED, outcomes
from .equivalents import reason, reasons
from .program import Program, edited, program
from .ptx import EmulationError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"
KINDS: dict[str, tuple[str, Callable[[re.Match[str]], str]]] = {
    "barrier": (r"bar\.sync\s+0;", lambda match: ""),
    "wait": (r"cp\.async\.wait_group\s+\d+", lambda match: "cp.async.wait_group 9"),
    # Other columns of the same rows, which after the last query repeat it.
    "operand": (
        r"(mma\.sync\S+\s+\{[^}]*\}, \{ )(%r\d+), (%r\d+), (%r\d+)",
        lambda match: f"{match[1]}{match[4]}, {match[3]}, {match[2]}",
    ),
}
BARRIER_OR_JUMP = r"bar\.sync\s+0;|\n\$L\w+:|\bbra\b"
SHARED_MEMORY = r"\.shared|matrix|wgmma|mbarrier|wait_group"
# Barriers that one is tried together with.
NEIGHBOURS = 6


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel broken in one place, `span` of its text, which is instruction number `index`."""

    kind: str
    case: str
    kernel: Program
    index: int
    span: tuple[int, int]
    replacement: str

    @property
    def text(self) -> str:
        """Return the broken kernel."""
        ptx, (start, end) = self.kernel.ptx, self.span
        return ptx[:start] + self.replacement + ptx[end:]


def mutants(case: str) -> list[Mutant]:
    """Return the mutants of all kernels that a case runs."""
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


def noticed(mutant: Mutant, text: str | None = None) -> bool:
    """Return whether the case fails with the mutant, or with a text that is also broken elsewhere."""
    original, broken = mutant.kernel.ptx, text or mutant.text
    try:
        with edited(lambda name, ptx: broken if ptx == original else ptx):
            run(mutant.case)
    except (AssertionError, EmulationError, RuntimeError):
        return True
    return False


def sampled(names: Sequence[str], count: int, seed: int) -> list[str]:
    """Return a table row for each of KINDS, with `count` random places of each."""
    everything = [mutant for name in names for mutant in mutants(name)]
    rows = []
    why: Counter[str] = Counter()
    for kind in KINDS:
        pool = [mutant for mutant in everything if mutant.kind == kind]
        drawn, missed = random.Random(seed).sample(pool, min(count, len(pool))), 0
        for mutant in drawn:
            if not noticed(mutant):
                missed += 1
                cause = f": {dispensable(mutant, pool)}" if kind == "barrier" else ""
                why[cause] += 1
                print(f"{kind}, not noticed: {mutant.case}, {mutant.kernel.place(mutant.index)}{cause}", flush=True)
        rows.append(f"| {kind} | {len(pool):,} | {len(drawn)} | {len(drawn) - missed} | {missed} |")
    causes = "; ".join(f"{count}{cause}" for cause, count in why.items() if cause)
    said = f"Barriers that were removed unnoticed, with their number and the reason: {causes}."
    return [*rows, "", said] if causes else rows


def dispensable(mutant: Mutant, pool: Sequence[Mutant]) -> str:
    """Return why no case misses a barrier, after trying reasons in turn.

    Args:
        mutant: The barrier.
        pool: All barriers.
    """
    ptx, (start, end) = mutant.kernel.ptx, mutant.span
    before, behind = re.split(BARRIER_OR_JUMP, ptx[:start])[-1], re.split(BARRIER_OR_JUMP, ptx[end:])[0]
    ends = ptx[: start - len(before)].rstrip().endswith("0;"), re.match(r"\s*bar\.sync", ptx[end + len(behind) :])
    if any(there and not re.search(SHARED_MEMORY, text) for text, there in zip((before, behind), ends, strict=True)):
        return "another barrier beside it, with no access to shared memory between"
    same = [other for other in pool if other.kernel is mutant.kernel and other.index == mutant.index]
    if any(noticed(other) for other in same if other.case != mutant.case):
        return "only a longer case, which writes its buffers again, fails without it"
    others = {other.index: other for other in pool if other.kernel is mutant.kernel and other.index != mutant.index}
    for other in sorted(others.values(), key=lambda other: abs(other.index - mutant.index))[:NEIGHBOURS]:
        (first, until), (behind_first, last) = sorted([mutant.span, other.span])
        both = ptx[:first] + ptx[until:behind_first] + ptx[last:]
        if noticed(mutant, both) and not noticed(dataclasses.replace(other, case=mutant.case)):
            return "another barrier suffices without it, and it suffices without the other; without both the case fails"
    return "between the barriers before and after it, no warp writes bytes that another warp touches"


def compared(names: Sequence[str], count: int, seed: int) -> tuple[str, list[str]]:
    """Return a line for the page, and the errors: unexplained places that no case notices, and needless reasons."""
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    wrong, unneeded = [], set(reasons())
    for place, found, same in outcomes(names, count, seed):
        total += found
        always = not found[NO_EFFECT] and found[NOTICED]
        kinds["noticed" if always else "explained" if reason(place) else "neither"] += 1
        if not always:
            unneeded.discard(place)
        shown = ", ".join(f"{found[name]} {name}" for name in (NOTICED, NO_EFFECT, NOT_MET, LEFT_OUT) if found[name])
        print(f"comparison {place}: {shown}", flush=True)
        if not always and reason(place) is None:
            first = f", as {same[0].kernel.place(same[0].index)}" if same else ""
            wrong.append(f"neither noticed nor explained: {place} ({shown}{first})")
    copies = sum(total.values())
    tried = total[NOTICED] + total[NO_EFFECT]
    text = (
        f"{sum(kinds.values())} comparisons of the sources became {copies:,} in the compiled kernels. "
        f"{kinds['noticed']} were noticed in every place where they were broken. {kinds['explained']} change no "
        f"result, in some or all kernels, for a reason in the list. {kinds['neither']} are neither noticed nor in the "
        f"list. Of the compiled comparisons, {tried:,} were broken, and {total[NOTICED]:,} of these were noticed. "
        f"{total[NOT_MET]:,} never had equal operands, because no case of their kernel ends at the element or loop "
        "iteration that they test for."
    )
    # With few copies, none may be the one that the reason is for.
    return text, wrong + ([f"explained without need: {place}" for place in sorted(unneeded)] if not count else [])


def main() -> int:
    """Print the outcome of each mutant, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=16, help="barriers, waits and operands to break")
    parser.add_argument("--copies", type=int, default=2, help="compiled copies of a comparison to break; 0: all")
    parser.add_argument("--case", default="", help="only cases whose name matches this; reasons are then not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="the table into docs/numerics.md")
    given = parser.parse_args()
    launch.MAX_INSTRUCTIONS = 20_000_000  # a broken loop may have no end
    names = [name for name in CASES if re.search(given.case, name)]
    about, wrong = compared(names, given.copies, given.seed)
    rows = sampled(names, given.count, given.seed) if given.count else []
    head = ["| broken | places | tried | noticed | not noticed |", "|---|--:|--:|--:|--:|"]
    text = "\n".join([f"On {ARCH}, in {len(names)} cases: {about}", "", *head, *rows])
    print(text, *wrong, sep="\n")
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        start, end = page.index("<!-- mutants -->"), page.index("<!-- /mutants -->")
        PAGE.write_text(f"{page[:start]}<!-- mutants -->\n{text}\n{page[end:]}", encoding="utf-8")
    return int(bool(wrong) and not given.case)


if __name__ == "__main__":
    sys.exit(main())
