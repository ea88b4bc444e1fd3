"""Keys for everything besides tokens that a request's KV depends on, and their encoding as bytes.

    key(None) = b"n"
    key(str) = b"s" | u64 length | UTF-8
    key(bytes) = b"b" | u64 length | bytes
    key(int) = b"i" | u64 length | ASCII decimal
    key(tuple or list) = b"t" | u64 count | keys

Integers are little-endian. Every record carries its length, so two different keys never give the same bytes. Only
exactly these types are accepted: values that compare equal to one of them (True, 1.0, an enumeration's member) might
mean something else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, Union

from ..triton_ops._core.checks import check_integer

Key: TypeAlias = Union[str, bytes, int, "list[Key]", "tuple[Key, ...]", None]
"""A key. A tuple and a list of the same keys are equal keys."""


@dataclass(frozen=True)
class KeyAt:
    """An extra key that takes effect at a token position, such as the content hash of an image.

    Blocks that end at or before `position` are shared with requests that lack the key. The block that holds the
    position, and all later blocks, are not shared.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> for request, image in (("a", "a cat"), ("b", "a dog")):  # four tokens of text, an image at 4, more text
        ...     allocation = manager.allocate(request, range(12), extra_keys=pc.KeyAt(4, image))
        ...     merged = manager.commit(request, 12)
        >>> allocation.cached_spans
        [(0, 4)]
    """

    position: int
    key: Key


ExtraKeys: TypeAlias = Union[Key, KeyAt, Sequence[Union[Key, KeyAt]]]  # noqa: UP007  an alias of strings has no |
"""One key, or a list or tuple of several."""

FrozenKeys: TypeAlias = Union[str, bytes, int, KeyAt, "tuple[FrozenKeys, ...]", None]
"""Immutable keys."""


class EncodedKeys(NamedTuple):
    """The keys of a request, encoded when it starts, so that later changes of the caller's objects have no effect.

    Attributes:
        header: Encoded salt and keys that hold for the whole sequence.
        placed: Position and bytes of each `KeyAt`, ascending.
        extra_keys: The keys as given, with lists as tuples, for listeners.
    """

    header: bytes
    placed: tuple[tuple[int, bytes], ...]
    extra_keys: FrozenKeys


def encode_key(key: Key, name: str = "extra_keys") -> bytes:
    """Return the bytes of a key, which differ for different keys; see the module's docstring."""
    kind = type(key)
    if key is None:
        return b"n"
    if isinstance(key, str) and kind is str:
        tag, body = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes) and kind is bytes:
        tag, body = b"b", key
    elif isinstance(key, int) and kind is int:
        if key.bit_length() > 14000:  # Python converts at most 4300 digits by default
            raise ValueError(f"{name}: got an integer of {key.bit_length()} bits, needs at most 14000")
        tag, body = b"i", b"%d" % key
    elif isinstance(key, (tuple, list)) and kind in (tuple, list):
        return b"t" + struct.pack("<Q", len(key)) + b"".join([encode_key(item, name) for item in key])
    else:
        raise TypeError(f"{name}: got {kind.__name__}, needs str, bytes, int, None, or a tuple or list of those")
    return tag + struct.pack("<Q", len(body)) + body


MOVED = b"m"
"""The key that marks the position from which a request's KV is approximate. `encode_key` never returns it."""


def approximate_from(keys: EncodedKeys) -> int | None:
    """Return the position from which on a request's KV is approximate, or None if all KV is exact."""
    return next((position for position, key in keys.placed if key == MOVED), None)


NO_KEYS = EncodedKeys(encode_key(None) + struct.pack("<I", 0), (), None)


def encode_keys(extra_keys: ExtraKeys = None, salt: Key = None) -> EncodedKeys:
    """Encode the keys of a request.

    A plain key (LoRA name) holds for the whole sequence, a `KeyAt` from its position on.

    Raises:
        TypeError: A key has an unsupported type.
        ValueError: A position is below 0 or above 2**64 - 1, an integer is too large, or keys are nested too deeply.
    """
    if extra_keys is None and salt is None:
        return NO_KEYS
    items = () if extra_keys is None else extra_keys if type(extra_keys) in (list, tuple) else (extra_keys,)
    try:
        frozen = tuple([_freeze(item) for item in items])  # type: ignore[union-attr]
        placed = [(item.position, encode_key(item.key)) for item in frozen if type(item) is KeyAt]
        plain = [encode_key(item) for item in frozen if type(item) is not KeyAt]  # type: ignore[arg-type]
        header = encode_key(salt, "salt") + struct.pack("<I", len(plain)) + b"".join(plain)
    except RecursionError:
        raise ValueError("extra_keys, salt: got keys that are nested too deeply, needs a few levels") from None
    given = None if extra_keys is None else frozen if type(extra_keys) in (list, tuple) else frozen[0]
    return EncodedKeys(header, tuple(sorted(placed)), given)


def _freeze(key: object) -> FrozenKeys:
    """Return a key with tuples in place of lists. `encode_key` checks other types."""
    if type(key) is KeyAt:
        return KeyAt(_position(key.position), _freeze(key.key))  # type: ignore[arg-type]
    if isinstance(key, (tuple, list)) and type(key) in (tuple, list):
        return tuple([_freeze(item) for item in key])
    return key  # type: ignore[return-value]


def _position(value: object) -> int:
    try:
        return check_integer("position", value, 0, 64)
    except (TypeError, ValueError):
        raise ValueError(f"extra_keys: got position {value!r}, needs an integer from 0 to 2**64 - 1") from None
