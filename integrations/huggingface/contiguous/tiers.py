"""Blocks below the cache by hash, of keys and values or of states: in host memory, on disk, in files of `save`.

Whatever leaves the process is a block as `pc.cache.payload` packs it, under a fingerprint of the model, and read by no
other.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ....cache.disk import DiskTier
from ....cache.payload import largest_size, pack, unpack
from ....cache.tier import Layout
from ....cache.tier_writer import TierWriter
from ..identity import changes_itself
from ..store import AnyManager
from .storage import Content, ModelStorage

FORMAT = "pc blocks 3"  # first line of a file of `save`: an own one, so that older and newer ones are told apart
_SIZE = struct.Struct("<Q")
_NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
"""Entries of a config that say nothing about KV."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class TieredBlocks:
    """Blocks' contents by hash and group: the `max_blocks` used last of each in host memory, and more on disk."""

    def __init__(self, storage: ModelStorage, max_blocks: int, disk: Sequence[TierWriter] | None = None) -> None:
        self.max_blocks = max_blocks
        self._disk = disk
        self._storage = storage
        self._blocks: list[OrderedDict[bytes, Content]] = [OrderedDict() for _ in storage.parts]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def items(self, group: int) -> list[tuple[bytes, Content]]:
        """All blocks of a group in host memory with their hashes."""
        with self._lock:
            return list(self._blocks[group].items())

    def get(self, group: int, digest: bytes) -> Content | None:
        """A block's content, which is not to be written to."""
        with self._lock:
            content = self._blocks[group].get(digest)
            if content is not None:
                self._blocks[group].move_to_end(digest)
                return content
        return None if self._disk is None else self._disk[group].get(digest)

    def put(self, group: int, digest: bytes, content: Content) -> bool:
        """Keeps a block's content in place of the one used longest ago; whether a later `get` may find it."""
        with self._lock:
            blocks = self._blocks[group]
            blocks[digest] = content
            blocks.move_to_end(digest)
            while len(blocks) > self.max_blocks:
                blocks.popitem(last=False)
        on_disk = self._disk is not None and (self._disk[group].put(digest, content) or digest in self._disk[group])
        return self.max_blocks > 0 or on_disk

    def evicted(self, group: int, blocks: np.ndarray, digests: list[bytes]) -> list[bytes]:
        """Called by the manager with blocks that are about to lose their content; gives the hashes of those kept."""
        pairs = zip(blocks.tolist(), digests, strict=True)
        return [digest for block, digest in pairs if self.put(group, digest, self._storage.parts[group].content(block))]

    def states(self, manager: AnyManager, digest: bytes) -> Content | None:
        """Recurrent states behind a block: of a block that has not been overwritten meanwhile, or evicted ones."""
        group = self._storage.state_group
        pool = manager.pools[group]
        block = int(pool.table.find(np.frombuffer(digest, np.uint64)[None])[0])
        if block >= 0:
            taken = pool.taken_at[block]
            content = self._storage.parts[group].content(block)
            if pool.taken_at[block] == taken and pool.table.lists(block):
                return content
        return self.get(group, digest)

    def close(self, manager: AnyManager) -> None:
        """Writes what a manager still has to disk, where there is one."""
        for group, writer in enumerate(self._disk or ()):
            writer.close()
            for digest, block in published(manager, group):
                writer.tier.put(digest, self._storage.parts[group].content(block))


def published(manager: AnyManager, group: int) -> list[tuple[bytes, int]]:
    """The blocks of a group that are published in the prefix cache, with their hashes."""
    pool = manager.pools[group]
    return [(pool.words[b].tobytes(), b) for b in range(pool.num_blocks) if pool.table.lists(b)]


