"""Blocks on disk: a directory that outlives the process, and that several processes may share."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from .payload import pack, unpack
from .tier import Layout, Tensors, check_key, check_tensors

_ENTRY = re.compile(r"([0-9a-f]{2,128})-1\.block")
_PARTIAL = re.compile(r"[0-9a-f]{2,128}-1\.block\.[0-9a-f]{16}\.partial")
_ABANDONED_SECONDS = 3600.0  # of an empty partial file, or one whose file system has no locks


class DiskTier:
    """Tensors of evicted blocks by block hash, one file each; a `pc.cache.tiers.tier.Tier`.

    An entry is written beside its place and moved there, so a crash leaves no half entry under a valid name; what a
    crash left is removed at the next start, what another process is writing is not. Its key, layout and checksum are
    compared whenever it is read. An entry that is damaged is dropped with a warning; one that cannot be written is not
    taken, with one warning for all that fail alike until one is written. Files are for their owner alone (0600), and so
    are the directories made here (0700). Files of other users are read where they can be, and neither removed nor
    counted. Nothing else in the directory is touched.

    Methods may be called from several threads, and several processes may use one directory.
    docs/cache_tiers.md has the loop from eviction to reuse.

    Args:
        path: Created when absent; the entries of a layout lie in a folder of it.
        layout: Of which model and shape the entries are; None: of one that the caller alone knows.
        capacity_bytes: Own files of this layout to keep at most; those used longest ago go first. None: no limit.

    Raises:
        OSError: The directory is not there and cannot be made.
        ValueError: An empty path, a capacity below 1.
        TypeError: A layout that is none.

    Attributes:
        directory: Where the entries of this layout are.
        nbytes: Bytes of the entries that count towards the capacity.

    Examples:
        >>> import tempfile
        >>> from pc.cache.tiers.disk import DiskTier
        >>> from pc.cache.tiers.tier import Layout
        >>> block = {"key": torch.randn(2, 16, 2, 64), "value": torch.randn(2, 16, 2, 64)}  # of two layers
        >>> layout = Layout.of("my-model@sha256:9f86", block)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     kept = DiskTier(path, layout).put(b"hash of the block", block)
        ...     found = DiskTier(path, layout).get(b"hash of the block")  # another process, later
        >>> kept, torch.equal(found["key"], block["key"])
        (True, True)
    """

    def __init__(self, path: str | Path, layout: Layout | None = None, capacity_bytes: int | None = None) -> None:
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(f"layout: got {type(layout).__name__}, needs a pc.cache.tiers.tier.Layout or None")
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ValueError(f"capacity_bytes: got {capacity_bytes}, needs at least 1 or None")
        if not os.fspath(path):
            raise ValueError("path: got '', needs a directory")
        self.layout = layout
        self.directory = Path(path) if layout is None else Path(path) / layout.digest
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        self._failure: int | None = None  # the errno of the last write, where it failed
        self._lock = threading.Lock()
        self._own: OrderedDict[bytes, int] = OrderedDict()  # bytes of each file of this user, used longest ago first
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            warnings.warn(f"no block will be kept on disk: {error}", RuntimeWarning, stacklevel=2)
        self._scan()

    def _scan(self) -> None:
        found = []
        try:
            with os.scandir(self.directory) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            return
        for name in names:
            if _PARTIAL.fullmatch(name):
                _remove_abandoned(self.directory / name)
            elif match := _ENTRY.fullmatch(name):
                with contextlib.suppress(OSError, ValueError):  # gone since, or no key
                    status = os.lstat(self.directory / name)
                    if stat.S_ISREG(status.st_mode) and _is_own(status):
                        found.append((status.st_mtime_ns, bytes.fromhex(match[1]), status.st_size))
        with self._lock:
            for _, key, size in sorted(found):
                self._count(key, size)

    def __len__(self) -> int:
        return len(self._own)

    def __contains__(self, key: object, /) -> bool:
        if not isinstance(key, bytes):
            return False
        try:
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        except OSError:
            return False

    def put(self, key: bytes, tensors: Tensors) -> bool:
        """Writes a block, and says whether it is on disk now; see `Tier.put`."""
        check_key(key)
        check_tensors(tensors, self.layout)
        if key in self:
            with self._lock:
                if key in self._own:
                    self._own.move_to_end(key)
            return True
        data = pack(key, tensors, self.layout)
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
        try:
            _write(partial, data, path)
        except OSError as error:
            _unlink(partial)
            self._warn(error)
            return False
        except BaseException:  # an interrupt
            _unlink(partial)
            raise
        self._failure = None
        with self._lock:
            self._count(key, len(data))
        return key in self

    def put_many(self, entries: Mapping[bytes, Tensors]) -> set[bytes]:
        """See `Tier.put_many`; every argument is checked before the first is written."""
        for key, tensors in entries.items():
            check_key(key)
            check_tensors(tensors, self.layout)
        return {key for key, tensors in entries.items() if self.put(key, tensors)}

    def get(self, key: bytes) -> dict[str, torch.Tensor] | None:
        """Reads a block: its tensors on the CPU, or None when it is not there, cannot be read or was damaged."""
        check_key(key)
        path = self._path(key)
        try:
            descriptor, status = _open_file(path)
            with open(descriptor, "rb") as file:
                data = file.read()
        except OSError:  # evicted by another process, or not ours to read
            with self._lock:
                self.nbytes -= self._own.pop(key, 0)
            return None
        try:
            tensors = unpack(data, key, self.layout)
        except Exception as error:  # whatever is wrong with one entry, the others are served
            warnings.warn(f"a block on disk is dropped: {path.name}: {error}", RuntimeWarning, stacklevel=2)
            self.discard(key)
            return None
        if _is_own(status):
            with contextlib.suppress(OSError):
                os.utime(path)
            with self._lock:
                self._count(key, status.st_size)
        return tensors

    def get_many(self, keys: Sequence[bytes]) -> list[dict[str, torch.Tensor] | None]:
        """See `Tier.get_many`."""
        return [self.get(key) for key in keys]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.contains_many`."""
        return [key in self for key in keys]

    def discard(self, key: bytes) -> None:
        """Removes a block, if it is there and this user's."""
        check_key(key)
        with self._lock:
            self.nbytes -= self._own.pop(key, 0)
            _unlink(self._path(key))

    def _warn(self, error: OSError) -> None:
        """A full disk or a folder that went away refuses every block: said once, in a text that names no file."""
        if self._failure is None or self._failure != error.errno:
            self._failure = error.errno
            text = f"a block is not kept on disk: [Errno {error.errno}] {error.strerror}: {self.directory}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _path(self, key: bytes) -> Path:
        return self.directory / f"{key.hex()}-1.block"

    def _count(self, key: bytes, size: int) -> None:
        """Counts an entry as the one used last, and drops others that are then too many."""
        self.nbytes += size - self._own.pop(key, 0)
        self._own[key] = size
        while self.capacity_bytes is not None and self.nbytes > self.capacity_bytes:
            old, size = self._own.popitem(last=False)
            self.nbytes -= size
            _unlink(self._path(old))


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def _unlink(path: Path) -> None:
    """Removes a file of this user, as far as that can be done."""
    with contextlib.suppress(OSError):
        if _is_own(os.lstat(path)):
            os.unlink(path)


def _open_file(path: Path) -> tuple[int, os.stat_result]:
    """Opens a plain file to read; a link, a folder or a pipe in its place is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no file")
    return descriptor, status


def _write(partial: Path, data: bytearray, path: Path) -> None:
    """Writes a file and moves it to its place, locked until it is there: unlocked ones are taken for abandoned."""
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        _lock(descriptor)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
        os.replace(partial, path)


def _lock(descriptor: int) -> bool | None:
    """Takes the lock of a file, which ends with its process: False where it is taken, None where there are none."""
    # Of the file, not of a process number: containers that share the directory see each other's.
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _remove_abandoned(path: Path) -> None:
    """Removes a partial file of this user that no process writes any more."""
    with contextlib.suppress(OSError):
        descriptor, status = _open_file(path)
        with open(descriptor, "rb"):
            old = time.time() - status.st_mtime > _ABANDONED_SECONDS
            if not _is_own(status) or not (status.st_size or old):
                return  # an empty one may have been made a moment ago, and its writer is about to lock it
            locked = _lock(descriptor)
            if locked or (locked is None and old):
                os.unlink(path)
