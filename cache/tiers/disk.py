"""A tier on disk: a directory that outlives the process, and that several processes may share."""

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
from collections.abc import Mapping
from pathlib import Path

import torch

from ...triton_ops._core.checks import check_integer
from ..forks import repair_after_fork
from .payload import pack, unpack
from .tier import Layout, Tensors, Tier, check_entries, check_key

_ENTRY = re.compile(r"([0-9a-f]{2,128})-1\.block")
_PARTIAL = re.compile(r"[0-9a-f]{2,128}-1\.block\.[0-9a-f]{16}\.partial")
_ABANDONED_SECONDS = 3600.0  # a partial file this old is abandoned if it is empty or there are no file locks


class DiskTier(Tier):
    """Tensors of evicted blocks by block hash, each in a file.

    An entry is written beside its place and then moved there, so a crash leaves no incomplete entry. Remains of a crash
    are removed at the next start, but not files that another process is writing. Reading an entry compares its key,
    layout and checksum. A damaged entry is deleted with a warning. If an entry cannot be written, `put` returns
    False, with one warning for all failures of a kind.

    Only their owner can read the files (0600) and the directories made here (0700). Files of other users are read if
    possible, and neither removed nor counted. Nothing else in the directory is touched.

    Thread-safe, and several processes may use one directory. docs/cache_tiers.md shows the loop from eviction to reuse.

    Args:
        path: The directory, created if absent. The entries of a layout are in a folder in it.
        layout: Model and tensor shapes of the entries. None: the caller takes care that they match.
        capacity_bytes: Maximum bytes of this user's files with this layout; the least recently used are deleted. None:
            no limit. A process counts the files that were there at its start, and those that it has written or read
            since. Several processes that write at once may therefore exceed the limit together, until one starts again.

    Raises:
        OSError: The directory is absent and cannot be created.
        ValueError: The path is empty, or the capacity is below 1.
        TypeError: `layout` is not a Layout, or the capacity is not an int.

    Attributes:
        directory: Folder of the entries of this layout.
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
        capacity = None if capacity_bytes is None else check_integer("capacity_bytes", capacity_bytes, 1)
        if not os.fspath(path):
            raise ValueError("path: got '', needs a directory")
        self.layout = layout
        self.directory = Path(path) if layout is None else Path(path) / layout.digest
        self.capacity_bytes = capacity
        self.nbytes = 0
        self._failure: int | None = None  # errno of the last write, if it failed
        self._after_fork()
        repair_after_fork(self)
        self._own: OrderedDict[bytes, int] = OrderedDict()  # bytes of each file of this user, least recently used first
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            warnings.warn(f"no block will be kept on disk: {error}", RuntimeWarning, stacklevel=2)
        self._scan()

    def _scan(self) -> None:
        """Remove abandoned partial files, and count this user's entries, the least recently used first."""
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
                with contextlib.suppress(OSError, ValueError):  # deleted meanwhile, or not a key
                    status = os.lstat(self.directory / name)
                    if stat.S_ISREG(status.st_mode) and _is_own(status):
                        found.append((status.st_mtime_ns, bytes.fromhex(match[1]), status.st_size))
        with self._lock:
            for _, key, size in sorted(found):
                self._count(key, size)

    def _after_fork(self) -> None:
        """Take a new lock, because a thread that a child process lacks may have held the old one."""
        self._lock = threading.Lock()

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
        """Write a block; return whether it is on disk now. See `Tier.put`."""
        check_key(key)
        check_entries({key: tensors}, self.layout)
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
        """Write several blocks, after a check of all arguments. See `Tier.put_many`."""
        check_entries(entries, self.layout)
        return {key for key, tensors in entries.items() if self.put(key, tensors)}

    def get(self, key: bytes) -> dict[str, torch.Tensor] | None:
        """Read a block's tensors to the CPU; return None if it is absent, unreadable or damaged."""
        check_key(key)
        path = self._path(key)
        try:
            descriptor, status = _open_file(path)
            with open(descriptor, "rb") as file:
                data = file.read()
        except OSError:  # evicted by another process, or unreadable
            if not os.path.lexists(path):  # a file that is only unreadable now counts on
                with self._lock:
                    self.nbytes -= self._own.pop(key, 0)
            return None
        try:
            tensors = unpack(data, key, self.layout)
        except Exception as error:  # any damage affects only this entry
            warnings.warn(f"a block on disk is dropped: {path.name}: {error}", RuntimeWarning, stacklevel=2)
            self.discard(key)
            return None
        if _is_own(status):
            with contextlib.suppress(OSError):
                os.utime(path)
            with self._lock:
                self._count(key, status.st_size)
        return tensors

    def discard(self, key: bytes) -> None:
        """Remove a block, if it exists and belongs to this user."""
        check_key(key)
        with self._lock:
            self.nbytes -= self._own.pop(key, 0)
            _unlink(self._path(key))

    def _warn(self, error: OSError) -> None:
        """Warn once of an error that affects every block, such as a full disk. The text names no file."""
        if self._failure is None or self._failure != error.errno:
            self._failure = error.errno
            text = f"a block is not kept on disk: [Errno {error.errno}] {error.strerror}: {self.directory}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _path(self, key: bytes) -> Path:
        return self.directory / f"{key.hex()}-1.block"

    def _count(self, key: bytes, size: int) -> None:
        """Record an entry as the most recently used. Delete entries, at worst this one, until the capacity holds."""
        self.nbytes += size - self._own.pop(key, 0)
        self._own[key] = size
        while self.capacity_bytes is not None and self.nbytes > self.capacity_bytes:
            old, size = self._own.popitem(last=False)
            self.nbytes -= size
            _unlink(self._path(old))


def _is_own(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def _unlink(path: Path) -> None:
    """Remove a file of this user; ignore errors."""
    with contextlib.suppress(OSError):
        if _is_own(os.lstat(path)):
            os.unlink(path)


def _open_file(path: Path) -> tuple[int, os.stat_result]:
    """Open a plain file for reading. Raise OSError for a link, a folder or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a plain file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def _write(partial: Path, data: bytearray, path: Path) -> None:
    """Write a file and move it to its place. Keep it locked until then, because unlocked files count as abandoned."""
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        _lock(descriptor)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
        os.replace(partial, path)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed. Return False if another process holds the lock, None without file locks.

    If the process ends, the system closes the file, so a crash leaves no lock.
    """
    # A lock of the file, not a process number, works between containers that share the directory.
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _remove_abandoned(path: Path) -> None:
    """Remove a partial file of this user that no process is writing."""
    with contextlib.suppress(OSError):
        descriptor, status = _open_file(path)
        with open(descriptor, "rb"):
            old = time.time() - status.st_mtime > _ABANDONED_SECONDS
            if not _is_own(status) or not (status.st_size or old):
                return  # the writer of a new, empty file may not have locked it yet
            locked = _lock(descriptor)
            if locked or (locked is None and old):
                os.unlink(path)
