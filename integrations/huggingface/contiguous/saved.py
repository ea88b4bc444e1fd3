"""Blocks in a file: written with a fingerprint of the model, and read by no other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..store import Store
from .disk import Content
from .fingerprint import fingerprint

FORMAT = 1


def save(model: Any, store: Store, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
    """Writes all blocks that can be found, and states; the file is there whole or not at all, and yours alone to read.

    Returns:
        How many blocks it has.
    """
    blocks: dict[str, Content] = {}
    if store.host is not None:
        blocks |= {digest.hex(): content for digest, content in store.host.items()}
    pool = store.manager.pools[0]
    for block in range(pool.num_blocks):
        if store.storage.layers and pool.table.lists(block):
            blocks[pool.words[block].tobytes().hex()] = store.storage.content(block)
    states = {} if store.states is None else {digest.hex(): kept for digest, kept in store.states.items()}
    content = {"format": FORMAT, **_identity(model, store, adapters), "blocks": blocks, "states": states}
    target = Path(path)
    handle, partial = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return len(blocks)


def load(model: Any, store: Store, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> dict[bytes, Content]:
    """Reads a file's blocks, by hash; states go to the store.

    Raises:
        ValueError: The file is none of `save`, or of another model, other weights, another dtype or block size.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(
            f"path: got a file that cannot be read ({type(error).__name__}), needs one of save()"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("path: got a file of another kind, needs one of save()")
    for name, value in _identity(model, store, adapters).items():
        if content.get(name) != value:
            raise ValueError(f"path: got KV of another {name}, needs that of this model as it is")
    if store.states is not None:
        for digest, kept in content["states"].items():
            store.states.put(bytes.fromhex(digest), [tuple(state) for state in kept])
    return {bytes.fromhex(digest): block for digest, block in content["blocks"].items()}


def _identity(model: Any, store: Store, adapters: tuple[str, ...]) -> dict[str, Any]:
    return {
        "block_size": store.block_size,
        "hash": f"{store.manager.hash_algorithm} {store.manager.seed}",
        "adapter": " ".join(adapters),
        "model": fingerprint(model),
    }
