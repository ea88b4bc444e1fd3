"""The names of a `TensorCache`: which there are, what their rows look like, and how much memory they may take."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch

from ...triton_ops._checks import on_host
from ...triton_ops._copy.cpu import empty
from .step import Step, leaves
from .valid import ValidRows

_log = logging.getLogger("pc.cache")

PLAIN = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
}
"""What PyTorch copies bit by bit in every way of copying."""
Named = dict[str, torch.Tensor]
RowKind = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of one token's row


class Entry(NamedTuple):
    """A cached name: its rows, and whether the caller named it or it was discovered."""

    rows: torch.Tensor
    registered: bool
    features: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    flat: torch.Tensor | None
    """`[num_blocks * block_size, *features]` in host memory, where no kernel is needed to move them."""


class NamedTensors:
    """Rows `[num_blocks, block_size, *features]` by name, registered or discovered, within a bound; as `TensorCache`.

    `valid` is told of names that come and go.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        pin: bool,
        max_bytes: int | None,
        exclude: Iterable[str],
        valid: ValidRows,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.pin = pin
        self.max_bytes = _available_bytes(device) // 2 if max_bytes is None else max_bytes
        self.entries: dict[str, Entry] = {}
        self._exclude = set(exclude)
        self._warned: set[str] = set()
        self._valid = valid

    @property
    def nbytes(self) -> int:
        """Bytes of all names."""
        return sum(entry.rows.nbytes for entry in self.entries.values())

    def cost(self, feature_shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that a name of this shape and dtype takes."""
        return self.num_blocks * self.block_size * math.prod(feature_shape) * dtype.itemsize

    def register(self, name: str, feature_shape: Sequence[int], dtype: torch.dtype) -> None:
        """See `TensorCache.register`."""
        if any(size < 0 for size in feature_shape):
            raise ValueError(f"feature_shape: got {list(feature_shape)}, needs sizes of at least 0")
        if name in self.entries:
            self._check_like(name, feature_shape, dtype)
            self.entries[name] = self.entries[name]._replace(registered=True)
        else:
            self._allocate({name: (tuple(feature_shape), dtype)}, registered=True)
        self._exclude.discard(name)

    def _check_like(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        entry = self.entries[name]
        if tuple(shape) != entry.features or dtype != entry.dtype:
            raise ValueError(f"{name}: got rows {list(shape)} {dtype}, needs {list(entry.features)} {entry.dtype}")

    def _allocate(self, new: Mapping[str, RowKind], registered: bool) -> None:
        """Makes new names, all or none of them."""
        total = self.nbytes
        for name, (shape, dtype) in new.items():
            size = self.cost(shape, dtype)
            if total + size > self.max_bytes:
                raise MemoryError(
                    f"{name}: needs {size} bytes for {self.num_blocks * self.block_size} rows {list(shape)} {dtype}, "
                    f"{total} of at most {self.max_bytes} bytes are taken"
                )
            total += size
            where = f"{self.device}, {total} of {self.max_bytes} in all"
            _log.info("TensorCache: %s %s %s takes %d bytes on %s", name, list(shape), dtype, size, where)
        made = {}
        for name, (shape, dtype) in new.items():
            full = (self.num_blocks, self.block_size, *shape)
            with torch.inference_mode(False):  # else no step outside of that mode could write them
                rows = torch.empty(full, dtype=dtype, pin_memory=True) if self.pin else empty(full, dtype, self.device)
                flat = rows.flatten(0, 1) if on_host(rows) and dtype in PLAIN else None
            made[name] = Entry(rows, registered, shape, dtype, math.prod(shape) * dtype.itemsize, flat)
        for name, entry in made.items():
            self.entries[name] = entry
            self._valid.add(name)

    def _discover(self, new: Mapping[str, RowKind]) -> list[str]:
        """Makes new names as long as there is room; those that found none."""
        refused = []
        for name, kind in new.items():
            try:
                self._allocate({name: kind}, registered=False)
            except MemoryError as error:  # noqa: PERF203  one must not keep the others out
                refused.append(name)
                self._warn_once(name, f"{error}; it is not cached")
        return refused

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("TensorCache: %s", text)

    def sort(self, step: Step) -> tuple[Named, dict[str, object]]:
        """Per-token tensors, allocated where they are new, and everything else.

        A tensor with a row for each token is discovered, unless the step decodes: it may as well have one for each
        request. A discovered name with fewer rows than tokens is given up, one with more is passed over: it is padded.
        """
        outputs, num_tokens = step.outputs, step.slots.count
        if not isinstance(outputs, Mapping):
            raise TypeError(f"outputs: got {type(outputs).__name__}, needs a mapping by name")
        mine: Named = {}
        others: dict[str, object] = {}
        if type(outputs) is dict and num_tokens:  # of known names alone, as a step mostly is
            for name, value in outputs.items():
                entry = self.entries.get(name)
                if entry is None or type(value) is not torch.Tensor or value.shape != (num_tokens, *entry.features):
                    break
                if value.dtype != entry.dtype or value.layout != torch.strided:
                    break
            else:
                return cast("Named", outputs), others
        new: dict[str, RowKind] = {}
        no_rows: Named = {}
        for name, value in leaves(outputs):
            if name in mine or name in others:
                raise ValueError(f"outputs: got two values named {name}, needs names that differ")
            others[name] = value
            if not isinstance(value, torch.Tensor) or not num_tokens or name in self._exclude:
                continue
            known = self.entries.get(name)
            if value.layout == torch.strided and value.shape[:1] == (num_tokens,):
                if known is not None:
                    self._check_like(name, value.shape[1:], value.dtype)
                elif step.is_decode:
                    continue
                else:
                    new[name] = tuple(value.shape[1:]), value.dtype
                mine[name] = value
                del others[name]
            elif known is not None and known.registered:
                raise ValueError(f"{name}: got shape {list(value.shape)}, needs {num_tokens} rows, one per token")
            else:
                no_rows[name] = value
        for name in self._discover(new) if new else ():
            others[name] = mine.pop(name)
        for name, value in no_rows.items():
            if value.layout != torch.strided or value.dim() < 1 or value.shape[0] < num_tokens:
                self._exclude.add(name)
                if self.entries.pop(name, None) is not None:
                    self._valid.drop(name)
                    _log.warning("TensorCache: %s %s is not per token, it is no longer cached", name, list(value.shape))
            elif name in self.entries:
                text = f"{name}: got {len(value)} rows for {num_tokens} tokens, none is kept: cut off the padding"
                self._warn_once(name, text)
        return mine, others


def _available_bytes(device: torch.device) -> int:
    """Memory that is free on a device, or in the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 62