def disk_writers(
    model: Any, manager: AnyManager, storage: ModelStorage, path: str | os.PathLike[str], max_bytes: int | None
) -> list[TierWriter]:
    """A directory for this model's blocks; groups share its bytes as they do memory. OSError: it cannot be made."""
    identity = f"{fingerprint(model)} {manager.hash_algorithm} {manager.seed}"
    sizes = [part.num_blocks * part.bytes_per_block for part in storage.parts]
    limits = [None if max_bytes is None else max(1, max_bytes * size // max(sum(sizes), 1)) for size in sizes]
    return [
        TierWriter(DiskTier(Path(path), Layout(identity, part.shapes), limit))
        for part, limit in zip(storage.parts, limits, strict=True)
    ]


class SavedBlocks:
    """A file of blocks: a line of JSON that says whose they are and their hashes, then each block, packed."""

    # It is of the model as it is now, with PEFT's adapters as in the extra keys of blocks.

    def __init__(self, model: Any, manager: AnyManager, storage: ModelStorage, adapters: tuple[str, ...]) -> None:
        self._manager, self._storage = manager, storage
        shapes = [(type(g).__name__, part.shapes) for g, part in zip(manager.groups, storage.parts, strict=True)]
        self._identity = {
            "block_size": str(manager.block_size),
            "hash": f"{manager.hash_algorithm} {manager.seed}",
            "adapter": " ".join(adapters),
            "model": fingerprint(model),
            "layout": repr(shapes),
        }
        digest = hashlib.sha256(json.dumps(self._identity).encode()).hexdigest()
        self._layouts = [Layout(digest, part.shapes) for part in storage.parts]

    def write(self, path: str | os.PathLike[str], evicted: TieredBlocks | None) -> int:
        """Writes all blocks that prompts can find; the file is there whole or not at all, and yours alone; how many."""
        target = Path(path)
        handle, partial = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                count = self._write(file, evicted)
            os.replace(partial, target)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        return count

    def _write(self, file: IO[bytes], evicted: TieredBlocks | None) -> int:
        groups: list[dict[bytes, int | Content]] = []
        for group in range(len(self._storage.parts)):
            groups.append(dict(evicted.items(group)) if evicted is not None else {})
            groups[-1] |= dict(published(self._manager, group))
        header = {"blocks": [[digest.hex() for digest in blocks] for blocks in groups], **self._identity}
        file.write(f"{FORMAT}\n{json.dumps(header)}\n".encode())
        for blocks, part, layout in zip(groups, self._storage.parts, self._layouts, strict=True):
            for digest, kept in blocks.items():
                data = pack(digest, part.content(kept) if isinstance(kept, int) else kept, layout)
                file.write(_SIZE.pack(len(data)))
                file.write(data)
        return sum(map(len, groups))

    def read(self, path: str | os.PathLike[str]) -> list[dict[bytes, Content]]:
        """A file's blocks by group and hash; ValueError: it is none of `write`, or of another model, or damaged."""
        with open(path, "rb") as file:
            if file.readline(len(FORMAT) + 1) != f"{FORMAT}\n".encode():
                raise ValueError("path: got a file of another kind, needs one of save()")
            try:
                header = json.loads(file.readline())
                identity = {name: header[name] for name in self._identity}
                digests = [[bytes.fromhex(digest) for digest in group] for group in header["blocks"]]
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(error) from error
            for name, value in self._identity.items():
                if identity[name] != value:
                    raise ValueError(f"path: got KV of another {name}, needs that of this model as it is")
            try:
                return [
                    {digest: unpack(_next(file, layout), digest, layout) for digest in group}
                    for group, layout in zip(digests, self._layouts, strict=True)
                ]
            except (ValueError, struct.error) as error:
                raise _damaged(error) from error


def _next(file: IO[bytes], layout: Layout) -> bytes:
    (size,) = _SIZE.unpack(file.read(_SIZE.size))
    if size > largest_size(layout):
        raise ValueError(f"a block of {size} bytes")
    return file.read(size)


def _damaged(error: Exception) -> ValueError:
    return ValueError(f"path: got a file that cannot be read ({type(error).__name__}: {error}), needs one of save()")


def fingerprint(model: Any) -> str:
    """A hash of a model's classes, config, settings, hooks by name, dtypes, weights and buffers, in hexadecimal."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NAMES}
    digest = hashlib.sha256(type(model).__name__.encode())
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for line in _settings(model):
        digest.update(line.encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _settings(model: Any) -> Iterator[str]:
    """Classes, numbers and hooks of modules, without the hooks that transformers puts on a module that runs."""
    for name, module in model.named_modules():
        yield f"{name} {type(module).__module__} {type(module).__qualname__}"
        for hooks in _HOOKS:
            named = [
                f"{getattr(h, '__module__', '')} {getattr(h, '__qualname__', '')}" for h in vars(module)[hooks].values()
            ]
            yield f"{hooks} {[hook for hook in named if not hook.startswith('transformers.')]}"
        if "forward" in vars(module):
            yield f"forward {getattr(vars(module)['forward'], '__qualname__', '')}"
        if not changes_itself(module):
            simple = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
            kept = {k: v for k, v in simple.items() if not k.startswith("_") and k != "training"}
            yield repr(sorted(kept.items()))
