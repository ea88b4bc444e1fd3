"""What a tier below the KV cache is: blocks by their hash, for one layout, that may be lost but never be wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch

MAX_KEY_BYTES = 64

Tensors = Mapping[str, torch.Tensor]
"""The tensors of one block by name, such as "key" and "value" `[layers, block_size, num_kv_heads, head_dim]`."""


@runtime_checkable
class Tier(Protocol):
    """Keeps the tensors of blocks that were evicted, for as long as it likes.

    Losing an entry is allowed at any time, giving one that is not what was put never is. Methods may be called from
    several threads. None raises because a disk, a network or another process fails: that is a miss, or an entry not
    taken. Bad arguments raise TypeError or ValueError before anything is touched.

    Examples:
        >>> import tempfile
        >>> from pc.cache.tiers.disk import DiskTier
        >>> from pc.cache.tiers.tier import Tier
        >>> with tempfile.TemporaryDirectory() as path:
        ...     isinstance(DiskTier(path), Tier)
        True
    """

    def put(self, key: bytes, tensors: Tensors) -> bool:
        """Takes a block; the tensors may be overwritten once this has returned.

        Args:
            key: Its hash, 1 to 64 bytes.
            tensors: By name, on any device.

        Returns:
            Whether it took it, or had it already.

        Raises:
            TypeError: No bytes, or no dense tensors by name.
            ValueError: A key of another length, or tensors that differ from the layout.
        """

    def get(self, key: bytes) -> dict[str, torch.Tensor] | None:
        """The tensors of a block in host memory, the caller's own; None when it is not there. Keys are as in `put`."""

    def __contains__(self, key: object, /) -> bool:
        """Whether a `get` would find it, as far as can be told without reading it."""

    def discard(self, key: bytes) -> None:
        """Removes a block, if it is there."""

    def put_many(self, entries: Mapping[bytes, Tensors]) -> set[bytes]:
        """`put` of several blocks; the keys of those that were taken or there already."""

    def get_many(self, keys: Sequence[bytes]) -> list[dict[str, torch.Tensor] | None]:
        """`get` of several blocks, in their order."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """`in` for several blocks, in their order."""


@dataclass(frozen=True)
class Layout:
    """What the entries of a tier are: of which model, and which tensors a block has. Another layout's are never read.

    Args:
        model: Fingerprint of the model and its weights, whatever decides the values besides tokens and extra keys.
        tensors: By name (shape of one block's tensor, dtype).

    Raises:
        TypeError: A model that is no string, or tensors that are no mapping to shapes and dtypes.
        ValueError: A negative size.

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
    """32 hexadecimal digits that stand for all of it; the same in every process."""

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
            checked[name] = tuple(index(size) for size in shape), dtype
            if min(checked[name][0], default=0) < 0:
                raise ValueError(f"tensors: got {name} {list(shape)}, needs sizes of at least 0")
        object.__setattr__(self, "tensors", MappingProxyType(checked))
        text = repr((self.model, [(name, *checked[name]) for name in sorted(checked)]))
        object.__setattr__(self, "digest", hashlib.blake2b(text.encode(), digest_size=16).hexdigest())

    @classmethod
    def of(cls, model: str, tensors: Tensors) -> Layout:
        """The layout of blocks like this one, of a model as above."""
        return cls(model, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of a block's tensors."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())

    def __hash__(self) -> int:
        return hash(self.digest)


def check_key(key: bytes) -> None:
    """Raises TypeError unless a key is bytes, ValueError where it is empty or too long."""
    if not isinstance(key, bytes):
        raise TypeError(f"key: got {type(key).__name__}, needs bytes")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"key: got {len(key)} bytes, needs 1 to {MAX_KEY_BYTES}")


def check_tensors(tensors: Tensors, layout: Layout | None) -> None:
    """Raises TypeError unless they are dense tensors by name, ValueError where they differ from the layout."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: got {type(tensors).__name__}, needs a mapping by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"tensors: got {type(tensor).__name__} under {name!r}, needs dense tensors by name")
    if layout is not None:
        if tensors.keys() != layout.tensors.keys():
            raise ValueError(f"tensors: got {sorted(tensors)}, needs {sorted(layout.tensors)} of the layout")
        for name, tensor in tensors.items():
            shape, dtype = layout.tensors[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                got = f"{list(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"tensors: got {name} {got}, needs {list(shape)} {dtype} of the layout")
