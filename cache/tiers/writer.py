"""A tier that accepts blocks at once and writes them in its own thread, so that no request waits for a slow disk."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Mapping, Sequence

import torch

from ...triton_ops._core.checks import check_integer
from ..forks import repair_after_fork
from .payload import host_copy
from .tier import Tensors, Tier, check_entries, check_key

_BATCH = 64


class TierWriter(Tier):
    """A tier that writes to another tier in the background.

    `put` copies tensors to host memory before it returns, so their blocks may be overwritten. `get` and `in` also see
    queued blocks. A full queue refuses blocks and never waits. An exception of the other tier is counted, kept in
    `last_error` and reported as a warning; the worker continues. Thread-safe. Close it, or use it in a `with` block,
    because blocks that are queued at the end of the process are lost.

    Args:
        tier: The tier to write to. Nothing else may write the same keys to it.
        max_bytes: Limit for tensors that are queued or being written.

    Raises:
        TypeError: `tier` is not a `Tier`, or `max_bytes` is not an int.
        ValueError: `max_bytes` is below 1.

    Attributes:
        written: Number of blocks that the other tier stored.
        nbytes: Bytes of tensors that are queued or being written.
        refused: Number of blocks refused by a full or closed queue, or by the other tier.
        failed: Number of blocks lost to an exception of the other tier.
        last_error: The last of these exceptions.

    Examples:
        >>> import tempfile
        >>> from pc.cache.tiers.disk import DiskTier
        >>> from pc.cache.tiers.writer import TierWriter
        >>> with tempfile.TemporaryDirectory() as path, TierWriter(DiskTier(path), max_bytes=64 << 20) as tier:
        ...     taken = tier.put(b"hash of the block", {"key": torch.ones(16, 2, 64)})  # returns at once
        ...     found = tier.get(b"hash of the block")  # from the queue, or from disk
        >>> taken, found["key"].shape, tier.written
        (True, torch.Size([16, 2, 64]), 1)
    """

    def __init__(self, tier: Tier, max_bytes: int = 1 << 30) -> None:
        if not isinstance(tier, Tier):
            raise TypeError(f"tier: got {type(tier).__name__}, needs the methods of pc.cache.tiers.tier.Tier")
        self.tier = tier
        self.max_bytes = check_integer("max_bytes", max_bytes, 1)
        self.written = self.refused = self.failed = 0
        self.last_error: BaseException | None = None
        self._closed = False
        self._after_fork()
        repair_after_fork(self)

    def _after_fork(self) -> None:
        """Begin with an empty queue and no worker. In a child process, the parent writes what was queued."""
        self._queued: dict[bytes, dict[str, torch.Tensor]] = {}
        self._writing: dict[bytes, dict[str, torch.Tensor]] = {}
        self.nbytes = 0
        self._lock = threading.Lock()  # an interrupt inside `with self._changed` could leave the lock taken
        self._changed = threading.Condition(self._lock)
        self._worker: threading.Thread | None = None

    def __len__(self) -> int:
        """Return the number of blocks that are queued or being written."""
        return len(self._queued) + len(self._writing)

    def __enter__(self) -> TierWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def put_many(self, entries: Mapping[bytes, Tensors]) -> set[bytes]:
        """Queue several blocks; return the keys of those that are queued. A full or closed queue refuses blocks."""
        check_entries(entries, None)
        return {key for key, tensors in entries.items() if self._take(key, tensors)}

    def _take(self, key: bytes, tensors: Tensors) -> bool:
        """Queue a copy of a block's tensors. Return False if the queue is full or closed, or no thread can start."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        staged = None
        while True:
            with self._lock:
                if key in self._queued or key in self._writing:
                    return True
                if self._closed or self.nbytes + size > self.max_bytes or not (staged is None or self._has_worker()):
                    self.refused += 1
                    return False
                if staged is not None:
                    self._queued[key], self.nbytes = staged, self.nbytes + size
                    self._changed.notify_all()
                    return True
            staged = host_copy(tensors)  # without the lock

    def _has_worker(self) -> bool:
        """Start the worker, unless it runs. Return False if the system refuses a new thread."""
        if self._worker is None:
            try:
                self._worker = threading.Thread(target=self._work, name="pc-tier-writer", daemon=True)
                self._worker.start()
            except BaseException as error:  # an interrupt too: `_work` ends if it is not the worker
                self._worker = None
                if not isinstance(error, RuntimeError):
                    raise
                _warn(f"no block is written in the background: {error}")
                return False
        return True

    def _work(self) -> None:
        """Write queued blocks to the other tier until the queue is closed and empty. The worker's thread runs this."""
        while True:
            with self._lock:
                while not self._queued:
                    if self._closed or self._worker is not threading.current_thread():
                        return
                    self._changed.wait()
                batch = {key: self._queued.pop(key) for key in list(self._queued)[:_BATCH]}
                self._writing = batch
            error: BaseException | None = None
            took: set[bytes] = set()
            try:
                took = set(self.tier.put_many(batch)) & batch.keys()
            except BaseException as raised:  # even SystemExit must not end the worker silently
                error = raised
                _warn(f"{len(batch)} blocks were not written: {type(error).__name__}: {error}")
            with self._lock:
                self._writing = {}
                self.nbytes -= sum(tensor.nbytes for tensors in batch.values() for tensor in tensors.values())
                if error is None:
                    self.written += len(took)
                    self.refused += len(batch) - len(took)
                else:
                    self.failed += len(batch)
                    self.last_error = error
                self._changed.notify_all()
            del batch, error

    def get_many(self, keys: Sequence[bytes]) -> list[dict[str, torch.Tensor] | None]:
        """Return the tensors of several blocks; see `Tier.get_many`."""
        for key in keys:
            check_key(key)
        with self._lock:
            here = {key: self._queued.get(key, self._writing.get(key)) for key in keys}
        missing = [key for key in here if here[key] is None]
        found = dict(zip(missing, self.tier.get_many(missing) if missing else [], strict=True))
        tensors = {key: found[key] if rows is None else host_copy(rows) for key, rows in here.items()}
        return [tensors[key] for key in keys]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each block is queued or in the other tier; see `Tier.contains_many`."""
        with self._lock:
            here = [key in self._queued or key in self._writing for key in keys]
        missing = [key for key, queued in zip(keys, here, strict=True) if not queued]
        there = iter(self.tier.contains_many(missing) if missing else [])
        return [queued or next(there) for queued in here]

    def discard(self, key: bytes) -> None:
        """Remove a block from the queue and the other tier. Wait while it is being written."""
        check_key(key)
        with self._lock:
            while key in self._writing:
                self._changed.wait()
            if key in self._queued:
                size = sum(tensor.nbytes for tensor in self._queued[key].values())
                del self._queued[key]
                self.nbytes -= size
                self._changed.notify_all()
        self.tier.discard(key)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until all blocks are written; return whether they are."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._queued or self._writing:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, timeout: float | None = None) -> bool:
        """Accept no more blocks, and wait like `flush` until all are written; return whether they are.

        Blocks that are still queued are written later.
        """
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        done = self.flush(timeout)
        if done and self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(timeout)
        return done


def _warn(text: str) -> None:
    # If warnings are errors, or their display fails, the worker has no caller that could handle it.
    with contextlib.suppress(Exception):
        warnings.warn(text, RuntimeWarning, stacklevel=3)
