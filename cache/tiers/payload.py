"""A block as bytes, with a header that identifies it and a checksum.

    magic (8) | checksum (16) | layout digest (16, zeros without one) | u32 key length | u32 description length |
    key | description | data of each tensor, one after another

The description is JSON, `[[name, dtype, [size, ...]], ...]`. The checksum is blake2b over everything after it. Integers
are little-endian. Tensors have the byte order of the machine, and big-endian machines have other layout digests.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence

import torch

from .tier import MAX_KEY_BYTES, Layout, Tensors

MAGIC = b"pcblock1"
_CHECKED = len(MAGIC) + 16
_HEAD = struct.Struct("<8s16s16sII")


def pack(key: bytes, tensors: Tensors, layout: Layout | None) -> bytearray:
    """Return a block as bytes. Tensors must be dense, with any dtype, strides and device."""
    data = bytearray(_HEAD.size + len(key) + len(_describe(tensors)) + sum(t.nbytes for t in tensors.values()))
    pack_into(memoryview(data), key, tensors, layout)
    return data


def largest_size(layout: Layout) -> int:
    """Return the maximum number of bytes of a block with this layout, for any key."""
    rows = [[name, _name(dtype), list(shape)] for name, (shape, dtype) in layout.tensors.items()]
    return _HEAD.size + MAX_KEY_BYTES + len(_encode(rows)) + layout.nbytes


def pack_into(target: memoryview, key: bytes, tensors: Tensors, layout: Layout | None) -> int:
    """Write a block's bytes to the start of writable memory; return their number."""
    description = _describe(tensors)
    at = _HEAD.size + len(key) + len(description)
    digest = _digest_of(layout)
    _HEAD.pack_into(target, 0, MAGIC, bytes(16), digest, len(key), len(description))
    target[_HEAD.size : at] = key + description
    for tensor in tensors.values():
        rows = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if rows.nbytes:
            there = (ctypes.c_char * rows.nbytes).from_buffer(target, at)
            ctypes.memmove(there, rows.data_ptr(), rows.nbytes)
            at += rows.nbytes
    target[len(MAGIC) : _CHECKED] = _checksum(target[_CHECKED:at])
    return at


def unpack(data: bytes | bytearray | memoryview, key: bytes, layout: Layout | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a block, in new memory.

    Raises:
        ValueError: The block is damaged, or has another key or layout.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise ValueError(f"the block has {len(view)} bytes, fewer than any block")
    magic, checksum, digest, key_length, length = _HEAD.unpack_from(view)
    if magic != MAGIC or checksum != _checksum(view[_CHECKED:]):
        raise ValueError("the checksum is wrong")
    if bytes(view[_HEAD.size : _HEAD.size + key_length]) != key:
        raise ValueError("the block has another key")
    if digest != _digest_of(layout):
        raise ValueError("the block has another layout")
    at = _HEAD.size + key_length + length
    tensors = {}
    for name, dtype, shape in json.loads(bytes(view[at - length : at])):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor_bytes = math.prod(shape) * tensor.element_size()
        if tensor_bytes:
            ctypes.memmove(tensor.data_ptr(), bytes(view[at : at + tensor_bytes]), tensor_bytes)
        at += tensor_bytes
        tensors[name] = tensor
    if at != len(view):
        raise ValueError(f"the block has {len(view)} bytes, needs {at}")
    return tensors


def host_copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors in host memory."""
    return {
        name: tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        for name, tensor in tensors.items()
    }


def _digest_of(layout: Layout | None) -> bytes:
    """Return what identifies a layout and the byte order of this machine."""
    if layout is not None:
        return bytes.fromhex(layout.digest)
    return bytes(16) if sys.byteorder == "little" else sys.byteorder.encode().ljust(16)


def _describe(tensors: Tensors) -> bytes:
    return _encode([[name, _name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()])


def _encode(rows: Sequence[object]) -> bytes:
    return json.dumps(rows, separators=(",", ":")).encode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checksum(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
