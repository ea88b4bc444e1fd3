"""Identity of a block: a running hash over everything that decides its KV.

The byte string that is hashed, all integers little-endian:

    root = b"pc.block.1" | u8 len(algorithm) | algorithm | u32 block_size | key(seed) | key(salt) | u32 n | key ...
    hash(block i) = digest(root | tokens of block 0 | ... | tokens of block i), a token being a u32

The chain is one hasher that is fed block by block and asked for its digest after each, so a block costs its own
tokens only. Where a `KeyAt` has its position in block i, the chain starts anew there, from the digest it had:

    root' = b"pc.extra.1" | hash(block i - 1), or digest(root) for i = 0 | u32 n | (u64 position | key) ...
    hash(block i + k) = digest(root' | tokens of block i | ... | tokens of block i + k)

with the n keys of that block by position, then by their bytes. `pc.cache.keys` says what key(...) is. A request with
moved KV has such a record with the key b"m", which is no key's, at the start of the first block that has some: its
blocks from there on are approximate, and no other request has their hashes. Nothing depends on the process or the
machine. Every record carries its length, so two different inputs never give the same bytes.

sha256 and blake2b (32 bytes) are collision resistant: with 2**40 blocks the chance of any two sharing a hash is below
2**-176, and no input that makes it happen is known, so equal hashes are taken for equal blocks. xxh3_128 is not
cryptographic: 2**40 random blocks collide with a chance below 2**-48, but a tenant who chooses tokens on purpose may
construct a collision. Use it where all tenants trust each other, or give each its own secret salt.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .keys import NO_KEYS, EncodedKeys, encode_key

Words = npt.NDArray[np.uint64]
"""Digests of a run of blocks as `[blocks, words]`."""

BIG_ENDIAN = sys.byteorder == "big"

TokenIds = Sequence[int] | npt.NDArray[Any]

OVERHEAD = 800
"""Bytes of a node besides its tokens and digests: objects, dictionary entries and the state of a hasher."""


def split_digests(digests: Words) -> list[bytes]:
    """The digests of a run of blocks, one by one."""
    raw, width = digests.tobytes(), 8 * digests.shape[1]
    return [raw[i : i + width] for i in range(0, len(raw), width)]


class Hasher(Protocol):
    """What the chain needs of a hash object; those of hashlib and xxhash have it."""

    def update(self, data: Any, /) -> None: ...  # noqa: D102
    def digest(self) -> bytes: ...  # noqa: D102
    def copy(self) -> Any: ...  # noqa: D102


def _xxh3_128() -> Hasher:
    try:
        import xxhash
    except ImportError:
        raise ImportError("hash_algorithm 'xxh3_128' needs xxhash: pip install xxhash") from None
    hasher: Hasher = xxhash.xxh3_128()
    return hasher


ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "sha256": hashlib.sha256,
    "blake2b": lambda: hashlib.blake2b(digest_size=32),
    "xxh3_128": _xxh3_128,
}
"""Name to constructor. Digests are a multiple of 8 bytes."""


def encode_tokens(token_ids: TokenIds, name: str = "token_ids") -> array[int]:
    """Token ids as an `array('I')`; TypeError unless they are a flat sequence of integers, ValueError out of range."""
    if isinstance(token_ids, (list, tuple)):  # a union would be built at every call
        try:
            if isinstance(token_ids, tuple):
                return array("I", token_ids)
            # Takes 0.7 of the time of the constructor, which asks for an iterator.
            tokens = array("I")
            tokens.fromlist(token_ids)
            return tokens
        except OverflowError:
            worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise ValueError(f"{name}: got the token id {worst}, needs 0 to 2**32 - 1") from None
        except TypeError:
            odd = next((t for t in token_ids if not isinstance(t, int)), None)
            raise TypeError(f"{name}: got an element of type {type(odd).__name__}, needs integers") from None
    values = np.asarray(token_ids)
    if isinstance(token_ids, (str, bytes, bytearray)) or (values.ndim == 0 and values is not token_ids):
        raise TypeError(f"{name}: got {type(token_ids).__name__}, needs a sequence of integers")
    if values.ndim != 1:
        raise TypeError(f"{name}: got shape {list(values.shape)}, needs [num_tokens]")
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"{name}: got dtype {values.dtype}, needs integers")
    if values.size and (int(values.min()) < 0 or int(values.max()) >= 1 << 32):
        worst = values.min() if values.min() < 0 else values.max()
        raise ValueError(f"{name}: got the token id {worst}, needs 0 to 2**32 - 1")
    tokens = array("I")
    tokens.frombytes(np.ascontiguousarray(values, dtype=np.uint32).view(np.uint8).data)
    return tokens


class Node:
    """A chunk of blocks behind a certain prefix, known to its tree from then on; without a parent a start of chains.

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

    def __init__(self, tree: HashTree, parent: Node | None, key: bytes, end: int, digests: bytes, hasher: Any) -> None:
        self.parent, self.key, self.digests, self.hasher = parent, key, digests, hasher
        self.begin: int = parent.end if parent is not None else 0
        self.end: int = end
        # Chunks are short where prompts branch, long where they run on.
        self.reach = end + (16 if end < 64 else 64 if end < 256 else 128 if end < 1024 else 256)
        self.children: dict[bytes, Node] = {}
        self.latest: Node | None = None
        self.found: slice | npt.NDArray[np.intp] | None = None
        self.taken: npt.NDArray[np.int32] | None = None
        self.used = True
        if parent is not None:
            if parent.parent is None and parent.key not in tree.roots:
                tree.nbytes += len(parent.key) + OVERHEAD
                tree.queue.append(parent)
                tree.roots[parent.key] = parent
            # Queued first: what an interrupt leaves out of the children is forgotten like any other.
            tree.nbytes += len(key) + len(digests) + OVERHEAD
            tree.queue.append(self)
            parent.children[key] = parent.latest = self


