"""Blocks that were evicted to host memory or to disk, and are brought back for a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..store import Store
from ..uninterrupted import uninterrupted
from .prompts import Prompt
from .storage import Content

if TYPE_CHECKING:
    from .rows import Rows


def bring_back(rows: Rows, prompt: Prompt, cached: int) -> int:
    """Brings the blocks behind those that a prompt has back from host memory.

    Args:
        rows: Of the call.
        prompt: Admitted to them.
        cached: Tokens that it has cached.

    Returns:
        How many are cached by then.
    """
    store, size, first = rows.store, rows.store.block_size, prompt.written
    digests = store.manager.block_hashes(prompt.request_id)
    found: list[list[Content]] = []
    for digest in digests[first:]:
        contents = [store.host.get(group, digest) for group, _ in store.storage.kv]
        if any(content is None for content in contents):
            break
        found.append(contents)
    states: Content | None = None
    while store.states is not None and found:
        end = (first + len(found)) * size
        if end <= len(prompt.tokens) - 2 and prompt.readable(end) == end:
            states = _kept_states(store, digests[first + len(found) - 1])
        if states is not None:
            break
        found.pop()
    step = store.storage.chunk or len(found)
    for at in range(0, len(found), max(step, 1)):
        chunk = found[at : at + step]
        if not rows.hold(prompt, prompt.tokens, (prompt.written + len(chunk)) * size):
            return cached if states is not None else prompt.written * size
        for block, contents in enumerate(chunk, prompt.written):
            for (group, part), content in zip(store.storage.kv, contents, strict=True):
                part.put(int(prompt.tables[group][block]), content)
        prompt.written, prompt.borrowed = prompt.written + len(chunk), None
        if states is not None and at + step >= len(found):
            prompt.states = store.states.of(states)
            rows.keep_states(prompt, prompt.written * size, prompt.states)
        uninterrupted(store.manager.commit, prompt.request_id, prompt.written * size)
        prompt.tables = rows.tables(prompt.request_id)
    return min(prompt.written * size, len(prompt.tokens) - 1) if found else cached


def _kept_states(store: Store, digest: bytes) -> Content | None:
    """The states behind a block from host memory, or from a block that nobody has overwritten meanwhile."""
    group = store.storage.state_group
    pool = store.manager.pools[group]
    block = int(pool.table.find(np.frombuffer(digest, np.uint64)[None])[0])
    if block >= 0:
        taken = pool.taken_at[block]
        content: Content = store.storage.content(group, block)
        if pool.taken_at[block] == taken and pool.table.lists(block):
            return content
    kept: Content | None = store.host.get(group, digest)
    return kept
