"""The lower tiers of the cache: blocks by hash in host memory, on disk, and in files of `save`.

Blocks of a file or directory carry a fingerprint of the model, and only the same model reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ....cache.tiers.disk import DiskTier
from ....cache.tiers.memory import MemoryTier
from ....cache.tiers.payload import host_copy, largest_size, pack, unpack
from ....cache.tiers.tier import Layout, Tier
from ....cache.tiers.writer import TierWriter
from .storage import AnyManager, BlockContent, ModelStorage

FORMAT = "pc blocks 3"  # first line of a file of `save`; its number changes with the format
_SIZE = struct.Struct("<Q")


class LowerTiers:
    """The tiers that store evicted blocks by hash: for each group, host memory and then disk."""

    def __init__(self, storage: ModelStorage, host_blocks: int, disk: Sequence[TierWriter] | None = None) -> None:
        self.memory = [MemoryTier(host_blocks) for _ in storage.parts]
        self._disk, self._parts = disk or (), storage.parts
        below: Sequence[Sequence[Tier]] = [(writer,) for writer in self._disk] or [()] * len(self.memory)
        self._tiers: list[list[Tier]] = [[memory, *more] for memory, more in zip(self.memory, below, strict=True)]
        self.used = bool(host_blocks or disk)  # whether there may be a block in a tier

    def content(self, manager: AnyManager, group: int, digest: bytes) -> BlockContent | None:
        """Return a block's content from the cache, or from a tier if the cache lacks it or evicts it meanwhile."""
        pool, words = manager.pools[group], np.frombuffer(digest, np.uint64)[None]
        block = int(pool.table.find(words)[0])
        if block >= 0:
            taken = pool.taken_at[block]
            content = host_copy(self._parts[group].content(block))
            if pool.taken_at[block] == taken and pool.table.find(words)[0] == block:
                return content
        return next((found for tier in self._tiers[group] if (found := tier.get(digest)) is not None), None)

    def has(self, manager: AnyManager, group: int, digest: bytes) -> bool:
        """Return whether the cache or a tier has a block, without reading it."""
        cached = manager.pools[group].table.find(np.frombuffer(digest, np.uint64)[None])[0] >= 0
        return bool(cached) or any(digest in tier for tier in self._tiers[group])

    def evicted(self, group: int, blocks: np.ndarray, digests: list[bytes]) -> list[bytes]:
        """Store evicted blocks, which still hold their content, and return the hashes of those kept."""
        contents = {d: self._parts[group].content(b) for b, d in zip(blocks.tolist(), digests, strict=True)}
        kept = set().union(*[tier.put_many(contents) for tier in self._tiers[group]])
        return [digest for digest in digests if digest in kept]

    def add(self, group: int, blocks: Mapping[bytes, BlockContent]) -> None:
        """Add blocks to host memory."""
        memory, self.used = self.memory[group], True
        memory.max_blocks = max(memory.max_blocks, len(memory) + len(blocks))
        memory.put_many(blocks)

    def close(self, manager: AnyManager) -> None:
        """Write the published blocks of a manager to disk, if there is a disk tier."""
        for group, writer in enumerate(self._disk):
            writer.close()
            for digest in published(manager, group):
                content = self.content(manager, group, digest)
                if content is not None:
                    writer.tier.put(digest, content)


def published(manager: AnyManager, group: int) -> list[bytes]:
    """Return the hash of each published block of a group. Calls of other threads may evict blocks at any time."""
    pool = manager.pools[group]
    return [pool.words[block].tobytes() for block in range(pool.num_blocks) if pool.table.lists(block)]


