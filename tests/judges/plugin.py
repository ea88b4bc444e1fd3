"""A pytest plugin that omits cases by reason, runs a sample of the others, and writes their outcomes.

Of every test function `cases` cases run. A seed orders them, and functions take turns until `seconds` are over. Skipped
cases do not count. A line of the report is a case, or the number of a function's cases that were omitted for a reason.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import random
import sys
import time
from typing import Any

import pytest

from .table import JUDGES

SKIPPED = "skipped by the test's own condition"
NOT_DRAWN = "not in the sample"
NO_TIME = "no time left"
NOT_OURS = "makes nothing of ours"
_MANY = 1000
"""From this number of cases on, a sample is drawn before pytest makes each, which takes minutes for 300,000."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the sample in the environment variable JUDGE, which is JSON."""
    config.pluginmanager.register(Sample(**json.loads(os.environ["JUDGE"])), "sample")


class Sample:
    """The sample of a run, and its report."""

    def __init__(self, judge: str, report: str, cases: int, seconds: float, seed: int, pairs: int) -> None:
        self.rules, self.counter = JUDGES[judge].rules, sys.modules.get(JUDGES[judge].counter)
        self.report, self.cases, self.seconds, self.seed, self.pairs = report, cases, seconds, seed, pairs
        self.ran: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[tuple[str, str]] = collections.Counter()
        self.rows: list[dict[str, Any]] = []
        self.end = math.inf

    def _made(self) -> int | None:
        """Return how many of our objects were made so far, None if they are not counted."""
        return None if self.counter is None else sum(self.counter.made.values())

    def _reason(self, test: str, params: dict[str, Any]) -> str | None:
        """Return why a case is omitted, or None."""
        for rule in self.rules:
            if test.startswith(rule.tests) and rule.when(params):
                return rule.reason
        lengths = [params.get(name, params.get("seqlen", 1)) for name in ("seqlen_q", "seqlen_k")]
        if math.prod(lengths) * max(1, params.get("num_splits", 1)) > self.pairs:
            return f"more than {self.pairs:,} pairs of query and key, a head and sequence"
        return None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Draw from many cases, so that pytest does not make all."""
        marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
        names = [[n.strip() for n in m.args[0].split(",")] if isinstance(m.args[0], str) else m.args[0] for m in marks]
        values = [list(mark.args[1]) for mark in marks]
        if math.prod(map(len, values)) <= _MANY:
            return
        test = f"{metafunc.definition.path.name}::{metafunc.function.__name__}"
        flat, found = [name for each in names for name in each], []
        for row in itertools.product(*values):
            case = tuple(
                x for each, value in zip(names, row, strict=True) for x in (value if len(each) > 1 else [value])
            )
            reason = self._reason(metafunc.function.__name__, dict(zip(flat, case, strict=True)))
            if reason is None:
                found.append(case)
            else:
                self.left[test, reason] += 1
        drawn = random.Random(f"{self.seed} {test}").sample(found, min(len(found), 20 * self.cases))
        if len(drawn) < len(found):
            self.left[test, NOT_DRAWN] += len(found) - len(drawn)
        metafunc.definition.own_markers[:] = [m for m in metafunc.definition.own_markers if m not in marks]
        ids = ["-".join(str(value).removeprefix("torch.") for value in case) for case in drawn]
        metafunc.parametrize(flat, drawn, ids=ids)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Omit cases by rule, shuffle by the seed, and let functions take turns."""
        groups: dict[str, list[Any]] = collections.defaultdict(list)
        for item in items:
            if item.name.endswith("[NOTSET]"):  # the function has no case left
                continue
            item.judged = f"{item.path.name}::{item.originalname}"
            reason = self._reason(item.originalname, getattr(getattr(item, "callspec", None), "params", {}))
            if reason is None:
                groups[item.judged].append(item)
            else:
                self.left[item.judged, reason] += 1
        for name, group in groups.items():
            random.Random(f"{self.seed} {name}").shuffle(group)
        items[:] = [item for row in itertools.zip_longest(*groups.values()) for item in row if item is not None]
        self.end = time.monotonic() + self.seconds

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Skip cases beyond the sample."""
        drawn, in_time = self.ran[item.judged] < self.cases, time.monotonic() < self.end
        if drawn and in_time:
            item.made = self._made()
            return None
        self.left[item.judged, NO_TIME if drawn else NOT_DRAWN] += 1
        return True

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        """Record a case's outcome."""
        report = (yield).get_result()
        if report.when != "call" and report.outcome == "passed":
            return
        if report.outcome == "skipped":
            self.left[item.judged, getattr(report, "wasxfail", "") or SKIPPED] += 1
            return
        if report.outcome == "passed" and item.made is not None and item.made == self._made():
            self.left[item.judged, NOT_OURS] += 1
            return
        self.ran[item.judged] += 1
        said = str(call.excinfo.value) if call.excinfo else str(report.longrepr or "")
        reason = (said.strip() or "passes, and should not").partition("\n")[0] if report.outcome == "failed" else ""
        row = {"test": item.judged, "case": item.name, "outcome": report.outcome}
        row["node"] = f"{item.path}::{item.nodeid.partition('::')[2]}"
        self.rows.append(row | {"reason": reason, "seconds": round(call.duration, 2)})

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        left = [
            {"test": test, "outcome": "left out", "reason": reason, "count": count}
            for (test, reason), count in sorted(self.left.items())
        ]
        with open(self.report, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows + left)
