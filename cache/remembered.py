"""Hashes of prompts seen before, and the blocks they were found in: a prompt that begins alike is not hashed again.

Delete it and all is right, only slower: `BlockHasher.begin` then feeds every block to the hash, and
`HashTable.leading` looks every hash up. What is remembered is compared by content, and guesses of blocks are compared
with the hashes of those blocks, so it changes how fast something is found, never what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .hashing import Chain, Words
from .pool import EMPTY, BlockPool, Index
from .table import Ids

OVERHEAD = 800
"""Bytes of a node besides its tokens and digests: objects, dictionary entries and the state of a hasher."""
BLOCK_BYTES = 256
"""What the bookkeeping of a block may take; remembered hashes get what the rest leaves."""
BASE_BYTES = 1 << 20
"""What it may take whatever the number of blocks: ghosts and tables of a policy."""
QUEUE_BYTES = 16
"""Of that, what policies may come to need until hashes are fitted again."""


class Node:
    """A chunk of blocks behind a certain prefix, known from then on; without a parent a start of chains.

    Attributes:
        key: The bytes of its tokens; of a root those of the keys.
        begin: Blocks of the sequence before it; `end`: up to its own end; `reach`: up to that of a chunk behind it.
        hasher: State behind the chunk; to be copied, never fed.
        children: The chunks seen behind it, by their bytes.
        latest: The child taken last: mostly the next one asked for, and cheaper to compare than to look up.
        found: The blocks in which its hashes were found last, as an index, None for nowhere: a guess, to be checked.
            Where all blocks up to its end are neighbours, a slice of them all.
        taken: The blocks that a request took for it since, None for no guess: most are never asked for.
        used: Whether a walk came by since the node was last up for removal.
    """

    __slots__ = (
        *("begin", "children", "digests", "end", "found", "hasher"),
        *("key", "latest", "parent", "reach", "taken", "used"),
    )

    def __init__(self, parent: Node | None, key: bytes, end: int, digests: bytes, hasher: Any) -> None:
        self.parent, self.key, self.digests, self.hasher = parent, key, digests, hasher
        self.begin: int = parent.end if parent is not None else 0
        self.end: int = end
        # Chunks are short where prompts branch, long where they run on.
        self.reach = end + (16 if end < 64 else 64 if end < 256 else 128 if end < 1024 else 256)
        self.children: dict[bytes, Node] = {}
        self.latest: Node | None = None
        self.found: Index | None = None
        self.taken: npt.NDArray[np.int32] | None = None
        self.used = True


class RememberedHashes:
    """A tree of chunks, compared by content.

    It holds `capacity` bytes at most: chunks that no walk used for a while go first, a chunk never before those behind
    it. `queue` has all chunks and roots, those to be looked at for removal first; `roots` the starts of chains, by the
    bytes of their keys. One is listed with the first chunk behind it: prompts too short for a chunk leave nothing.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.clear()

    def fit(self, num_blocks: int, taken: int) -> None:
        """Leaves to it what pools and policies, which take so many bytes, leave of those for so many blocks."""
        self.capacity = max(BASE_BYTES + (BLOCK_BYTES - QUEUE_BYTES) * num_blocks - taken, 0)

    def begin(self, chain: Chain, data: bytes, end: int) -> bytes:
        """See `BlockHasher.begin`; leaves the chunks that the sequence begins with in `chain.path`."""
        node, path, width = self.roots.get(chain.header), chain.path, len(data) // max(end, 1)
        if node is None:
            node = Node(None, chain.header, 0, b"", chain.start)
        node.used = True
        at, digests = 0, []
        while (reach := node.reach) <= end:
            child = node.latest
            # Comparing in place spares the copy that a slice is, and its hash.
            if child is None or not data.startswith(child.key, at):
                key = data[at : reach * width]
                child = node.children.get(key)
                if child is None:
                    break
                node.latest = child
            child.used = True
            path.append(child)
            digests.append(child.digests)
            node, at = child, reach * width
        chain.hasher, chain.hashed = node.hasher.copy(), node.end
        if node.end < end:
            while (reach := node.reach) <= end:
                key = data[at : reach * width]
                hashes = chain.feed(key)
                if node.parent is None and node.key not in self.roots:
                    self.nbytes += len(node.key) + OVERHEAD
                    self.queue.append(node)
                    self.roots[node.key] = node
                child = Node(node, key, reach, hashes, chain.hasher.copy())
                # Queued first: what an interrupt leaves out of the children is forgotten like any other.
                self.nbytes += len(key) + len(hashes) + OVERHEAD
                self.queue.append(child)
                node.children[key] = node.latest = child
                path.append(child)
                digests.append(hashes)
                node, at = child, reach * width
            if node.end < end:
                digests.append(chain.feed(data[at:]))
            if self.nbytes > self.capacity:
                self._trim()
        return b"".join(digests)

    def _trim(self) -> None:
        """Forgets what exceeds the capacity. Not to be called in the middle of a walk."""
        queue = self.queue
        while self.nbytes > self.capacity and queue:
            node = queue[0]
            if node.used or node.children:
                node.used = False
                queue.rotate(-1)
                continue
            parent = node.parent
            if parent is None:
                if self.roots.get(node.key) is node:
                    del self.roots[node.key]
            else:
                if parent.latest is node:
                    parent.latest = None
                if parent.children.get(node.key) is node:
                    del parent.children[node.key]
            queue.popleft()  # last: what an interrupt leaves here is removed the next time
            self.nbytes -= len(node.key) + len(node.digests) + OVERHEAD

    def clear(self) -> None:
        """Forgets everything."""
        self.queue: deque[Node] = deque()
        self.roots: dict[bytes, Node] = {}
        self.nbytes = 0

    def leading(self, pool: BlockPool, digests: Words, path: Sequence[Node]) -> Ids:
        """What `HashTable.leading` gives for all hashes of a sequence; looks first where `path` was last found."""
        words, at, guessed = pool.words, 0, False
        parts: list[Index] = []
        for node in reversed(path):
            found = node.found
            if found is None:
                if node.taken is None:
                    parts.clear()
                    continue
                node.found = found = pool.index_of(node.taken)
                node.taken, guessed = None, True
            end, first = node.end, node.begin
            if type(found) is slice:
                if found.stop - found.start == end:
                    first = 0
                # The last block first: blocks are evicted from the tail, and the whole may be long.
                same = words.item(found.stop - 1, 0) == digests.item(end - 1, 0)
                same = same and words[found].tobytes() == digests[first:end].tobytes()
            else:
                same = words.take(found, axis=0).tobytes() == node.digests
            if not same:
                node.found = None
                parts.clear()
                continue
            if not parts:
                at = end
            parts.append(found)
            if not first:
                break
        if not parts:
            at, held = 0, EMPTY
        elif len(parts) == 1 and type(parts[0]) is slice:
            held = pool.numbers[parts[0]]
        else:
            held = np.concatenate([pool.numbers[index] for index in reversed(parts)])
        if at < len(digests):
            more = pool.table.leading(digests, at)
            if more.size:
                held, guessed = np.concatenate((held, more)) if at else more, True
        if guessed and held.size:  # a guess may have been evicted whole
            _note_found(pool, path, held)
        return held

    def note_taken(self, path: Sequence[Node], table: Ids) -> None:
        """Leaves the blocks of a request, cached or not yet, as guesses for `leading`."""
        for node in reversed(path):
            if node.found is not None:
                break
            node.taken = table[node.begin : node.end].copy()


def _note_found(pool: BlockPool, path: Sequence[Node], held: Ids) -> None:
    """Leaves the cached blocks that a sequence begins with as guesses for `RememberedHashes.leading`."""
    whole = pool.index_of(held)
    for node in path:
        if node.end > held.size:
            break
        if type(whole) is slice:
            node.found = slice(whole.start, whole.start + node.end)
        elif node.found is None:
            node.found = pool.index_of(held[node.begin : node.end])
