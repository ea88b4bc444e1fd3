"""Counts of keys that attention kernels load and multiply in Triton's interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pc.triton_ops._core.runtime import INTERPRET

counts_work = pytest.mark.skipif(not INTERPRET, reason="counted in the interpreter")


@dataclasses.dataclass
class Work:
    """Counts, summed over all programs.

    Attributes:
        read: Keys of a head that were loaded.
        multiplied: Keys in products with queries, including keys that a mask removes.
    """

    read: int = 0
    multiplied: int = 0


@contextlib.contextmanager
def counted_work(key_cache: torch.Tensor) -> Iterator[Work]:
    """Count the work of the interpreter's attention kernels in the block, in the yielded `Work`.

    Args:
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, on the CPU. It shares no memory with the values.
    """
    from triton.runtime import interpreter

    memory, builder = interpreter._interpreter, interpreter.InterpreterBuilder
    load, dot = memory.load, builder.create_dot
    storage = key_cache.untyped_storage()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    work, elements, products = Work(), 0, 0

    def counted_load(addresses: Any, mask: Any, *rest: Any) -> Any:
        nonlocal elements
        elements += int(((addresses >= begin) & (addresses < end) & mask).sum())
        return load(addresses, mask, *rest)

    def counted_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        nonlocal products
        # A step multiplies queries with keys, then weights with values.
        if products % 2 == 0:
            work.multiplied += b.data.shape[1]
        products += 1
        return dot(self, a, b, *rest, **named)

    # The load of addresses, below what `guarded_memory` makes of pointers.
    memory.load, builder.create_dot = counted_load, counted_dot
    try:
        yield work
    finally:
        memory.load, builder.create_dot = load, dot
    work.read, rest = divmod(elements, key_cache.shape[3])
    assert not rest, "keys are read whole"
