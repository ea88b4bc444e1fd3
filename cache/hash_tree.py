"""Remembers the hashes of prompts seen before, so that a shared prefix is compared, not hashed again."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

OVERHEAD = 800
"""Bytes of a node besides its tokens and digests: objects, dictionary entries and the state of a hasher."""


class Node:
    """A chunk of blocks behind a certain prefix.

    Attributes:
        key: The bytes of its tokens; of a root those of the keys.
        size: Blocks.
        digests: The hashes of its blocks, joined.
        hasher: State behind the chunk; to be copied, never fed.
        children: The chunks seen behind it, by their bytes.
        latest: The child taken last: mostly the next one asked for, and cheaper to compare than to look up.
        found: The blocks in which its hashes were found last, as an index, None for nowhere: a guess, to be checked.
        used: Whether a walk came by since the node was last up for removal.
    """

    __slots__ = ("children", "digests", "found", "hasher", "key", "latest", "parent", "size", "used")

    def __init__(self, parent: Node | None, key: bytes, size: int, digests: bytes, hasher: Any) -> None:
        self.parent = parent
        self.key = key
        self.size = size
        self.digests = digests
        self.hasher = hasher
        self.children: dict[bytes, Node] = {}
        self.latest: Node | None = None
        self.found: slice | npt.NDArray[np.intp] | None = None
        self.used = True


class HashTree:
    """A tree of chunks, compared by content: it changes how fast a hash is found, never which.

    Attributes:
        capacity: Bytes to hold at most. Chunks that no walk used for a while go first, a chunk never before those
            behind it.
        nbytes: Bytes held.
        roots: The starts of chains, by the bytes of their keys. One is listed with the first chunk behind it, so
            that prompts too short for a chunk leave nothing.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.clear()

    def add(self, parent: Node, key: bytes, size: int, digests: bytes, hasher: Any) -> Node:
        """Remembers a chunk behind `parent`."""
        if parent.parent is None and parent.key not in self.roots:
            self.roots[parent.key] = parent
            self._queue.append(parent)
            self.nbytes += len(parent.key) + OVERHEAD
        node = Node(parent, key, size, digests, hasher)
        parent.children[key] = parent.latest = node
        self._queue.append(node)
        self.nbytes += len(key) + len(digests) + OVERHEAD
        return node

    def trim(self) -> None:
        """Forgets what exceeds the capacity. Not to be called in the middle of a walk."""
        queue = self._queue
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
        self._queue: deque[Node] = deque()
        self.roots: dict[bytes, Node] = {}
        self.nbytes = 0
