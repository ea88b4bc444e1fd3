"""The kept keys and values of a compressed document. Each KV head is a separate sequence, over blocks of one head.

So heads can keep different numbers of tokens, and dropped tokens take no memory. No request writes to these blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

BLOCK = 16
"""Number of tokens in a block."""


class KeptLayer(NamedTuple):
    """The tokens of a document that the heads of one layer keep."""

    keys: torch.Tensor  # [num_blocks, BLOCK, 1, head_dim]
    values: torch.Tensor  # the same
    tables: torch.Tensor  # [num_kv_heads, max_blocks] int32, -1 after a head's blocks
    kept: torch.Tensor  # [num_kv_heads] int32: number of tokens of each head
    chosen: torch.Tensor = torch.empty(0, 0, dtype=torch.uint8)
    """The kept tokens as bits, `[num_kv_heads, length / 8]`; empty if they are unknown."""


class WindowLayer(NamedTuple):
    """The last tokens of a layer with a window. Such a layer reads no other tokens, so it is not compressed."""

    keys: torch.Tensor  # [1, num_kv_heads, tokens, head_dim]
    values: torch.Tensor
    window: torch.Tensor  # [] int64: the size of the window


class Content(NamedTuple):
    """All data of a document, which is stored as a whole in memory, in a tier or in a file."""

    layers: dict[int, KeptLayer | WindowLayer]
    tokens: torch.Tensor  # [length] int64, on the host
    position: int  # of the next token; less than length if a press moved keys together
    peak_nbytes: int  # the most bytes of keys and values while the text was computed
    key: bytes  # its identity
    adapters: bytes = b""  # a digest of the adapters with which the text was computed
    salt: bytes = b""  # a digest of the salt; empty if there was none

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all data as named tensors, for tiers and files."""
        named = {f"{i} {name}": t for i, layer in self.layers.items() for name, t in layer._asdict().items()}
        texts = {name: torch.tensor(list(getattr(self, name)), dtype=torch.uint8) for name in _TEXTS}
        return named | texts | {"tokens": self.tokens, "numbers": torch.tensor([self.position, self.peak_nbytes])}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Content:
        """Return a document from its `tensors`, on a device.

        Raises:
            ValueError: An older version of this library wrote the tensors.
        """
        if not {"tokens", "numbers", *_TEXTS} <= tensors.keys():
            raise ValueError("an older version wrote it")
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, part = name.partition(" ")
            if part:
                layers.setdefault(int(index), {})[part] = tensor.to(device)
        kinds: dict[int, Any] = {i: KeptLayer if "tables" in parts else WindowLayer for i, parts in layers.items()}
        made = {i: kinds[i](**parts) for i, parts in sorted(layers.items())}
        position, peak = tensors["numbers"].tolist()
        texts = {name: bytes(tensors[name].tolist()) for name in _TEXTS}
        return cls(made, tensors["tokens"].cpu(), position, peak, **texts)


_TEXTS = ("key", "adapters", "salt")


def digest_of(key: bytes, value: object) -> bytes:
    """Return a digest of adapters or a salt for one document; empty for None."""
    return b"" if value is None else hashlib.sha256(key + repr(value).encode()).digest()


def keep(keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor) -> KeptLayer:
    """Pack the chosen tokens of each head into blocks.

    Keys and values are `[num_kv_heads, tokens, head_dim]`, `chosen` is `[num_kv_heads, tokens]` bool.
    """
    lens = chosen.sum(-1, dtype=torch.int32)
    counts, blocks = lens.tolist(), (-(-lens // BLOCK)).tolist()
    tables = torch.full((len(counts), max(*blocks, 1)), -1, dtype=torch.int32)
    packed = [side.new_zeros(sum(blocks), BLOCK, 1, side.shape[-1]) for side in (keys, values)]
    first = 0
    for head, (count, own) in enumerate(zip(counts, blocks, strict=True)):
        tables[head, :own] = torch.arange(first, first + own, dtype=torch.int32)
        for side, pool in zip((keys, values), packed, strict=True):
            pool[first : first + own].view(-1, side.shape[-1])[:count] = side[head, chosen[head]]
        first += own
    bits = torch.from_numpy(np.packbits(chosen.cpu().numpy(), axis=1))
    return KeptLayer(packed[0], packed[1], tables.to(keys.device), lens, bits)


def tokens_of(layer: KeptLayer, length: int) -> list[torch.Tensor] | None:
    """Return the positions of the tokens that each head keeps; None if they are unknown."""
    if not layer.chosen.numel():
        return None
    bits = np.unpackbits(layer.chosen.cpu().numpy(), axis=1, count=length)
    return [torch.from_numpy(np.flatnonzero(row)) for row in bits]
