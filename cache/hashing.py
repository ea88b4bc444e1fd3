"""Identity of a block: a running hash over everything that decides its KV.

The byte string that is hashed, all integers little-endian:

    root = b"pc.block.1" | u8 len(algorithm) | algorithm | u32 block_size | key(seed) | key(salt) | u32 n | key ...
    hash(block i) = digest(root | tokens of block 0 | ... | tokens of block i), a token being a u32

The chain is one hasher that is fed block by block and asked for its digest after each, so a block costs its own
tokens only. A `KeyAt` whose position lies in block i starts the chain anew there:

    root' = b"pc.extra.1" | hash(block i - 1), empty for i = 0 after root | u32 n | (u64 position | key) ...
    hash(block i + k) = digest(root | root' | tokens of block i | ... | tokens of block i + k)

key(None) = b"n", key(str) = b"s" | u64 length | UTF-8, key(bytes) = b"b" | u64 length | bytes,
key(int) = b"i" | u64 length | ASCII decimal, key(tuple or list) = b"t" | u64 count | keys. Nothing depends on the
process or the machine. Every record carries its length, so two different inputs never give the same bytes.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .hash_tree import HashTree, Node

Words = npt.NDArray[np.uint64]
"""Digests of a run of blocks as `[blocks, words]`."""

TokenIds = Sequence[int] | npt.NDArray[Any]
Key = Any
"""None, str, bytes, int, or a tuple or list of those."""


class Hasher(Protocol):
    """What the chain needs of a hash object; those of hashlib and xxhash have it."""

    def update(self, data: Any, /) -> None:
        """Feeds bytes."""

    def digest(self) -> bytes:
        """The hash of what was fed so far."""

    def copy(self) -> Any:
        """A hasher that continues from here on its own."""


@dataclass(frozen=True)
class KeyAt:
    """An extra key that takes effect at a token position, such as the content hash of an image.

    Blocks that end at or before `position` are shared with requests that lack the key; the block that holds it and
    all later ones are not.
    """

    position: int
    key: Key


def _xxh3_128() -> Hasher:
    try:
        import xxhash
    except ImportError:
        raise ImportError("hash_algorithm 'xxh3_128' needs xxhash: pip install 'pc-kernels[xxhash]'") from None
    hasher: Hasher = xxhash.xxh3_128()
    return hasher


ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "sha256": hashlib.sha256,
    "blake2b": lambda: hashlib.blake2b(digest_size=32),
    "xxh3_128": _xxh3_128,
}
"""Name to constructor. Digests are a multiple of 8 bytes."""


Placed = tuple[tuple[int, bytes], ...]
"""Encoded keys with their positions, ascending."""

_NO_KEYS: tuple[bytes, Placed] = (b"n" + struct.pack("<I", 0), ())


def encode_key(key: Key, name: str = "extra_keys") -> bytes:
    """The bytes of a key, injective over all keys; see the module's docstring.

    Raises:
        TypeError: A key that is none of None, str, bytes, int, tuple and list.
    """
    if key is None:
        return b"n"
    if isinstance(key, str):
        tag, body = b"s", key.encode()
    elif isinstance(key, bytes):
        tag, body = b"b", key
    elif isinstance(key, int) and not isinstance(key, bool):
        tag, body = b"i", str(key).encode()
    elif isinstance(key, (tuple, list)):
        return b"t" + struct.pack("<Q", len(key)) + b"".join(encode_key(item, name) for item in key)
    else:
        raise TypeError(f"{name}: got {type(key).__name__}, needs str, bytes, int, None, or a tuple of those")
    return tag + struct.pack("<Q", len(body)) + body


def encode_tokens(token_ids: TokenIds, name: str = "token_ids") -> array[int]:
    """Token ids as an `array('I')`.

    Raises:
        TypeError: Not a flat sequence of integers.
        ValueError: An id below 0 or past 2**32 - 1.
    """
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
    if isinstance(token_ids, (str, bytes)):
        raise TypeError(f"{name}: got {type(token_ids).__name__}, needs a sequence of integers")
    values = np.asarray(token_ids)
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


class BlockHasher:
    """Hashes the complete blocks of sequences under one algorithm, block size and seed.

    Args:
        algorithm: A name in `ALGORITHMS`.
        block_size: Tokens a block.
        seed: GroupHit of every root when given; None is the identity that all processes share.
        words: 64-bit words of an identity, where the caller brings identities of its own; None: of the algorithm.

    Not to be used by two threads at once.
    """

    def __init__(self, algorithm: str, block_size: int, seed: int | None = None, words: int | None = None) -> None:
        if algorithm not in ALGORITHMS:
            raise ValueError(f"hash_algorithm: got {algorithm!r}, needs one of {', '.join(ALGORITHMS)}")
        self.algorithm = algorithm
        self.block_size = block_size
        self.seed = seed
        self.new = ALGORITHMS[algorithm]
        name = algorithm.encode()
        self._root = b"pc.block.1" + bytes([len(name)]) + name + struct.pack("<I", block_size) + encode_key(seed)
        self.tree = HashTree()
        size = len(self.new().digest())
        if size % 8:
            raise ValueError(f"hash_algorithm: {algorithm!r} gives {size} bytes, needs a multiple of 8")
        self.words = words or size // 8

    def chain(self, extra_keys: Key | Iterable[Key | KeyAt] = None, salt: Key = None) -> Chain:
        """The start of a sequence's chain.

        Args:
            extra_keys: One key or several. A plain key (LoRA name) holds for the whole sequence, a `KeyAt` from its
                position on (image, prompt embeddings).
            salt: Sequences with different salts never share a block.

        Raises:
            TypeError: A key of an unsupported type.
            ValueError: A `KeyAt` with a negative position.
        """
        if extra_keys is None and salt is None:
            whole, placed = _NO_KEYS
        else:
            whole, placed = self._encode_keys(extra_keys, salt)
        root = self.tree.root(whole)
        if root is None:
            hasher = self.new()
            hasher.update(self._root + whole)
            root = self.tree.add_root(whole, hasher)
        return Chain(self, root, placed)

    def _encode_keys(self, extra_keys: Any, salt: Key) -> tuple[bytes, Placed]:
        if extra_keys is None:
            keys: list[Any] = []
        elif isinstance(extra_keys, str | bytes | int | KeyAt):
            keys = [extra_keys]
        elif isinstance(extra_keys, Iterable):
            keys = list(extra_keys)
        else:
            keys = [extra_keys]
        placed = []
        for item in keys:
            if isinstance(item, KeyAt):
                if not isinstance(item.position, int) or item.position < 0:
                    raise ValueError(f"extra_keys: got position {item.position!r}, needs an integer of at least 0")
                placed.append((item.position, encode_key(item.key)))
        plain = [encode_key(item) for item in keys if not isinstance(item, KeyAt)]
        whole = encode_key(salt, "salt") + struct.pack("<I", len(plain)) + b"".join(plain)
        return whole, tuple(sorted(placed))


class Chain:
    """The running hash of one sequence: feed it whole blocks in order, it gives their digests.

    Attributes:
        hashed: Blocks hashed so far.
        path: The remembered chunks that the sequence begins with.
    """

    __slots__ = ("_hasher", "_owner", "_placed", "_root", "hashed", "path")

    def __init__(self, owner: BlockHasher, root: Node, placed: Placed) -> None:
        self._owner = owner
        self._root = root
        self._hasher: Hasher = root.hasher
        self._placed = placed
        self.hashed = 0
        self.path: list[Node] = []

    @property
    def root(self) -> bytes | None:
        """What stands for the empty prefix of this sequence, None with keys placed inside it."""
        return None if self._placed else self._root.hasher.digest()

    def copy(self) -> Chain:
        """A chain that continues from here on its own."""
        other = Chain(self._owner, self._root, self._placed)
        other._hasher = self._hasher.copy()
        other.hashed = self.hashed
        return other

    def extend(self, tokens: array[int], end: int) -> Words:
        """Hashes blocks `hashed` to `end` of the sequence and returns their digests `[end - hashed, words]`.

        Args:
            tokens: All tokens of the sequence, at least `end * block_size` of them.
            end: Block to stop before.
        """
        start, size = self.hashed, self._owner.block_size
        if end <= start:
            return np.empty((0, self._owner.words), np.uint64)
        span = tokens if start == 0 and end * size == len(tokens) else tokens[start * size : end * size]
        if sys.byteorder == "big":
            span = array("I", span)
            span.byteswap()
        data = span.tobytes()
        digests: list[bytes] = []
        breaks = sorted({p // size for p, _ in self._placed if start <= p // size < end}) if self._placed else []
        if not start:
            self._recall(data, breaks[0] if breaks else end, digests)
        for stop in (*breaks, end):
            self._feed(data, start, stop, digests)
            if stop < end:
                self._restart(stop)
        words: Words = np.ndarray((end - start, self._owner.words), np.uint64, b"".join(digests))
        return words

    def _recall(self, data: bytes, end: int, digests: list[bytes]) -> None:
        """Goes as far as whole chunks reach, with remembered hashes where there are any."""
        width, node, tree = 4 * self._owner.block_size, self._root, self._owner.tree
        at = 0
        while (stop := at + _chunk_after(at)) <= end:
            child = node.latest
            # Comparing in place spares the copy that a slice is, and its hash.
            if child is None or not data.startswith(child.key, at * width):
                key = data[at * width : stop * width]
                child = node.children.get(key)
                if child is None:
                    self._hasher, self.hashed = node.hasher.copy(), at
                    fresh: list[bytes] = []
                    self._feed(data, 0, stop, fresh)
                    child = tree.add(node, key, stop - at, b"".join(fresh), self._hasher)
                node.latest = child
            child.used = True
            self.path.append(child)
            digests.append(child.digests)
            node, at = child, stop
        self._hasher, self.hashed = node.hasher.copy(), at
        tree.trim()

    def _restart(self, block: int) -> None:
        """Starts the chain anew before a block that holds placed keys."""
        here = [(p, k) for p, k in self._placed if p // self._owner.block_size == block]
        records = b"".join(struct.pack("<Q", p) + k for p, k in here)
        last = self._hasher.digest()
        self._hasher = self._owner.new()
        self._hasher.update(b"pc.extra.1" + last + struct.pack("<I", len(here)) + records)

    def _feed(self, data: bytes, start: int, stop: int, digests: list[bytes]) -> None:
        """Hashes blocks up to `stop`; `data` begins at block `start`."""
        width = 4 * self._owner.block_size
        update, digest, append = self._hasher.update, self._hasher.digest, digests.append
        for at in range((self.hashed - start) * width, (stop - start) * width, width):
            update(data[at : at + width])
            append(digest())
        self.hashed = stop


def _chunk_after(block: int) -> int:
    """Blocks of the chunk that begins at `block`: short where prompts branch, long where they run on."""
    return 16 if block < 64 else 64 if block < 256 else 128 if block < 1024 else 256
