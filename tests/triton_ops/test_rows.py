"""The parts that the row-moving operators share: layouts, runs, tiles, and kernels compiled without a GPU."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import pc
from benchmarks.harness.tables import read_rows
from pc.triton_ops._copy.launch import TILE_UNITS, tile_of
from pc.triton_ops._copy.layout import row_layout
from pc.triton_ops._copy.ops import copy_runs
from pc.triton_ops._copy.runs import find_runs
from pc.triton_ops._core.runtime import HAS_TRITON, INTERPRET


def test_contiguous_rows_move_in_sixteen_bytes():
    layout = row_layout((torch.empty(8, 4, 6, 16).bfloat16(), torch.empty(5, 6, 16).bfloat16()), (2, 1))
    assert (layout.grain, layout.inner, layout.sizes) == (16, 12, ())
    assert [address.block_size for address in layout.addresses] == [1, 1]


@pytest.mark.parametrize(("columns", "grain"), [(8, 16), (4, 8), (2, 4), (1, 2), (6, 4)])
def test_the_grain_divides_row_and_pitch(columns, grain):
    assert row_layout((torch.empty(8, 4, columns).half(), torch.empty(5, columns).half()), (2, 1)).grain == grain
    assert (
        row_layout((torch.empty(8, 4, 8).half()[..., :columns], torch.empty(5, columns).half()), (2, 1)).grain == grain
    )


def test_head_major_rows_keep_their_outer_dimension():
    cache = torch.empty(8, 3, 4, 32).transpose(1, 2)
    layout = row_layout((cache, torch.empty(5, 3, 32)), (2, 1))
    assert (layout.inner, layout.sizes) == (8, (3,))
    assert layout.strides == ((32,), (8,))
    assert layout.addresses[0] == (4, 3 * 4 * 8, 8)


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 3, 64, 100, 1000, 1536, 6144, 100000])
def test_tiles_are_full_and_waste_little(width, unit):
    rows, cols = tile_of(width, unit)
    assert rows * cols == TILE_UNITS
    covered = -(-width // cols) * cols
    assert covered <= width + width // 8 or cols * unit <= 512


if HAS_TRITON:
    import triton
    import triton.language as tl

    from pc.triton_ops.kernels.move_rows import _column_offsets, _row_offsets

    @triton.jit
    def _offsets_kernel(out_ptr, address, strides, VECTOR: tl.constexpr):
        number = tl.arange(0, 2)
        tl.store(out_ptr + number, _row_offsets(number.to(tl.int64), address, VECTOR))
        tl.store(out_ptr + 2 + number, _column_offsets(number * VECTOR, 1, (2,), strides, VECTOR, 1))


@pytest.mark.interpreter
def test_strides_that_pass_32_bits_in_units_only(device):
    """2**30 grains of 16 bytes are 2**31 units of 8 bytes."""
    out = torch.zeros(4, dtype=torch.int64, device=device)
    _offsets_kernel[(1,)](out, (1, 2**30, 0), (2**30,), VECTOR=2)
    assert out.tolist() == [0, 2**31] * 2


def test_copying_runs_equals_indexing():
    cache, packed = torch.randn(40, 5), torch.randn(30, 5)
    index = np.array([*range(10, 20), -1, -1, 3, 4, 39, *range(20, 35)])  # tests/cache/test_runs.py tests find_runs
    runs = find_runs(index)
    out = torch.full((30, 5), float("nan"))
    copy_runs(out, cache, runs, to_cache=False)
    assert torch.equal(out, torch.where(torch.tensor(index < 0)[:, None], 0.0, cache[np.maximum(index, 0)]))
    target = cache.clone()
    copy_runs(packed, target, runs, to_cache=True)
    expected = cache.clone()
    expected[index[index >= 0]] = packed[torch.tensor(index >= 0)]
    assert torch.equal(target, expected)


CASES = ("rows 8 KiB head-major", "rows 33 bytes", "join 8 KiB positions")


@pytest.mark.skipif(not HAS_TRITON or INTERPRET, reason="needs triton, and one run is enough")
@pytest.mark.slow
def test_kernels_compile_for_every_target_with_wide_loads_and_without_spills(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "kernels", "--all", "--output", str(tmp_path / "rows.csv")]
    subprocess.run([*command, "--cases", *CASES], cwd=Path(__file__).parents[2], check=True)
    rows = read_rows(tmp_path / "rows.csv")
    assert {(row["case"], row["target"]) for row in rows} == set(product(CASES, ("sm_80", "sm_90", "sm_100", "gfx942")))
    for row in rows:
        assert row["spills"] == "0", row
        if row["kernel"] == "move_rows" and "KiB" in row["case"]:
            assert row["load_bytes"] == "16", row


class _Seen(TorchDispatchMode):
    """Records the names of the called operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", ["gather_blocks", "gather_slots", "scatter_blocks", "scatter_slots"])
def test_who_looks_on_sees_the_operator(op):
    cache, index = torch.zeros(4, 2, 3), torch.tensor([1, 0])
    rows = getattr(pc, "gather" + op[op.index("_") :])(cache, index)
    with _Seen() as seen:
        getattr(pc, op)(*([cache] if op.startswith("gather") else [rows, cache]), index)
    assert seen.names[0] == f"pc.{op}.default"
    with FakeTensorMode() as fake:
        mocked = [fake.from_tensor(tensor) for tensor in (rows, cache, index)]
        assert isinstance(getattr(pc, op)(*mocked[op.startswith("gather") :]), FakeTensor | None)
