"""The counted work equals the rows in the tree; every step is counted again."""

from __future__ import annotations

import linecache
import types

import pytest
import triton

from benchmarks.harness import tables
from benchmarks.kernels import launches, steps, work
from emulator.device import ARCH
from pc.triton_ops._attention import kernel_arguments
from pc.triton_ops._core.cache import forget_choices

ROWS = {
    row["case"]: row
    for row in tables.read_rows(work.TABLE)
    if (row["provider"], row["architecture"], row["triton"]) == (work.OURS, ARCH, triton.__version__)
}
QUICK = ("decode 4 x 512", "chunk of 64 over 512", "window 128 of 2k", "latent decode 2 x 512, 16 heads")
AGAIN = "run: make work"

pytestmark = pytest.mark.skipif(
    ARCH not in steps.TARGETS or triton.__version__ not in steps.VERSIONS, reason="is not counted for the table"
)


def count(name):
    return work.counted(steps.ours, steps.Batch(steps.STEPS[name]))[1]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in steps.STEPS]
)
def test_a_count_is_that_of_the_row(name):
    found = count(name)
    assert found == {column: ROWS[name][column] for column in found}, AGAIN


def digest(name):
    with launches.recorded_for(ARCH) as recorded:
        steps.ours(steps.Batch(steps.STEPS[name]))
    return launches.digest(recorded)


@pytest.fixture
def anew():
    forget_choices()
    yield
    forget_choices()


def test_a_larger_block_of_the_sum_of_splits_shows(anew, monkeypatch):
    name = "decode 4 x 512"
    assert digest(name) == steps.sources()[ARCH, triton.__version__, name]
    monkeypatch.setattr(kernel_arguments, "MERGED_SPLITS", 8 * kernel_arguments.MERGED_SPLITS)
    assert digest(name) != ROWS[name]["sources"]
    assert int(count(name)["instructions"]) > 1.05 * int(ROWS[name]["instructions"])


KERNEL = """
import triton
import triton.language as tl
ONE = tl.constexpr(1)
@triton.jit
def helper(x):
    return x + ONE
@triton.jit
def kernel(ptr):
    "Says what it does."
    tl.store(ptr, helper(2))
"""


def test_a_digest_is_of_what_runs():
    """A digest changes with the code that runs, not with its place or comments."""

    def source(text):
        module = types.ModuleType("module")
        linecache.cache[text] = (len(text), None, text.splitlines(keepends=True), text)
        exec(compile(text, text, "exec"), module.__dict__)
        return launches.source(module.kernel)

    first = source(KERNEL)
    assert source("# moved" + KERNEL.replace("Says", "Tells").replace("return", "# why\n    return")) == first
    for change in (("constexpr(1)", "constexpr(2)"), ("x + ONE", "x - ONE"), ("helper(2)", "helper(3)")):
        assert source(KERNEL.replace(*change)) != first, change
