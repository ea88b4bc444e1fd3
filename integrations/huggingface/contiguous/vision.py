"""What a model's vision tower gave for images, kept by their content, and put together for a forward pass."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ....cache import EncoderCache, EncoderItem
from ..images import Unit
from ..support import UnsupportedError
from ..uninterrupted import uninterrupted

LENGTHS = 1 << 16
"""Images whose number of tokens is remembered."""


@dataclass(frozen=True)
class Segment:
    """Rows of a unit's output that one row of a batch has tokens for.

    Attributes:
        unit: Whose.
        offset: The first of the rows.
        length: How many.
    """

    unit: Unit
    offset: int
    length: int

    @property
    def key(self) -> tuple[bytes, int, int]:
        """Stands for its content."""
        return self.unit.digest, self.offset, self.length


@dataclass(frozen=True)
class GoesOn:
    """How a prompt goes on from a cached prefix that ends within an image.

    Attributes:
        computes: Whether the parts of an image may be computed one after the other; not where its tokens attend to
            each other in both directions.
        reads: Whether the rest of an image may be computed behind blocks of one that was computed whole.
    """

    computes: bool = False
    reads: bool = False


@dataclass(frozen=True)
class _Form:
    """How a model wants its tower's output: its class, which parts are lists, and their widths."""

    kind: type
    widths: tuple[int, ...]
    lists: tuple[bool, ...]


class VisionOutputs:
    """The outputs of one model's vision tower.

    Args:
        max_bytes: Bytes of all outputs that are kept.

    Attributes:
        goes_on: How prompts with images go on from a cached prefix; None before the first was looked at.
    """

    def __init__(self, max_bytes: int) -> None:
        self._cache = EncoderCache(max_bytes)
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._form: _Form | None = None
        self._apart: bool | None = None
        self._lock = threading.Lock()
        self.goes_on: GoesOn | None = None

    def fresh(self) -> VisionOutputs:
        """Without content, for the same model."""
        return VisionOutputs(self._cache.max_bytes)

    def length(self, unit: Unit) -> int | None:
        """Tokens that stand for a unit; None for one that was never encoded."""
        return self._lengths.get(unit.digest)

    def get(self, segments: list[Segment]) -> list[torch.Tensor | None]:
        """The rows of segments that are kept, `[length, width]` each."""
        return uninterrupted(self._get, segments)

    def put(self, rows: dict[Segment, torch.Tensor]) -> None:
        """Keeps the rows of segments, as far as there is room."""
        uninterrupted(self._put, rows)

    def _get(self, segments: list[Segment]) -> list[torch.Tensor | None]:
        items = [EncoderItem(s.key, 0, s.length) for s in segments]
        with self._lock:
            try:
                self._cache.missing("call", items, [(0, 1)])
                return [self._cache.output(i) if i.content_hash in self._cache else None for i in items]
            finally:
                self._cache.release("call")

    def _put(self, rows: dict[Segment, torch.Tensor]) -> None:
        with self._lock:
            for segment, output in rows.items():
                with suppress(MemoryError):
                    self._cache.put("call", EncoderItem(segment.key, 0, segment.length), output)
                self._cache.release("call")

    def encode(self, model: Any, units: list[Unit]) -> dict[bytes, torch.Tensor]:
        """Runs the tower over units.

        Returns:
            By digest all rows of its output, `[length, width]`.

        Raises:
            UnsupportedError: Its output is not rows for tokens, or differs with the images beside one.
        """
        units = list({unit.digest: unit for unit in units}.values())
        parts = self._run(model, units)
        if parts is None:
            parts = [part for unit in units for part in self._run(model, [unit]) or ()]
        elif len(units) > 1 and self._apart is None:
            alone = self._run(model, units[:1])
            self._apart = alone is not None and _alike(parts[0], alone[0])
        if (len(units) > 1 and self._apart is False) or len(parts) != len(units):
            raise UnsupportedError("what its vision tower gives for an image depends on others beside it")
        for unit, rows in zip(units, parts, strict=True):
            self._lengths[unit.digest] = len(rows)
        while len(self._lengths) > LENGTHS:
            self._lengths.popitem(last=False)
        return {unit.digest: rows for unit, rows in zip(units, parts, strict=True)}

    def _run(self, model: Any, units: list[Unit]) -> list[torch.Tensor] | None:
        """The output of each of several units; None where it cannot be told whose a row is."""
        inputs = dict(units[0].inputs)
        if len(units) > 1:
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor):
                    if any(u.inputs[name].shape[1:] != value.shape[1:] for u in units):
                        return None
                    inputs[name] = torch.cat([u.inputs[name] for u in units])
        kwargs = {**inputs, "mm_encoder_outputs": {}}
        output = model._prepare_multimodal_encoder_kwargs_for_generation(kwargs)["mm_encoder_outputs"]["image"]
        pooled: Any = getattr(output, "pooler_output", None)
        deep = getattr(output, "deepstack_features", None) or ()
        parts = [pooled, *deep]
        if not all(_are_features(part) for part in parts):
            raise UnsupportedError("what its vision tower gives is not rows for tokens")
        if len(units) > 1 and any(len(part) != len(units) for part in parts):
            return None
        self._form = _Form(
            type(output),
            tuple(int(part[0].shape[-1]) for part in parts),
            tuple(not isinstance(part, torch.Tensor) for part in parts),
        )
        groups = [[image] for image in range(len(units))] if len(units) > 1 else [list(range(len(pooled)))]
        flat = [[torch.cat([part[i].flatten(0, -2) for i in group]) for part in parts] for group in groups]
        if any(len({len(rows) for rows in each}) != 1 for each in flat):
            raise UnsupportedError("what its vision tower gives is not rows for tokens")
        return [torch.cat(each, -1) for each in flat]

    def together(self, rows: list[torch.Tensor]) -> dict[str, Any]:
        """Rows of segments in order, as a forward pass takes them: `mm_encoder_outputs`."""
        if not rows or self._form is None:
            return {}
        parts = torch.cat(rows).split(self._form.widths, -1)
        packed = [[part] if in_list else part[None] for part, in_list in zip(parts, self._form.lists, strict=True)]
        deep = {"deepstack_features": packed[1:]} if len(packed) > 1 else {}
        return {"image": self._form.kind(pooler_output=packed[0], **deep)}


def _are_features(part: Any) -> bool:
    images = list(part) if isinstance(part, torch.Tensor | list | tuple) else []
    return bool(images) and all(isinstance(image, torch.Tensor) and image.dim() >= 2 for image in images)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-3 if a.dtype in (torch.float32, torch.float64) else 5e-2
    a, b = a.float(), b.float()
    return a.shape == b.shape and bool((a - b).abs().max() <= a.abs().max() * tolerance)
