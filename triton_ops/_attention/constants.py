"""Tile sizes and launch options, by architecture, head_dim, dtype and regime.

For sm_90, three rules were measured on an H100: `PROGRAMS`, decodes of 16 rows, and prefills with `two_tiles`. All
other rules were chosen without a GPU. They are based on published sweeps of other projects, and on registers, shared
memory and spills of compiled kernels. `make kernels` writes these to a table. For example, BLOCK_M 128 with 8 warps
reaches wgmma without a spill, and 4 warps spill. To measure other tiles on a GPU, run `make gpu ARGS="--only sweep"`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .._core.runtime import INTERPRET, KERNELS_ON_CPU

# architecture -> (programs of a decode per processor, reason)
PROGRAMS: dict[str, tuple[int, str]] = {
    "sm_90": (3, "the fastest of 1 to 4 over 16 decodes with these tiles; NVIDIA H100 80GB HBM3, 2026-11-26"),
}


@dataclass(frozen=True)
class Tiles:
    """Compile-time constants of one launch of the attention kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    two_loops: bool  # tiles without masked keys have their own loop, without masks
    max_registers: int = 0  # limit for a thread, so that more programs fit on a processor; 0: no limit
    value_splits: int = 1  # programs that share the columns of a latent row's value, `VALUE_SPLITS` in kernels


@dataclass(frozen=True)
class Architecture:
    """A device's architecture ("sm_90", "gfx942", ...), number of processors, and ability to convert float8 e4m3."""

    name: str
    num_processors: int
    has_e4m3: bool


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """Return the architecture of a device. The interpreter counts as 4 processors, so that it splits sequences."""
    if KERNELS_ON_CPU and not INTERPRET:  # the target of the active driver
        from triton.runtime import driver as drivers

        driver = drivers.active
        arch = driver.get_current_target().arch
        return Architecture(f"sm_{arch}", driver.utils.get_device_properties(0)["multiprocessor_count"], arch >= 89)
    if INTERPRET or device.type == "cpu":
        return Architecture("interpreter", 4, False)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Architecture(properties.gcnArchName.split(":")[0], properties.multi_processor_count, False)
    name = f"sm_{properties.major}{properties.minor}"
    return Architecture(name, properties.multi_processor_count, (properties.major, properties.minor) >= (8, 9))


# Targets that multiply from shared memory, with wgmma or tcgen05.
_ASYNC_MATRIX = frozenset({"sm_90", "sm_100"})
# Targets with at least 160 KB of shared memory for each processor. Others have 100 KB, gfx942 64 KB.
_LARGE_SHARED = frozenset({"sm_80", "sm_90", "sm_100", "interpreter"})

# Register limits for a thread of a decode, by number of warps. With 240 registers, two programs of 4 warps fit on a
# processor; with 168, three would. Without a limit the compiler uses 168 and spills.
DECODE_REGISTERS = {2: 255, 4: 240, 8: 0}


def multiplies_from_shared(arch: str, block_m: int) -> bool:
    """Return whether tiles of 16-bit numbers are multiplied by wgmma or tcgen05, which need at least 64 rows."""
    return arch in _ASYNC_MATRIX and block_m >= 64


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def programs_per_processor(arch: str) -> int:
    """Return how many decode programs a processor runs at once, which decides the number of work items."""
    return PROGRAMS[arch][0] if arch in PROGRAMS else 4


