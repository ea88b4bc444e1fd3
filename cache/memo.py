"""Remembers the hashes of prompts seen before, so that a shared prefix is compared, not hashed again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

OVERHEAD = 800
"""Bytes of a node besides its tokens and digests: objects, dictionary entries and the state of a hasher."""


class Node:
    """A chunk of blocks behind a certain prefix.

    Attributes:
        key: The bytes of its tokens.
        digests: The hashes of its blocks, joined.
        hasher: State behind the chunk; to be copied, never fed.
        children: The chunks seen behind it, by their bytes.
        latest: The child taken last: mostly the next one asked for, and cheaper to compare than to look up.
    """

    __slots__ = ("children", "digests", "hasher", "key", "latest", "parent")

    def __init__(self, parent: Node | None, key: bytes, digests: bytes, hasher: Any) -> None:
        self.parent = parent
        self.key = key
        self.digests = digests
        self.hasher = hasher
        self.children: dict[bytes, Node] = {}
        self.latest: Node | None = None

    def child(self, key: bytes) -> Node | None:
        """The chunk with these very tokens, if it is known."""
        latest = self.latest
        if latest is not None and latest.key == key:
            return latest
        found = self.children.get(key)
        if found is not None:
            self.latest = found
        return found


class HashMemo:
    """A tree of chunks, compared by content: it changes how fast a hash is found, never which.

    Args:
        capacity: Bytes to hold at most; the chunks not used for longest are forgotten, deepest first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._roots = Node(None, b"", b"", None)
        self.nbytes = 0

    def root(self, header: bytes) -> Node | None:
        """The node of all chains that begin with these bytes, if it is known."""
        return self._roots.child(header)

    def add_root(self, header: bytes, hasher: Any) -> Node:
        """Remembers the start of a chain."""
        return self.add(self._roots, header, b"", hasher)

    def add(self, parent: Node, key: bytes, digests: bytes, hasher: Any) -> Node:
        """Remembers a chunk behind `parent`."""
        node = Node(parent, key, digests, hasher)
        parent.children[key] = parent.latest = node
        self._order[node] = None
        self.nbytes += len(key) + len(digests) + OVERHEAD
        return node

    def touch(self, path: list[Node]) -> None:
        """Marks the chunks of a walk from the root as used, and forgets old ones."""
        move = self._order.move_to_end
        for node in reversed(path):
            move(node)
        while self.nbytes > self._capacity:
            node, _ = self._order.popitem(last=False)
            self.nbytes -= len(node.key) + len(node.digests) + OVERHEAD
            parent = node.parent
            if parent is not None:
                parent.children.pop(node.key, None)
                if parent.latest is node:
                    parent.latest = None

    def clear(self) -> None:
        """Forgets everything."""
        self._order.clear()
        self._roots = Node(None, b"", b"", None)
        self.nbytes = 0