def disk_writers(
    fingerprint: str, manager: AnyManager, storage: ModelStorage, path: str | os.PathLike[str], max_bytes: int | None
) -> list[TierWriter]:
    """Return a writer to a directory for each group. Groups share `max_bytes` in proportion to their memory.

    `fingerprint` is that of the model; see `Identity.fingerprint`.

    Raises:
        OSError: The directory cannot be made.
    """
    identity = f"{fingerprint} {manager.hash_algorithm} {manager.seed}"
    sizes = [part.num_blocks * part.bytes_per_block for part in storage.parts]
    limits = [None if max_bytes is None else max(1, max_bytes * size // max(sum(sizes), 1)) for size in sizes]
    return [
        TierWriter(DiskTier(Path(path), Layout(identity, part.shapes), limit))
        for part, limit in zip(storage.parts, limits, strict=True)
    ]


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a file that only its owner may read. It replaces `path` if the `with` statement ends without an error.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(path)
    handle, partial = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _header(fingerprint: str, store: Any, adapters: tuple[str, ...]) -> tuple[dict[str, str], list[Layout]]:
    """Return the fields of a file's header that identify the model, and the layout of each group's blocks.

    `store` is the model's `PromptStore`, and `adapters` are the extra keys of its PEFT adapters.
    """
    manager, parts = store.manager, store.storage.parts
    shapes = [(type(g).__name__, part.shapes) for g, part in zip(manager.groups, parts, strict=True)]
    identity = {
        "block_size": str(manager.block_size),
        "hash": f"{manager.hash_algorithm} {manager.seed}",
        "adapter": " ".join(adapters),
        "model": fingerprint,
        "layout": repr(shapes),
    }
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return identity, [Layout(digest, part.shapes) for part in parts]


def save(fingerprint: str, store: Any, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
    """Write all published blocks, and those in host memory, to a file; return their number. An error changes no file.

    The file has a line `FORMAT`, a line of JSON, then each block, packed. The JSON has the model's fingerprint, the
    cache's settings and the hashes of the blocks. A block that another thread's call evicts meanwhile has no bytes.
    """
    identity, layouts = _header(fingerprint, store, adapters)
    groups = [
        [*dict.fromkeys((*memory.keys(), *published(store.manager, group)))]
        for group, memory in enumerate(store.evicted.memory)
    ]
    header, count = {"blocks": [[digest.hex() for digest in digests] for digests in groups], **identity}, 0
    with replaced(path) as file:
        file.write(f"{FORMAT}\n{json.dumps(header)}\n".encode())
        for group, (digests, layout) in enumerate(zip(groups, layouts, strict=True)):
            for digest in digests:
                content = store.evicted.content(store.manager, group, digest)
                data = b"" if content is None else pack(digest, content, layout)
                file.write(_SIZE.pack(len(data)))
                file.write(data)
                count += content is not None
    return count


def load(fingerprint: str, store: Any, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
    """Read a file's blocks into host memory and return their number.

    Raises:
        ValueError: `save` did not write the file, or wrote it for another model, or it is damaged.
    """
    expected, layouts = _header(fingerprint, store, adapters)
    with open(path, "rb") as file:
        if file.readline(len(FORMAT) + 1) != f"{FORMAT}\n".encode():
            raise ValueError("path: got a file of another format, needs a file that save() wrote")
        try:
            header = json.loads(file.readline())
            identity = {name: header[name] for name in expected}
            digests = [[bytes.fromhex(digest) for digest in group] for group in header["blocks"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(error) from error
        for name, value in expected.items():
            if identity[name] != value:
                raise ValueError(f"path: got KV of another {name}, needs the same model, adapters and cache settings")
        try:
            groups = [
                {digest: unpack(data, digest, layout) for digest in group if (data := _next(file, layout))}
                for group, layout in zip(digests, layouts, strict=True)
            ]
        except (ValueError, struct.error) as error:
            raise _damaged(error) from error
    for group, blocks in enumerate(groups):
        store.evicted.add(group, blocks)
    return sum(map(len, groups))


def _next(file: IO[bytes], layout: Layout) -> bytes:
    """Return the bytes of the next block in a file."""
    (size,) = _SIZE.unpack(file.read(_SIZE.size))
    if size > largest_size(layout):
        raise ValueError(f"a block of {size} bytes, needs at most {largest_size(layout)}")
    return file.read(size)


def _damaged(error: Exception) -> ValueError:
    got = f"a file that cannot be read ({type(error).__name__}: {error})"
    return ValueError(f"path: got {got}, needs a file that save() wrote")