def decode_tiles(
    arch: str, head_dim: int, itemsize: int, rows: int, quantized: bool, spare_registers: bool = False
) -> Tiles:
    """Return the tiles for up to DECODE_QUERIES queries of a sequence.

    `rows` is the number of queries times the heads of a group. `spare_registers`: the kernel needs registers for more
    than a product and a mask, such as score modifiers or lists of blocks.
    """
    block_m = min(64, max(16, next_power_of_2(rows)))
    row_bytes = max(16, next_power_of_2(head_dim)) * (1 if quantized else itemsize)
    is_large = arch in _LARGE_SHARED
    # Load two or three tiles while one is computed, and let three programs fit on a processor where possible.
    block_n = max(16, min(64 if head_dim <= 64 else 32, (16384 if is_large else 8192) // row_bytes))
    num_stages = 4 if is_large and (row_bytes <= 512 or head_dim > 256) else 3
    if itemsize == 4:
        # Two programs of 8 warps have 128 registers a thread each.
        cap = 128 if 128 < head_dim <= 256 and block_m == 16 and not arch.startswith("gfx") else 0
        return Tiles(block_m, max(16, min(64, 8192 // row_bytes)), 8, 2, False, max_registers=cap)
    if arch.startswith("gfx"):
        return Tiles(block_m, 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16, 4, 2, False)
    if arch == "sm_90" and head_dim <= 128 and block_m == 16 and not quantized and not spare_registers:
        # On an H100, 16 decodes are .97 to 1.17 times as fast (mean 1.08) as with the tiles below.
        return Tiles(block_m, 64, 4, 3, True, max_registers=DECODE_REGISTERS[4])
    # 16 rows are few for a warp: two warps take a third fewer instructions for the same keys than four do. Four warps
    # spill from head_dim 257 on, and for 64 rows over quantized keys.
    num_warps = 2 if head_dim <= 128 and block_m == 16 else 4
    if head_dim > 256 or (head_dim > 128 and block_m > 16) or (quantized and block_m == 64):
        num_warps = 8
    cap = DECODE_REGISTERS[num_warps]
    if quantized and num_warps == 4 and not spare_registers:
        cap = 168 if arch in _ASYNC_MATRIX and 64 < head_dim <= 128 and block_m == 16 else 0
    return Tiles(block_m, block_n, num_warps, num_stages, True, max_registers=cap)


def latent_tiles(
    arch: str, head_dim: int, value_dim: int, itemsize: int, rows: int, quantized: bool, decoding: bool, narrow: bool
) -> Tiles:
    """Return the tiles for latent rows.

    `rows` is the number of queries times heads. `narrow`: a block has fewer than 2**31 elements.
    """
    block_v = max(16, next_power_of_2(value_dim))
    row_bytes = (block_v + next_power_of_2(head_dim - value_dim)) * itemsize
    if arch == "interpreter":
        # Splits in the interpreter too, so that they are tested.
        splits = 2 if rows > 16 and narrow and value_dim == block_v >= 32 else 1
        return Tiles(16 if rows <= 16 else 32, 32, 4, 1, True, value_splits=splits)
    if itemsize == 4 or row_bytes > 1152:  # more than DeepSeek's 576 columns leave no room for larger tiles
        return Tiles(16, 16, 4 if arch.startswith("gfx") else 8, 1, False)
    # Each program has half of the value's columns, and so may have more rows: 64 rows of all 512 would spill.
    splits_values = rows > 16 and narrow and value_dim == 512 and not quantized
    if arch.startswith("gfx") and splits_values:
        return Tiles(32, 32 if decoding else 16, 4, 1, False, value_splits=2)
    if arch.startswith("gfx"):
        return Tiles(16, 32, 4, 1, False)
    if not splits_values:
        # Quantized rows take more registers.
        return Tiles(16, 32, 8 if quantized else 4, 3, True)
    if arch not in _ASYNC_MATRIX:
        return Tiles(32, 32, 4, 2, True, value_splits=2)
    import triton

    # wgmma takes at least 64 rows. In prefills, which need registers to find rows and splits, 64 rows spill.
    # With tcgen05 or triton 3.6, they spill in decodes too.
    block_m = 64 if arch == "sm_90" and decoding and not triton.__version__.startswith("3.6.") else 32
    return Tiles(block_m, 64, 4, 2, True, value_splits=2)


def prefill_tiles(
    arch: str, head_dim: int, itemsize: int, spare_registers: bool, quantized: bool = False, two_tiles: bool = False
) -> Tiles:
    """Return the tiles for sequences with more than DECODE_QUERIES queries.

    `spare_registers`: the kernel needs registers for more than a product and a mask. Examples are score modifiers,
    trees, and windows of queries whose positions are far apart. `two_tiles`: the kernel finds keys with few registers,
    so each step of its loop may read two tiles of keys.
    """
    wide = head_dim > 128
    if arch == "interpreter":
        return Tiles(64, 32, 4, 1, True)
    if head_dim > 256:
        # 64 rows of 16-bit queries alone take 64 KB. On sm_90 wgmma takes at least 64 rows. The sums of 64 rows take
        # half of a thread's registers, so the kernel spills. tcgen05 keeps sums outside of the registers.
        if arch == "sm_90" and itemsize == 2:
            return Tiles(32, 32, 8, 2, False)
        rows = 64 if arch == "sm_100" and itemsize == 2 else 32 if arch in _LARGE_SHARED or itemsize == 2 else 16
        return Tiles(rows, 16, 4 if arch.startswith("gfx") else 8, 2 if itemsize == 2 else 1, False)
    if itemsize == 4:
        if arch.startswith("gfx"):
            return Tiles(32, 16, 4, 1, False)
        # Without a limit, triton 3.6 uses 64 registers here, and spills.
        cap = 80 if arch == "sm_90" and 64 < head_dim <= 128 else 0
        return Tiles(32, 16, 8, 3 if wide and arch in _LARGE_SHARED else 2, False, max_registers=cap)
    if arch.startswith("gfx"):
        # 4 waves may have 512 registers each, 8 waves 256.
        return Tiles(64, 32, 4, 2, not wide)
    if wide:
        if arch in _ASYNC_MATRIX and not spare_registers:
            # Quantized keys take more registers. So does tcgen05, which loads its sums into registers to scale them.
            is_narrow = quantized or arch == "sm_100"
            return Tiles(64 if is_narrow else 128, 64, 8, 3 if quantized else 2, True)
        # With mma.sync, 64 rows over quantized keys spill.
        is_narrow = quantized and arch not in _ASYNC_MATRIX
        return Tiles(32, 32, 4, 2, False) if is_narrow else Tiles(64, 32, 8, 2, False)
    if arch not in _ASYNC_MATRIX:
        # mma.sync keeps both operands and the sums in registers: fewer rows or keys at once, so as not to spill.
        if spare_registers:
            return Tiles(64, 32, 8, 2, True)
        if head_dim <= 64:
            return Tiles(128, 32, 8, 2, True)
        # 128 rows take fewer instructions for a row.
        return Tiles(128, 32, 8, 3, True)
    if spare_registers:
        return Tiles(64, 64, 8, 2, True)
    if arch == "sm_90" and head_dim > 64 and two_tiles and not quantized:
        # A fifth fewer instructions and half of the waits for the same keys.
        return Tiles(128, 128, 8, 2, True)
    return Tiles(128, 128 if head_dim <= 64 else 64, 8, 3, True)