class HashTree:
    """A tree of chunks, compared by content: it changes how fast a hash is found, never which.

    It holds `capacity` bytes at most: chunks that no walk used for a while go first, a chunk never before those behind
    it. `queue` has all chunks and roots, those to be looked at for removal first; `roots` the starts of chains, by the
    bytes of their keys. One is listed with the first chunk behind it: prompts too short for a chunk leave nothing.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.clear()

    def trim(self) -> None:
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


class BlockHasher:
    """Hashes the complete blocks of sequences under one algorithm of `ALGORITHMS`, block size (in tokens) and seed.

    Without a seed all processes share the identity. `words` are the 64-bit words of an identity, for a caller that
    brings identities of its own; None: the algorithm's. `pieces` iterates over the bytes of tokens block by block, each
    in a tuple of its own. Not to be used by two threads at once.
    """

    def __init__(self, algorithm: str, block_size: int, seed: int | None = None, words: int | None = None) -> None:
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise ValueError(f"hash_algorithm: got {algorithm!r}, needs one of {', '.join(ALGORITHMS)}")
        self.block_size = block_size
        self.new = ALGORITHMS[algorithm]
        name = algorithm.encode()
        prefix = b"pc.block.1" + bytes([len(name)]) + name + struct.pack("<I", block_size) + encode_key(seed, "seed")
        self.start = self.new()
        self.start.update(prefix)
        self.tree = HashTree()
        self.pieces = struct.Struct(f"{4 * block_size}s").iter_unpack
        size = len(self.new().digest())
        if size % 8:
            raise ValueError(f"hash_algorithm: {algorithm!r} gives {size} bytes, needs a multiple of 8")
        self.words = words or size // 8

    def hash_blocks(self, tokens: array[int], keys: EncodedKeys = NO_KEYS) -> Words:
        """The digests of all complete blocks of a sequence, `[blocks, words]`."""
        return Chain(self, keys).extend(tokens, len(tokens) // self.block_size)


class _Ended:
    """A hasher of which only the digest is left."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def update(self, data: Any, /) -> None:
        raise AssertionError("it has ended")

    def digest(self) -> bytes:
        return self._digest

    def copy(self) -> Any:
        return self


