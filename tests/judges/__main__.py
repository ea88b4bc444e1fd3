"""Fetch other projects' sources, run their tests over ours, and print what passes, what is omitted, and why.

PYTHONPATH=src:tests python -m judges [JUDGE ...] [--quick] [--seed N] [--write]

A seed decides the sample; the default is the date. `make judges SEED=20261125` repeats a sample. Sources are fetched
from package indexes into .peers/judges and stay there.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import tables

from .table import HERE, JUDGES, Judge

ROOT = HERE.parent.parent
SOURCES = ROOT / ".peers" / "judges"
ROWS = tables.RESULTS / "cpu" / "judges.csv"
FIELDS = ("judge", "package", "outcome", "reason", "cases", "seed", "date")
QUICK = {"cases": 8, "seconds": 75.0, "pairs": 1 << 14}
WHOLE = {"seconds": 900.0, "pairs": 1 << 17}
"""The most seconds of a judge, for slow machines. Cases, which only the seed decides, should end before."""
FETCH_SECONDS = 300
ATTEMPTS = 2


def _unpack(package: str, folder: Path) -> tuple[Path | None, str]:
    """Unpack a package's sources below `folder`; return where they are, if anywhere, and what pip said.

    pip unpacks sources before it asks how they are built, which no test needs. An interpreter without setuptools fails
    at that question at once, and `--no-clean` keeps the unpacked files, all or those before an error.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/bare"], check=True)
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    command = [sys.executable, "-m", "pip", "--python", f"{folder}/bare/bin/python", "download", "--no-deps"]
    options = ["--no-binary", ":all:", "--no-clean", "--no-build-isolation", "--dest", str(folder), package]
    try:
        said = subprocess.run(
            [*command, *options], timeout=FETCH_SECONDS, env=os.environ | {"TMPDIR": str(unpacked)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"pip took more than {FETCH_SECONDS} s"
    return next((path.parent for path in unpacked.glob("pip-download-*/*/PKG-INFO")), None), said


def fetch(judge: Judge) -> Path:
    """Return the folder of a judge's sources; fetch them if they are absent."""
    target = SOURCES / judge.package.replace("==", "-")
    if judge.folder is not None:
        target = ROOT / judge.folder
        if not target.exists():
            raise SystemExit(f"judges: {target} is missing: {judge.made_by} makes it")
        return target
    if (target / ".done").exists():
        return target
    for attempt in range(1, ATTEMPTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            source, said = _unpack(judge.package, Path(folder))
            if source is not None and all((source / kept).exists() for kept in judge.keep):
                shutil.rmtree(target, ignore_errors=True)
                for kept in judge.keep:
                    (target / kept).parent.mkdir(parents=True, exist_ok=True)
                    (shutil.copytree if kept.endswith("/") else shutil.copy)(source / kept, target / kept)
                break
            free = shutil.disk_usage(folder).free >> 20
        print(f"{said}\njudges: {judge.package} was not fetched, attempt {attempt} of {ATTEMPTS}, {free} MiB are free")
    else:
        raise SystemExit(f"judges: {judge.package} was not fetched. Is the package index reachable?")
    for path in target.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"""(["'])cuda(:0)?\1""", '"cpu"', text), encoding="utf-8")
    (target / ".done").touch()
    return target


def _pytest(name: str, sample: dict[str, Any], files: list[str], plugins: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the lines that `judges.plugin` writes, none if the tests did not run."""
    judge, source = JUDGES[name], fetch(JUDGES[name])
    python = sys.executable if judge.environment is None else str(ROOT / judge.environment / "bin" / "python")
    if not Path(python).exists():
        raise SystemExit(f"judges: {python} is missing: {judge.made_by} makes it")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.jsonl")
        paths = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "support", *(source / path for path in judge.paths)]
        told = json.dumps({"judge": name, "report": str(report), **sample})
        words = [word for plugin in (*plugins, "judges.plugin") for word in ("-p", plugin)]
        variables = {k: v for k, v in judge.variables.items() if plugins or not k.startswith("PC_")}
        fixed = ["-c", os.devnull, "--rootdir", str(source), "--noconftest", "-p", "no:cacheprovider", "--tb=short"]
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "--import-mode=importlib", *fixed, *words, *files],
            cwd=source,
            env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JUDGE": told},
        )
        if done.returncode not in (0, 1) or not report.exists():
            return []
        return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]


def run(name: str, sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a judge's tests. A case that fails without our code too is omitted."""
    judge = JUDGES[name]
    files = [str(path) for file in judge.files for path in sorted(fetch(judge).glob(file))]
    files += [] if judge.ours is None else [str(HERE / judge.ours)]
    rows = _pytest(name, sample, files, judge.plugins)
    if not any(row["outcome"] == "passed" for row in rows):
        raise SystemExit(f"judges: {name}: its tests did not run")
    failed = {row["node"]: row for row in rows if row["outcome"] == "failed"}
    if failed and judge.has_control:
        print(f"== {name}: the {len(failed)} that failed, without ours", flush=True)
        for row in _pytest(name, sample | {"cases": 10**9, "seconds": 1e9}, list(failed), ()):
            if row["outcome"] == "failed" and row["node"] in failed:
                failed[row["node"]] |= {"outcome": "left out", "reason": "fails here without ours as well"}
    return rows


def write(rows: list[dict[str, Any]]) -> None:
    """Replace a judge's earlier rows by these."""
    known = [row for row in tables.replaced(ROWS, rows, ("judge",)) if row["judge"] in JUDGES]
    tables.write_rows(ROWS, sorted(known, key=lambda row: list(JUDGES).index(str(row["judge"]))), FIELDS)


def main(arguments: list[str] | None = None) -> int:
    """Run judges; return 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="judges", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("judge", nargs="*", help=f"of {', '.join(JUDGES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a few small cases of each test, some minutes in all")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")), help="the day's")
    parser.add_argument("--cases", type=int, help="of each test function")
    parser.add_argument("--seconds", type=float, help="of each judge, at most")
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args(arguments)
    asked = {"cases": options.cases, "seconds": options.seconds}
    sample = (QUICK if options.quick else WHOLE) | {name: value for name, value in asked.items() if value is not None}
    sample["seed"] = options.seed
    names = options.judge or [name for name, judge in JUDGES.items() if judge.quick or not options.quick]
    table, failed = [], []
    for name in names:
        print(f"== {name}: {JUDGES[name].package}, seed {options.seed}", flush=True)
        rows = run(name, {"cases": JUDGES[name].cases} | sample)
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        for row in rows:
            counts[row["outcome"], row["reason"] if row["outcome"] == "left out" else ""] += row.get("count", 1)
            if row["outcome"] == "failed":
                failed.append(f"{name} {row['test']} {row['case']}: {row['reason']}")
        for (outcome, reason), count in sorted(counts.items()):
            print(f"   {count:7} {outcome}{reason and ': '}{reason}")
            about = {"package": JUDGES[name].package, "seed": options.seed, "date": datetime.date.today().isoformat()}
            table.append({"judge": name, "outcome": outcome, "reason": reason, "cases": count} | about)
        if options.write:  # after each judge, so that an interrupted run keeps its results
            write([row for row in table if row["judge"] == name])
    for line in failed:
        print(f"FAILED {line}")
    if failed:
        target = "judges-quick" if options.quick else "judges"
        print(f"the same sample again: make {target} SEED={options.seed} ARGS='{' '.join(names)}'")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
