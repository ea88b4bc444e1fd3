"""The interface of tiers below the KV cache, which keep blocks by hash and may lose but never change them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch

from ...triton_ops._core.checks import check_integer

MAX_KEY_BYTES = 64

Tensors = Mapping[str, torch.Tensor]
"""The tensors of one block by name, such as "key" and "value" `[layers, block_size, num_kv_heads, head_dim]`."""


@runtime_checkable
class Tier(Protocol):
    """A store for tensors of evicted blocks, which it may drop at any time.

    It must never return tensors that differ from those that were put. Its methods must be thread-safe. No method may
    raise because a disk, a network or another process fails: it then reports a miss, or an entry that was not stored.
    Invalid arguments raise TypeError or ValueError before anything is changed.

    A subclass defines `put_many`, `discard`, `get` or `get_many`, and `__contains__` or `contains_many`. Other classes
    must have all methods.

    Examples:
        >>> import tempfile
        >>> from pc.cache.tiers.disk import DiskTier
        >>> from pc.cache.tiers.tier import Tier
        >>> with tempfile.TemporaryDirectory() as path:
        ...     isinstance(DiskTier(path), Tier)
        True
    """

    def put(self, key: bytes, tensors: Tensors) -> bool:
        """Store a block. The caller may overwrite the tensors after the call.

        Args:
            key: Hash of the block, 1 to 64 bytes.
            tensors: Tensors by name, on any device.

        Returns:
            Whether the block is stored now.

        Raises:
            TypeError: The key is not bytes, or `tensors` does not hold dense tensors by name.
            ValueError: The key has another length, or the tensors differ from the layout.
        """
        check_key(key)  # before a dictionary refuses one that cannot be hashed
        return bool(self.put_many({key: tensors}))

    def get(self, key: bytes) -> dict[str, torch.Tensor] | None:
        """Return new tensors of a block in host memory, or None if it is not stored. Keys are as in `put`."""
        return self.get_many([key])[0]

    def __contains__(self, key: object, /) -> bool:
        """Return whether `get` would probably find a block, without reading it."""
        return isinstance(key, bytes) and self.contains_many([key])[0]

    def discard(self, key: bytes) -> None:
        """Remove a block, if it exists."""

    def put_many(self, entries: Mapping[bytes, Tensors]) -> set[bytes]:
        """Store several blocks like `put`; return the keys of those that are stored now."""

    def get_many(self, keys: Sequence[bytes]) -> list[dict[str, torch.Tensor] | None]:
        """Read several blocks like `get`, in order."""
        return [self.get(key) for key in keys]

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each of several blocks, in order, what `key in tier` returns."""
        return [key in self for key in keys]


@dataclass(frozen=True)
class Layout:
    """The model and the tensors of a tier's entries. Entries with another layout are never read.

    Args:
        model: Fingerprint of the model and its weights, and of all else that decides values besides tokens and keys.
        tensors: For each name, the shape of one block's tensor and its dtype.

    Raises:
        TypeError: `model` is not a string, or `tensors` is not a mapping to shapes and dtypes.
        ValueError: A size is negative.

    Examples:
        >>> from pc.cache.tiers.tier import Layout
        >>> shape = (2, 16, 2, 64)  # [layers, block_size, num_kv_heads, head_dim]
        >>> layout = Layout("my-model@sha256:9f86", {name: (shape, torch.bfloat16) for name in ("key", "value")})
        >>> layout.nbytes
        16384
    """

    model: str
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]
    digest: str = field(init=False, compare=False)
    """32 hexadecimal digits that identify the layout, the same in every process."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(f"model: got {type(self.model).__name__}, needs a string")
        if not isinstance(self.tensors, Mapping):
            raise TypeError(f"tensors: got {type(self.tensors).__name__}, needs a mapping by name")
        checked: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, row in self.tensors.items():
            if not (isinstance(name, str) and isinstance(row, tuple) and len(row) == 2):
                raise TypeError(f"tensors: got {name!r} with {row!r}, needs names, each with a (shape, dtype)")
            shape, dtype = row
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"tensors: got {name} of {dtype!r}, needs a dtype")
            checked[name] = tuple(check_integer(f"tensors[{name!r}]", size, 0) for size in shape), dtype
        object.__setattr__(self, "tensors", MappingProxyType(checked))
        text = repr((self.model, [(name, *checked[name]) for name in sorted(checked)]))
        text += "" if sys.byteorder == "little" else sys.byteorder  # bytes of tensors are stored as they are in memory
        object.__setattr__(self, "digest", hashlib.blake2b(text.encode(), digest_size=16).hexdigest())

    @classmethod
    def of(cls, model: str, tensors: Tensors) -> Layout:
        """Return the layout of blocks with tensors like these. `model` is as for the class."""
        return cls(model, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of a block's tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())

    def __hash__(self) -> int:
        return hash(self.digest)


def check_key(key: bytes) -> None:
    """Raise TypeError unless a key is bytes, ValueError if it is empty or too long."""
    if not isinstance(key, bytes):
        raise TypeError(f"key: got {type(key).__name__}, needs bytes")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"key: got {len(key)} bytes, needs 1 to {MAX_KEY_BYTES}")


def check_entries(entries: Mapping[bytes, Tensors], layout: Layout | None) -> None:
    """Check the keys of blocks like `check_key`, and their tensors.

    Raise TypeError unless the tensors are dense and have names, ValueError if they differ from the layout.
    """
    for key, tensors in entries.items():
        check_key(key)
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors: got {type(tensors).__name__}, needs a mapping by name")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or not _is_dense(tensor):
                raise TypeError(f"tensors: got {type(tensor).__name__} under {name!r}, needs dense tensors by name")
        if layout is None:
            continue
        if tensors.keys() != layout.tensors.keys():
            raise ValueError(f"tensors: got {sorted(tensors)}, needs {sorted(layout.tensors)} of the layout")
        for name, tensor in tensors.items():
            shape, dtype = layout.tensors[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                got = f"{list(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"tensors: got {name} {got}, needs {list(shape)} {dtype} of the layout")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its elements in memory, unlike a DTensor, a fake tensor or one of torch's qint8."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
