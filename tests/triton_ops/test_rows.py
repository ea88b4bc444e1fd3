"""The parts that the row-moving operators share: layouts, runs, tiles, and kernels compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from pc.triton_ops._rows.kernel import TILE_BYTES, tile_of
from pc.triton_ops._rows.layout import row_layout
from pc.triton_ops._rows.transfer import contiguous_runs, copy_runs
from pc.triton_ops._triton import HAS_TRITON


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
    assert rows * cols * unit == TILE_BYTES
    covered = -(-width // cols) * cols
    assert covered <= width + width // 8 or cols * unit <= 512


@pytest.mark.parametrize(
    ("index", "runs"),
    [
        ([], []),
        ([4], [[0, 4, 1]]),
        ([4, 5, 6], [[0, 4, 3]]),
        ([-1, 0, 1], [[0, -1, 1], [1, 0, 2]]),
        ([1, -1, -1, 2, 3, 3, 2], [[0, 1, 1], [1, -1, 2], [3, 2, 2], [5, 3, 1], [6, 2, 1]]),
        ([7, 8, 0, 1, -1], [[0, 7, 2], [2, 0, 2], [4, -1, 1]]),
    ],
)
def test_contiguous_runs(index, runs):
    assert contiguous_runs(np.array(index, np.int64)).tolist() == runs


def test_copying_runs_equals_indexing():
    cache, packed = torch.randn(40, 5), torch.randn(30, 5)
    index = np.array([*range(10, 20), -1, -1, 3, 4, 39, *range(20, 35)])
    runs = contiguous_runs(index)
    out = torch.full((30, 5), float("nan"))
    copy_runs(out, cache, runs, to_cache=False)
    assert torch.equal(out, torch.where(torch.tensor(index < 0)[:, None], 0.0, cache[np.maximum(index, 0)]))
    target = cache.clone()
    copy_runs(packed, target, runs, to_cache=True)
    expected = cache.clone()
    expected[index[index >= 0]] = packed[torch.tensor(index >= 0)]
    assert torch.equal(target, expected)


TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
WIDE = {"cuda": ("ld.global.v2.b64", "st.global.v2.b64"), "hip": ("load_dwordx4", "store_dwordx4")}
SPILLS = {"cuda": (".local",), "hip": ("scratch_load", "scratch_store")}
COMPILE = """
import sys, triton, pc
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pc.triton_ops._rows import join, kernel, quantize

def build(function, signature, constants, aligned):
    signature = {name: signature.get(name, "constexpr" if name in constants else "i32") for name in function.arg_names}
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(function, signature, constants, attrs=attributes)
    assembly = triton.compile(source, target=GPUTarget(*TARGET), options=dict(num_warps=4)).asm
    return assembly.get("ptx") or assembly["amdgcn"]

three = ("i32",) * 3
mover = build(
    kernel._move_rows_kernel,
    dict(sources=("*i64",), extras=("*i64",), targets=("*i64",), source_index="*i64", inners=("i32",), widths=("i32",),
         sizes=(three,), addresses=((three,) * 3,), strides=((three,) * 3,)),
    dict(target_index=None, NUM_TENSORS=1, NUM_OUTER=(1,), VECTOR=(2,), TILE_ROWS=(2,), TILE_COLS=(512,)),
    [(0, 0), (1, 0), (2, 0), (3,)],
)
others = []
for positions in ({}, {"new_positions": "*i32"}):
    pointers = dict(rows="*i64", block_tables="*i32", seq_ends="*i64", query_start_loc="*i32", **positions)
    constants = dict(TILE=256) if positions else dict(TILE=256, new_positions=None)
    others.append(build(join._join_map_kernel, pointers, constants, []))
for kind, code in ((1, "*i8"), (2, "*u8")):
    pointers = dict(cache=code, scales="*fp32", slot_mapping="*i64", source="*bf16", target="*bf16")
    for single in (True, False):
        constants = dict(KIND=kind, LIMIT=127.0, SMALLEST=quantize.SMALLEST_SCALE, TILE=2048, SINGLE=single)
        others.append(build(quantize._scatter_quantized_kernel, pointers, constants, []))
    others.append(build(quantize._gather_dequantized_kernel, pointers, dict(KIND=kind, TILE=2048), []))
for instruction in WIDE:
    assert instruction in mover, instruction
for text in (mover, *others):
    for spill in SPILLS:
        assert spill not in text, spill
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_with_wide_loads_and_without_spills(target):
    vendor = TARGETS[target][0]
    names = f"TARGET, WIDE, SPILLS = {TARGETS[target]!r}, {WIDE[vendor]!r}, {SPILLS[vendor]!r}"
    # A process of its own, because the interpreter may be on in this one.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", names + COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
