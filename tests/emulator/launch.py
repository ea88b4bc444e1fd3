"""One launch of a kernel: runs its grid, and turns what the machine finds into an error."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable

import numpy as np
import torch

from .build import machine
from .program import Program, pointer
from .ptx import EmulationError

SHARED_RACES, GLOBAL_RACES = 1, 2
MAX_INSTRUCTIONS = 400_000_000
"""Instructions of one program. With more, a loop is considered infinite."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch and its work.

    Attributes:
        loaded: Bytes of 32-byte sectors that loads from global memory touched, counted once for each instruction.
        stored: The same for stores.
        unwritten: Bytes of shared memory that were read and never written.
    """

    program: Program
    grid: tuple[int, int, int]
    instructions: int
    loaded: int
    stored: int
    unwritten: int


class Session:
    """The state that launches share.

    Attributes:
        seed: The seed of the order of programs and warps. EMULATOR_SEED sets the first; each launch takes the next.
        launches: All launches.
    """

    seed = int(os.environ.get("EMULATOR_SEED", "0"))
    launches: list[Launch] = []  # noqa: RUF012 - one session a process


def run(
    program: Program, grid: tuple[int, int, int], shared: int, arguments: bytes, tensors: Iterable[torch.Tensor]
) -> None:
    """Run a grid.

    Args:
        program: The kernel.
        grid: The programs.
        shared: Bytes of shared memory.
        arguments: Packed as PTX has its parameters.
        tensors: Only their storages may be accessed.

    Raises:
        EmulationError: The kernel made an invalid access. The message names it, its line of PTX, and its source line.
    """
    if max(grid[1:]) > 65535 or grid[0] >= 2**31:
        raise EmulationError(f"{program.name}: grid {grid}")
    if 0 in grid:
        return
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    ranges = np.array([v for begin, n in sorted(storages.items()) for v in (begin, begin + n)], np.uint64)
    text, where, stats = ctypes.create_string_buffer(512), (ctypes.c_int64 * 2)(), np.zeros(4, np.uint64)
    Session.seed += 1
    fault = machine().emulator_run(
        program.handle,
        (ctypes.c_uint32 * 3)(*grid),
        program.threads // 32,
        shared,
        arguments,
        len(arguments),
        pointer(ranges),
        len(storages),
        ctypes.c_uint64(Session.seed),
        ctypes.c_uint64(MAX_INSTRUCTIONS),
        SHARED_RACES | GLOBAL_RACES,
        text,
        where,
        pointer(stats),
    )
    Session.launches.append(Launch(program, grid, *map(int, stats)))
    if fault >= 0:
        place = f"{program.name}, program {where[0]} of {grid}, warp {where[1]}"
        raise EmulationError(f"{place}: {text.value.decode()}; {program.place(fault)}")
