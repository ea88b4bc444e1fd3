"""Remembers the hashes of prompts seen before, so that a shared prefix is compared, not hashed again."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

OVERHEAD = 800
"""Bytes of a node besides its tokens and digests: objects, dictionary entries and the state of a hasher."""


class Node:
    """A chunk of blocks behind a certain prefix, known to its tree from then on; without a parent a start of chains.

    Attributes:
        key: The bytes of its tokens; of a root those of the keys.
        begin: Blocks of the sequence before it.
        end: Blocks of the sequence up to its own end.
        reach: Blocks of the sequence up to the end of a chunk behind it.
        digests: The hashes of its blocks, joined.
        hasher: State behind the chunk; to be copied, never fed.
        children: The chunks seen behind it, by their bytes.
        latest: The child taken last: mostly the next one asked for, and cheaper to compare than to look up.
        found: The blocks in which its hashes were found last, as an index, None for nowhere: a guess, to be checked.
            Where all blocks up to its end are neighbours, a slice of them all.
        taken: The blocks that a request took for it since, None for no guess: most are never asked for.
        used: Whether a walk came by since the node was last up for removal.
    """

    __slots__ = (
        "begin",
        "children",
        "digests",
        "end",
        "found",
        "hasher",
        "key",
        "latest",
        "parent",
        "reach",
        "taken",
        "used",
    )

    def __init__(self, tree: HashTree, parent: Node | None, key: bytes, end: int, digests: bytes, hasher: Any) -> None:
        self.parent = parent
        self.key = key
        self.begin: int = parent.end if parent is not None else 0
        self.end: int = end
        # Chunks are short where prompts branch, long where they run on.
        self.reach = end + (16 if end < 64 else 64 if end < 256 else 128 if end < 1024 else 256)
        self.digests = digests
        self.hasher = hasher
        self.children: dict[bytes, Node] = {}
        self.latest: Node | None = None
        self.found: slice | npt.NDArray[np.intp] | None = None
        self.taken: npt.NDArray[np.int32] | None = None
        self.used = True
        if parent is not None:
            if parent.parent is None and parent.key not in tree.roots:
                tree.add_root(parent)
            parent.children[key] = parent.latest = self
            tree.queue.append(self)
            tree.nbytes += len(key) + len(digests) + OVERHEAD


class HashTree:
    """A tree of chunks, compared by content: it changes how fast a hash is found, never which.

    Attributes:
        capacity: Bytes to hold at most. Chunks that no walk used for a while go first, a chunk never before those
            behind it.
        nbytes: Bytes held.
        queue: All chunks and roots, those to be looked at for removal first.
        roots: The starts of chains, by the bytes of their keys. One is listed with the first chunk behind it, so
            that prompts too short for a chunk leave nothing.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.clear()

    def add_root(self, root: Node) -> None:
        """Remembers the start of chains."""
        self.roots[root.key] = root
        self.queue.append(root)
        self.nbytes += len(root.key) + OVERHEAD

    def trim(self) -> None:
        """Forgets what exceeds the capacity. Not to be called in the middle of a walk."""
        queue = self.queue
        while self.nbytes > self.capacity and queue:
            node = queue.popleft()
            if node.used or node.children:
                node.used = False
                queue.append(node)
                continue
            self.nbytes -= len(node.key) + len(node.digests) + OVERHEAD
            parent = node.parent
            if parent is None:
                self.roots.pop(node.key, None)
                continue
            del parent.children[node.key]
            if parent.latest is node:
                parent.latest = None

    def clear(self) -> None:
        """Forgets everything."""
        self.queue: deque[Node] = deque()
        self.roots: dict[bytes, Node] = {}
        self.nbytes = 0
