"""Identity of a block: a running hash over everything that decides its KV.

The hashed byte string is, with all integers little-endian:

    root = b"pc.block.1" | u8 len(algorithm) | algorithm | u32 block_size | key(seed) | key(salt) | u32 n | key ...
    hash(block i) = digest(root | tokens of block 0 | ... | tokens of block i), a token being a u32

The chain is one hasher that takes block after block and returns its digest after each. So hashing a block costs only
its own tokens. If a `KeyAt` has its position in block i, the chain restarts at block i, from the digest so far:

    root' = b"pc.extra.1" | hash(block i - 1), or digest(root) for i = 0 | u32 n | (u64 position | key) ...
    hash(block i + k) = digest(root' | tokens of block i | ... | tokens of block i + k)

with the n keys of that block ordered by position, then by bytes. `pc.cache.keys` defines key(...). The chain
also restarts at the first block with moved KV, with the key b"m". No other key has this encoding, so no request with
exact KV has the hashes of this block and of later ones. Hashes do not depend on the process or the machine. Every
record carries its length. So two different inputs never give the same bytes.

Hashes of sha256 and blake2b have 32 bytes and are collision resistant. Among 2**40 blocks the chance that any two share
a hash is below 2**-176. No input is known that makes them collide, so blocks with equal hashes are treated as equal.
Hashes of xxh3_128 are not cryptographic. Among 2**40 random blocks, the chance of a collision is below 2**-48. But a
tenant who chooses tokens on purpose may construct a collision. Use xxh3_128 only if all tenants trust each other, or
give each tenant its own secret salt.
"""

from __future__ import annotations

import copy
import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .keys import NO_KEYS, EncodedKeys, encode_key

Words = npt.NDArray[np.uint64]
"""Digests of a run of blocks as `[blocks, words]`."""

BIG_ENDIAN = sys.byteorder == "big"

TokenIds = Sequence[int] | npt.NDArray[Any]


def split_digests(digests: Words) -> list[bytes]:
    """Return the digests of a run of blocks as a list of bytes, one for each block."""
    raw, width = digests.tobytes(), 8 * digests.shape[1]
    return [raw[i : i + width] for i in range(0, len(raw), width)]


Hasher = Any
"""A hash object of hashlib or xxhash, with `update`, `digest` and `copy`."""


def _xxh3_128() -> Hasher:
    try:
        import xxhash
    except ImportError:
        raise ImportError("hash_algorithm 'xxh3_128' needs xxhash: pip install xxhash") from None
    return xxhash.xxh3_128()


ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "sha256": hashlib.sha256,
    "blake2b": lambda: hashlib.blake2b(digest_size=32),
    "xxh3_128": _xxh3_128,
}
"""Constructors of hash objects by the algorithm's name. Digests are a multiple of 8 bytes."""


def encode_tokens(token_ids: TokenIds, name: str = "token_ids") -> array[int]:
    """Check token ids and return them as an `array('I')`, the form in which requests keep them.

    Raises:
        TypeError: They are not a flat sequence of integers.
        ValueError: A token id is out of range.
    """
    if isinstance(token_ids, (list, tuple)):  # a union type would be built in every call
        try:
            if isinstance(token_ids, tuple):
                return array("I", token_ids)
            # `fromlist` takes 0.7 of the time of the constructor, which makes an iterator.
            tokens = array("I")
            tokens.fromlist(token_ids)
            return tokens
        except OverflowError:
            worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise ValueError(f"{name}: got the token id {worst}, needs 0 to 2**32 - 1") from None
        except TypeError:
            odd = next((t for t in token_ids if not isinstance(t, (int, np.integer))), None)
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


