"""A tier in a Mooncake store: memory of several machines, shared by the processes that run one model."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from operator import index
from typing import Any

import numpy as np
import torch

from ..forks import repair_after_fork
from .payload import largest_size, pack_into, unpack
from .tier import Layout, Tensors, Tier, check_entries, check_key

_NOT_FOUND, _EXISTS = -704, -705
_UNREACHABLE = -800
"""At or below this code, a transfer or a call of another process failed. Codes above it concern one object."""


class MooncakeTier(Tier):
    """Tensors of evicted blocks by block hash, in a Mooncake store.

    Blocks are transferred in batches through one buffer that is registered once. A value carries its key, layout and
    checksum, which are compared when it is read. A value that does not match is a miss. If the store fails, the tier
    warns, and answers with misses for `retry_seconds` without calling the store, so that requests continue. The store
    evicts old values itself.

    Thread-safe: threads take turns at the buffer. After `os.fork()`, the child's tier is closed.

    Args:
        store: A `mooncake.store.MooncakeDistributedStore` that is set up (see `connect`), or an object with its methods
            `register_buffer`, `unregister_buffer`, `batch_put_from`, `batch_get_into`, `batch_is_exist`, `remove` and
            `close`. Negative results are errors.
        layout: Model and tensor shapes of the blocks.
        batch_blocks: Number of blocks in the buffer.
        retry_seconds: Time without calls after the store failed.

    Raises:
        TypeError: `layout` is not a Layout.
        ValueError: A number is out of range.
        ConnectionError: The store does not accept the buffer.

    Attributes:
        failures: Number of failed calls of the store.

    Examples:
        >>> import ctypes
        >>> from pc.cache.tiers.mooncake import MooncakeTier
        >>> from pc.cache.tiers.tier import Layout
        >>> class Memory(dict):  # replaces MooncakeDistributedStore, in one process
        ...     def register_buffer(self, address, size):
        ...         return 0
        ...     def batch_is_exist(self, keys):
        ...         return [int(key in self) for key in keys]
        ...     def batch_put_from(self, keys, addresses, sizes):
        ...         self.update((k, ctypes.string_at(a, s)) for k, a, s in zip(keys, addresses, sizes))
        ...         return [0 for key in keys]
        ...     def batch_get_into(self, keys, addresses, sizes):
        ...         for key, address in zip(keys, addresses):
        ...             ctypes.memmove(address, self[key], len(self[key]))
        ...         return [len(self[key]) for key in keys]
        >>> block = {"key": torch.randn(2, 16, 2, 64), "value": torch.randn(2, 16, 2, 64)}
        >>> tier = MooncakeTier(Memory(), Layout.of("my-model@sha256:9f86", block))
        >>> tier.put(b"hash of the block", block)
        True
        >>> torch.equal(tier.get(b"hash of the block")["value"], block["value"])
        True
    """

    def __init__(self, store: Any, layout: Layout, batch_blocks: int = 64, retry_seconds: float = 30.0) -> None:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout: got {type(layout).__name__}, needs a pc.cache.tiers.tier.Layout")
        if batch_blocks < 1:
            raise ValueError(f"batch_blocks: got {batch_blocks}, needs at least 1")
        if retry_seconds < 0:
            raise ValueError(f"retry_seconds: got {retry_seconds}, needs at least 0")
        self.layout = layout
        self.retry_seconds = retry_seconds
        self.failures = 0
        self._store = store
        self._owns_store = False
        self._closed = False
        self._lock = threading.Lock()
        self._left_alone_until = 0.0
        self._buffer = np.zeros((batch_blocks, -(-largest_size(layout) // 64) * 64), np.uint8)
        code = store.register_buffer(self._buffer.ctypes.data, self._buffer.nbytes)
        if code:
            raise ConnectionError(f"store: register_buffer of {self._buffer.nbytes} bytes gave {code}, needs 0")
        repair_after_fork(self)

    def _after_fork(self) -> None:
        """Close the tier in a child process, which has neither the store's threads nor its connections."""
        self._lock = threading.Lock()
        self._closed = True

    @classmethod
    def connect(
        cls,
        layout: Layout,
        metadata_server: str,
        master: str,
        hostname: str = "localhost",
        segment_bytes: int = 1 << 30,
        transfer_bytes: int = 64 << 20,
        protocol: str = "tcp",
        device: str = "",
        batch_blocks: int = 64,
        retry_seconds: float = 30.0,
    ) -> MooncakeTier:
        """Return a tier with its own store (extra `mooncake`).

        Args:
            layout: As for the class.
            metadata_server: Address such as `http://10.0.0.1:8080/metadata`.
            master: Address such as `10.0.0.1:50051`.
            hostname: Name by which other machines reach this process.
            segment_bytes: Memory that this process contributes to the store. 0: none.
            transfer_bytes: Memory for the transfer engine.
            protocol: "tcp" or "rdma".
            device: Device for rdma, such as "mlx5_0".
            batch_blocks: As for the class.
            retry_seconds: As for the class.

        Raises:
            ImportError: Mooncake is missing.
            ConnectionError: The store cannot be reached.
        """
        try:
            make = import_module("mooncake.store").MooncakeDistributedStore
        except ImportError as error:
            raise ImportError(f"MooncakeTier: {error}; pip install mooncake-transfer-engine-non-cuda") from error
        store: Any = make()
        code = store.setup(hostname, metadata_server, segment_bytes, transfer_bytes, protocol, device, master)
        if code:
            raise ConnectionError(f"metadata_server, master: got {metadata_server}, {master}, setup gave {code}")
        try:
            tier = cls(store, layout, batch_blocks, retry_seconds)
        except BaseException:
            store.close()
            raise
        tier._owns_store = True
        return tier

    def put_many(self, entries: Mapping[bytes, Tensors]) -> set[bytes]:
        """Store several blocks, after a check of all arguments. See `Tier.put_many`."""
        check_entries(entries, self.layout)
        with self._lock:
            keys = list(entries)
            took = {key for key, there in zip(keys, self._exist(keys), strict=True) if there}
            for batch in self._batches([key for key in keys if key not in took]):
                rows = self._buffer[: len(batch)]
                sizes = [
                    pack_into(memoryview(row), key, entries[key], self.layout)
                    for row, key in zip(rows, batch, strict=True)
                ]
                names, addresses = self._names(batch), [row.ctypes.data for row in rows]
                codes = self._ask(partial(self._store.batch_put_from, names, addresses, sizes), len(batch))
                took |= {key for key, code in zip(batch, codes, strict=True) if code in (0, _EXISTS)}
            return took

    def get_many(self, keys: Sequence[bytes]) -> list[dict[str, torch.Tensor] | None]:
        """Read several blocks; see `Tier.get_many`."""
        for key in keys:
            check_key(key)
        found: list[dict[str, torch.Tensor] | None] = []
        damaged = []
        with self._lock:
            for batch in self._batches(keys):
                rows = self._buffer[: len(batch)]
                names, addresses = self._names(batch), [row.ctypes.data for row in rows]
                room = [row.nbytes for row in rows]
                sizes = self._ask(partial(self._store.batch_get_into, names, addresses, room), len(batch))
                for row, key, size in zip(rows, batch, sizes, strict=True):
                    tensors = None
                    if 0 <= size <= row.nbytes:
                        try:
                            tensors = unpack(memoryview(row)[:size], key, self.layout)
                        except Exception as error:  # any damage affects only this value
                            damaged.append(key)
                            text = f"a block of the store is dropped: {key.hex()}: {error}"
                            warnings.warn(text, RuntimeWarning, stacklevel=2)
                    found.append(tensors)
        for key in damaged:
            self.discard(key)
        return found

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each block is in the store; see `Tier.contains_many`."""
        with self._lock:
            return self._exist(keys)

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        return [code == 1 for code in self._ask(partial(self._store.batch_is_exist, self._names(keys)), len(keys))]

    def discard(self, key: bytes) -> None:
        """Ask the store to remove a block. The store keeps a block that is being read, and evicts it later."""
        check_key(key)
        with self._lock:
            self._ask(lambda: [self._store.remove(self._names([key])[0])], 1)

    def close(self) -> None:
        """Release the buffer, and close the store if `connect` made it. After that every lookup is a miss."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._store.unregister_buffer(self._buffer.ctypes.data)
            finally:
                if self._owns_store:
                    self._store.close()

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"pc/{self.layout.digest}/{key.hex()}" for key in keys]

    def _batches(self, keys: Sequence[bytes]) -> list[Sequence[bytes]]:
        return [keys[first : first + len(self._buffer)] for first in range(0, len(keys), len(self._buffer))]

    def _ask(self, call: Callable[[], Sequence[int]], count: int) -> Sequence[int]:
        """Return the store's answer for each of `count` keys, or "not found" if it fails or has failed recently."""
        nothing = [_NOT_FOUND] * count
        if self._closed or time.monotonic() < self._left_alone_until:
            return nothing
        try:
            codes = [*map(index, call())]
            if len(codes) != count:
                raise ConnectionError(f"it gave {len(codes)} answers for {count} keys")
        except Exception as error:
            return self._leave_alone(f"{type(error).__name__}: {error}", nothing)
        if max(codes, default=0) <= _UNREACHABLE:
            return self._leave_alone(f"it answered {codes[0]}", nothing)
        return codes

    def _leave_alone(self, reason: str, answer: Sequence[int]) -> Sequence[int]:
        """Count a failure, do not call the store for `retry_seconds`, and return `answer`."""
        self.failures += 1
        self._left_alone_until = time.monotonic() + self.retry_seconds
        text = f"the Mooncake store is not used for {self.retry_seconds} s: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
        return answer