class Chain:
    """The running hash of one sequence: feed it whole blocks in order, it gives their digests.

    `hashed` counts the blocks so far; `path` has the remembered chunks that the sequence begins with.
    """

    __slots__ = ("_hasher", "_owner", "_placed", "_root", "hashed", "path")

    def __init__(self, owner: BlockHasher, keys: EncodedKeys = NO_KEYS) -> None:
        self._owner = owner
        root = owner.tree.roots.get(keys.header)
        if root is None:
            hasher = owner.start.copy()
            hasher.update(keys.header)
            root = Node(owner.tree, None, keys.header, 0, b"", hasher)
        root.used = True
        self._root = root
        self._hasher: Hasher = root.hasher
        self._placed = keys.placed
        self.hashed = 0
        self.path: list[Node] = []

    @property
    def root(self) -> bytes | None:
        """What stands for the empty prefix of this sequence, None with keys placed inside it."""
        return None if self._placed else self._root.hasher.digest()

    @classmethod
    def behind(cls, owner: BlockHasher, keys: EncodedKeys, digests: Words, block: int) -> Chain:
        """A chain that goes on behind `block` blocks of these digests where it starts anew: `keys` has a key there."""
        chain = cls(owner, keys)
        if block:
            chain._hasher, chain.hashed = _Ended(digests[block - 1].tobytes()), block
        return chain

    def copy(self) -> Chain:
        """A chain that continues from here on its own."""
        other = object.__new__(Chain)
        other._owner, other._root, other._placed = self._owner, self._root, self._placed
        other._hasher = self._hasher.copy()
        other.hashed, other.path = self.hashed, []
        return other

    def extend(self, tokens: array[int], end: int) -> Words:
        """The digests of blocks `hashed` to `end`, `[end - hashed, words]`, of a sequence given from its start."""
        start, owner = self.hashed, self._owner
        size, words = owner.block_size, owner.words
        if end <= start:
            return np.empty((0, words), np.uint64)
        span = tokens if start == 0 and end * size == len(tokens) else tokens[start * size : end * size]
        if BIG_ENDIAN:
            span = array("I", span)
            span.byteswap()
        data = span.tobytes()
        if self._placed:
            digests = self._pass_keys(data, start, end)
        elif start:
            digests = self._feed(data)
        else:
            digests = self._recall(data, end)
        found: Words = np.ndarray((end - start, words), np.uint64, digests)
        return found

    def _pass_keys(self, data: bytes, start: int, end: int) -> bytes:
        """Hashes blocks [start, end), whose tokens are `data`, anew from every block that holds placed keys."""
        size = self._owner.block_size
        width, at, restarted = 4 * size, start, False
        digests = []
        for stop in [*sorted({p // size for p, _ in self._placed if start <= p // size < end}), end]:
            piece = data[(at - start) * width : (stop - start) * width]
            digests.append(self._feed(piece) if at or restarted else self._recall(piece, stop))
            if stop < end:
                self._restart(stop)
                restarted = True
            at = stop
        return b"".join(digests)

    def _recall(self, data: bytes, end: int) -> bytes:
        """Hashes blocks [0, end), as far as whole chunks reach with remembered hashes where there are any."""
        owner = self._owner
        width, node, path = 4 * owner.block_size, self._root, self.path
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
        self._hasher, self.hashed = node.hasher.copy(), node.end
        if node.end < end:
            while (reach := node.reach) <= end:
                key = data[at : reach * width]
                hashes = self._feed(key)
                node, at = Node(owner.tree, node, key, reach, hashes, self._hasher.copy()), reach * width
                path.append(node)
                digests.append(hashes)
            if node.end < end:
                digests.append(self._feed(data[at:]))
            if owner.tree.nbytes > owner.tree.capacity:
                owner.tree.trim()
        return b"".join(digests)

    def _restart(self, block: int) -> None:
        """Starts the chain anew before a block that holds placed keys."""
        here = [(p, k) for p, k in self._placed if p // self._owner.block_size == block]
        records = b"".join(struct.pack("<Q", p) + k for p, k in here)
        last = self._hasher.digest()
        self._hasher = self._owner.new()
        self._hasher.update(b"pc.extra.1" + last + struct.pack("<I", len(here)) + records)

    def _feed(self, data: bytes) -> bytes:
        """Hashes the next blocks, whose tokens are `data`."""
        update, digest = self._hasher.update, self._hasher.digest
        digests: list[bytes] = []
        append = digests.append
        for (piece,) in self._owner.pieces(data):
            update(piece)
            append(digest())
        self.hashed += len(digests)
        return b"".join(digests)
