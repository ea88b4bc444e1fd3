"""Blocks on disk: a directory that outlives the process."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SUFFIX = ".safetensors"


class DiskTier:
    """Tensors of evicted blocks by block hash, as safetensors files.

    An entry is one file, `<hash>-<checksum>.safetensors`. It is written beside its place and moved there, so a crash
    leaves no half entry under a valid name; what a crash left is removed at the next start. Its checksum is verified
    whenever it is read. An entry that is damaged, or cannot be written because the disk is full, is dropped with a
    warning, and the cache goes on without it. Methods may be called from several threads.

    Feed it from `CacheManager.on_evict` and ask it for the hashes that `CacheManager.block_hashes` gives behind a hit;
    docs/cache.md has the loop. Hashes do not know the model: use one directory for each model and cache layout.

    Args:
        directory: Created when absent; entries found there are served.
        capacity_bytes: Files to keep at most; the entries used longest ago go first. None: no limit.
    """

    def __init__(self, directory: str | Path, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ValueError(f"capacity_bytes: got {capacity_bytes}, needs at least 1 or None")
        self.directory = Path(directory)
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, tuple[Path, int]] = OrderedDict()
        self.nbytes = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        found = []
        for path in self.directory.iterdir():
            if path.suffix == ".partial":
                path.unlink(missing_ok=True)
            elif path.name.endswith(SUFFIX):
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        for _, path, size in sorted(found):
            try:
                key = bytes.fromhex(path.name.split("-")[0])
            except ValueError:
                continue
            self._note(key, path, size)
        self._trim()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def put(self, block_hash: bytes, tensors: dict[str, torch.Tensor]) -> bool:
        """Writes a block.

        Args:
            block_hash: Its identity.
            tensors: By name, on any device.

        Returns:
            Whether it is on disk now.
        """
        from safetensors.torch import save

        with self._lock:
            if block_hash in self._entries:
                self._entries.move_to_end(block_hash)
                return True
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        path = self.directory / f"{block_hash.hex()}-{_checksum(data)}{SUFFIX}"
        partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            warnings.warn(f"a block is not kept on disk: {error}", RuntimeWarning, stacklevel=2)
            partial.unlink(missing_ok=True)
            return False
        with self._lock:
            self._note(block_hash, path, len(data))
            self._trim()
            return block_hash in self._entries

    def get(self, block_hash: bytes) -> dict[str, torch.Tensor] | None:
        """Reads a block: its tensors on the CPU, or None when it is not there or was damaged."""
        from safetensors.torch import load

        with self._lock:
            entry = self._entries.get(block_hash)
            if entry is None:
                return None
            self._entries.move_to_end(block_hash)
        path = entry[0]
        try:
            data = path.read_bytes()
            if not path.name.endswith(f"-{_checksum(data)}{SUFFIX}"):
                raise ValueError("its checksum is wrong")
            os.utime(path)
            tensors: dict[str, torch.Tensor] = load(data)
            return tensors
        except Exception as error:  # whatever is wrong with one entry, the others are served
            warnings.warn(f"a block on disk is dropped: {path.name}: {error}", RuntimeWarning, stacklevel=2)
            self.discard(block_hash)
            return None

    def discard(self, block_hash: bytes) -> None:
        """Removes a block, if it is there."""
        with self._lock:
            entry = self._entries.pop(block_hash, None)
            if entry is not None:
                self.nbytes -= entry[1]
                entry[0].unlink(missing_ok=True)

    def _note(self, block_hash: bytes, path: Path, size: int) -> None:
        old = self._entries.pop(block_hash, None)
        if old is not None:
            self.nbytes -= old[1]
            if old[0] != path:
                old[0].unlink(missing_ok=True)
        self._entries[block_hash] = (path, size)
        self.nbytes += size

    def _trim(self) -> None:
        while self.capacity_bytes is not None and self.nbytes > self.capacity_bytes:
            _, (path, size) = self._entries.popitem(last=False)
            self.nbytes -= size
            path.unlink(missing_ok=True)


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
