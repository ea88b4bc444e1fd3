"""Blocks in a file: written with a fingerprint of the model, and read by no other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..store import Store
from .fingerprint import fingerprint
from .host import findable
from .storage import Content

FORMAT = 2


def save(model: Any, store: Store, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
    """Writes all blocks that can be found, states too; the file is there whole or not at all, and yours alone to read.

    Returns:
        How many blocks it has.
    """
    groups: list[dict[str, Content]] = []
    for group in range(len(store.manager.pools)):
        kept = [] if store.host is None else store.host.items(group)
        blocks = {digest.hex(): content for digest, content in kept}
        for digest, block in findable(store.manager, group):
            blocks[digest.hex()] = store.storage.content(group, block)
        groups.append(blocks)
    content = {"format": FORMAT, **_identity(model, store, adapters), "blocks": groups}
    target = Path(path)
    handle, partial = tempfile.mkstemp(dir=target.absolute().parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return sum(map(len, groups))


def load(
    model: Any, store: Store, adapters: tuple[str, ...], path: str | os.PathLike[str]
) -> list[dict[bytes, Content]]:
    """Reads a file's blocks, by hash, group by group.

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
    return [{bytes.fromhex(digest): block for digest, block in blocks.items()} for blocks in content["blocks"]]


def _layout(store: Store) -> list[Any]:
    groups, parts = store.manager.groups, store.storage.parts
    return [(type(group).__name__, part.shapes) for group, part in zip(groups, parts, strict=True)]


def _identity(model: Any, store: Store, adapters: tuple[str, ...]) -> dict[str, Any]:
    return {
        "block_size": store.block_size,
        "hash": f"{store.manager.hash_algorithm} {store.manager.seed}",
        "adapter": " ".join(adapters),
        "model": fingerprint(model),
        "layout": repr(_layout(store)),
    }
