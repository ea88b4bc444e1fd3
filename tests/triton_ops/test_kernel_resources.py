"""Kernels compiled without a GPU, against the table of `make kernels`: rows are equal."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pc.triton_ops._core.runtime import HAS_TRITON, INTERPRET

ROOT = Path(__file__).resolve().parents[2]
OTHER_CASES = ["decode bf16 d128 g4", "prefill bf16 d128 g4"]
ROWS = ["rows 8 KiB head-major", "rows 33 bytes", "join 8 KiB positions"]
CASES = [*(pytest.param(case, marks=pytest.mark.slow) for case in OTHER_CASES + ROWS), "write bf16 d128 e4m3"]
OTHER_TARGETS = ["sm_80", "sm_90"]
MATRIX = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
# 64 rows, the least for wgmma, have sums of 512 columns, which leave too few registers for the rest.
MMA_SYNC = {("sm_90", "prefill bf16 d512 g8"): "mma"}
MMA_SYNC |= {(t, f"prefill bf16 latent g{n}"): "mma" for t in ("sm_90", "sm_100") for n in (16, 128)}

pytestmark = pytest.mark.skipif(
    INTERPRET or not HAS_TRITON, reason="compiles, so it needs triton without its interpreter"
)


@pytest.fixture(scope="module")
def resources():
    return importlib.import_module("benchmarks.kernels.kernel_resources")


def _check(resources, row):
    assert not resources.complaints(row), row
    if row["triton"] in resources.VERSIONS:
        assert row == resources.read_table()[resources.key(row)], "run: make kernels"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("case", CASES)
def test_installed_triton(case, target, resources):
    rows = list(resources.measure(case, target))
    assert rows
    for row in rows:
        _check(resources, row)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_other_triton(version, resources, tmp_path):
    folder = ROOT / ".kernels" / f"triton-{version}"
    if resources.triton.__version__ == version:
        pytest.skip("the installed one")
    if not folder.exists():
        pytest.skip("make kernels has not fetched it")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "benchmarks", "kernels", "--all", "--output", str(tmp_path / "rows.csv")]
    command += ["--targets", *OTHER_TARGETS, "--cases", *OTHER_CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = list(resources.read_table(tmp_path / "rows.csv").values())
    assert {row["target"] for row in rows} == set(OTHER_TARGETS)
    for row in rows:
        assert row["triton"] == version
        _check(resources, row)


@pytest.mark.usefixtures("plain_empty")  # no kernel runs on the tensors
def test_rows_are_of_the_trees_sources(resources, monkeypatch):
    """There is a row for every case, target and version, counted on what the tree launches now."""
    found = {}
    for version, target in itertools.product(resources.VERSIONS, resources.TARGETS):
        monkeypatch.setattr(resources.triton, "__version__", version)
        cases = [case for case in resources.CASES if target in resources.targets_of(case)]
        found |= {resources.key(row): row["sources"] for row, _ in resources.launched(cases, target)}
    assert {key: row["sources"] for key, row in resources.read_table().items()} == found, "run: make kernels"


def test_rows_are_clean(resources):
    """Each row is within shared memory, with matrix units, without a spill."""
    for row in resources.read_table().values():
        assert not resources.complaints(row), row
        if row["case"].startswith("prefill bf16") and row["kernel"] == "attention" and row["target"] in MATRIX:
            assert row["matrix"] == MMA_SYNC.get((row["target"], row["case"]), MATRIX[row["target"]]), row


def test_main_decodes_keep_memory_busy(resources):
    """Tiles are loaded while one is computed, programs run beside each other, and a KiB needs few instructions."""
    rows = [
        row
        for row in resources.read_table().values()
        if row["kernel"] == "attention" and row["target"] in OTHER_TARGETS
    ]
    plain = [row for row in rows if row["case"] == "decode bf16 d128 g4"]
    codes = [row for row in rows if row["case"] in ("decode bf16 d128 g4 e4m3", "decode bf16 d128 g4 int8")]
    options = [
        row for row in rows if row["case"] in ("decode bf16 d128 g4 window", "decode bf16 d128 g4 softcap alibi sinks")
    ]
    assert plain
    assert codes
    assert options
    for row in plain + codes + options:
        # Tiles of plain scores on sm_90 hold twice as many keys: so an H100 was fastest.
        least = 2 if row["target"] == "sm_90" and row not in codes and "softcap" not in row["case"] else 3
        assert int(row["programs"]) >= least
        assert int(row["buffers"]) >= least
    for row in plain + codes:
        is_converted = row["target"] == "sm_80" and "e4m3" in row["case"]  # by bit operations
        assert float(row["per_kilobyte"]) <= (60 if row in plain else 170 if is_converted else 110)


def test_quantized_prefills_have_two_buffers(resources):
    rows = [row for row in resources.read_table().values() if row["target"] in OTHER_TARGETS]
    rows = [row for row in rows if row["case"] in ("prefill bf16 d128 g4 e4m3", "prefill bf16 d128 g4 int8")]
    assert len(rows) == 2 * len(OTHER_TARGETS) * len(resources.VERSIONS)
    for row in rows:
        assert int(row["buffers"]) >= 2, row
        assert int(row["instructions"]) <= 430, row


def test_main_prefills_take_few_instructions(resources):
    """The numbers are for 128 rows and a KiB of keys and values, of which 32 are 64 keys of head_dim 128."""
    rows = [row for row in resources.read_table().values() if row["target"] == "sm_90" and row["kernel"] == "attention"]
    for case, most in (("prefill bf16 d128 g4", 72), ("prefill bf16 d256 g8", 67)):
        found = [row for row in rows if row["case"] == case]
        assert len(found) == len(resources.VERSIONS)
        for row in found:
            assert float(row["per_kilobyte"]) <= most, row
            assert int(row["buffers"]) >= 2, row


def test_complaints_can_be_raised(resources):
    row = next(iter(resources.read_table().values()))
    for change in ({"spills": "8"}, {"shared": "1000000"}, {"matrix": ""}, {"load_bytes": "4"}):
        assert resources.complaints(row | change)