class BlockHasher:
    """A hasher of the complete blocks of sequences, for one algorithm, block size (in tokens) and seed.

    Without a seed, all processes compute the same hashes. Two threads must not use a hasher at once.

    Attributes:
        words: Number of 64-bit words in a hash. It follows from the algorithm, unless a caller with hashes of its own
            passes another number.
        pieces: Iterates over the bytes of tokens block by block, each in a tuple.
        begin: Returns the digests of a chain's first blocks, whose tokens are given as bytes. `pc.cache.remembered`
            replaces it with a faster function.
    """

    def __init__(self, algorithm: str, block_size: int, seed: int | None = None, words: int | None = None) -> None:
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise ValueError(f"hash_algorithm: got {algorithm!r}, needs one of {', '.join(ALGORITHMS)}")
        self.block_size = block_size
        self.new = ALGORITHMS[algorithm]
        name = algorithm.encode()
        prefix = b"pc.block.1" + bytes([len(name)]) + name + struct.pack("<I", block_size) + encode_key(seed, "seed")
        self._prefix = self.new()
        self._prefix.update(prefix)
        self.plain = self.start(NO_KEYS.header)
        self.begin: Callable[[Chain, bytes, int], bytes] = feed_all
        self.pieces = struct.Struct(f"{4 * block_size}s").iter_unpack
        self.words = words or len(self.new().digest()) // 8

    def start(self, header: bytes) -> Hasher:
        """Return a hash object for the first block of sequences whose encoded keys are `header`.

        The caller must copy the object before feeding it.
        """
        hasher: Hasher = self._prefix.copy()
        hasher.update(header)
        return hasher

    def hash_blocks(self, tokens: array[int], keys: EncodedKeys = NO_KEYS) -> Words:
        """Return the digests of all complete blocks of a sequence, `[blocks, words]`."""
        return Chain(self, keys).extend(tokens, len(tokens) // self.block_size)


class Chain:
    """The running hash of one sequence. It takes whole blocks in order and returns their digests.

    Attributes:
        hashed: Number of blocks so far.
        start: The state before the first block.
    """

    __slots__ = ("_owner", "_placed", "_restarted", "hashed", "hasher", "start")

    def __init__(self, owner: BlockHasher, keys: EncodedKeys = NO_KEYS) -> None:
        self._owner, self._placed = owner, keys.placed
        # `start` is copied before the first block is fed.
        self.start = self.hasher = owner.plain if keys is NO_KEYS else owner.start(keys.header)
        self.hashed, self._restarted = 0, -1  # the last block before which the chain restarted

    @property
    def namespace(self) -> bytes | None:
        """The identity of the sequence's salt and keys: its digest before the first block.

        None if the sequence has placed keys (`KeyAt`).
        """
        return None if self._placed else self.start.digest()

    def copy(self) -> Chain:
        """Return an independent chain that continues from here."""
        other = copy.copy(self)
        other.hasher = self.hasher.copy()
        return other

    def extend(self, tokens: array[int], end: int) -> Words:
        """Return the digests of blocks `hashed` to `end`, `[end - hashed, words]`.

        `tokens` are those of the whole sequence, from its first token.
        """
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
            digests = self._hash_with_keys(data, start, end)
        elif start:
            digests = self.feed(data)
        else:
            digests = owner.begin(self, data, end)
        return np.ndarray((end - start, words), np.uint64, digests)

    def _hash_with_keys(self, data: bytes, start: int, end: int) -> bytes:
        """Hash blocks [start, end), whose tokens are `data`.

        Restart the chain at every block that holds placed keys.
        """
        size, first = self._owner.block_size, max(start, self._restarted + 1)
        width, at = 4 * size, start
        digests = []
        for stop in [*sorted({p // size for p, _ in self._placed if first <= p // size < end}), end]:
            piece = data[(at - start) * width : (stop - start) * width]
            digests.append(self.feed(piece) if at or self._restarted == 0 else self._owner.begin(self, piece, stop))
            if stop < end:
                self.restart(stop, self.hasher.digest())
            at = stop
        return b"".join(digests)

    def restart(self, block: int, before: bytes) -> None:
        """Restart the chain at a block that holds placed keys. `before` is the hash of the block before it."""
        here = [(p, k) for p, k in self._placed if p // self._owner.block_size == block]
        records = b"".join(struct.pack("<Q", p) + k for p, k in here)
        self.hasher = self._owner.new()
        self.hasher.update(b"pc.extra.1" + before + struct.pack("<I", len(here)) + records)
        self.hashed = self._restarted = block

    def feed(self, data: bytes) -> bytes:
        """Hash the next blocks, whose tokens are `data`, without a look at placed keys; return their digests."""
        update, digest = self.hasher.update, self.hasher.digest
        # A long prompt spends most of its time in this loop. `update` returns None.
        digests = [update(piece) or digest() for (piece,) in self._owner.pieces(data)]
        self.hashed += len(digests)
        return b"".join(digests)


def feed_all(chain: Chain, data: bytes, end: int) -> bytes:
    """Return the digests of the first `end` blocks, whose tokens are `data`; see `BlockHasher.begin`."""
    chain.hasher = chain.start.copy()
    return chain.feed(data)
