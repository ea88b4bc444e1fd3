"""Images in the rows of a batch: which tokens stand for which, what they add to a block's identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....cache import KeyAt
from ..images import Images
from ..support import UnsupportedError, expected_positions
from .vision import GoesOn, Segment, VisionOutputs

TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass(frozen=True)
class Item:
    """An image in a row.

    Attributes:
        segment: The rows of the tower's output.
        columns: Of the tokens that stand for it, ascending.
        seen: Positions and types of its tokens, which its keys and values depend on too.
    """

    segment: Segment
    columns: np.ndarray = field(compare=False)
    seen: bytes

    @property
    def first(self) -> int:
        """Column of the first token that stands for it."""
        return int(self.columns[0])

    @property
    def end(self) -> int:
        """Column behind the last."""
        return int(self.columns[-1]) + 1

    def key(self, pad: int) -> KeyAt:
        """What it adds to the identity of blocks, in a prompt behind so many columns."""
        return KeyAt(self.first - pad, (*self.segment.key, self.seen))


class Pictures:
    """The images of one call.

    Args:
        model: The model.
        outputs: Of its vision tower.
        images: Of the call.
        input_ids: `[batch, length]`, rows repeated.
        kwargs: Arguments of the loop.
        repeats: How often each row of the caller's stands there.

    Attributes:
        items: Of each row, in order.

    Raises:
        UnsupportedError: Tokens and images do not go together, or something besides images sets positions or types.
    """

    def __init__(
        self,
        model: Any,
        outputs: VisionOutputs,
        images: Images,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
        repeats: int,
    ) -> None:
        self._model, self._outputs = model, outputs
        self._inputs = {n: kwargs[n] for n in ("position_ids", *TYPES) if kwargs.get(n) is not None}
        self._fresh: dict[bytes, torch.Tensor] = {}
        unknown = [unit for unit in images.units if outputs.length(unit) is None]
        if unknown:
            self._fresh = outputs.encode(model, unknown)
        own = input_ids[::repeats]
        rows = self._segments(images, own == images.token, kwargs.get("attention_mask"), repeats)
        self.items = [row for row in rows for _ in range(repeats)]
        self._check(input_ids, kwargs.get("attention_mask"))

    def _segments(self, images: Images, stands: torch.Tensor, mask: Any, repeats: int) -> list[list[Item]]:
        lengths = [self._length(unit) for unit in images.units]
        if sum(lengths) != int(stands.sum()):
            raise UnsupportedError("its tokens for images and their features differ in number")
        if mask is not None and bool((stands & (mask[::repeats] == 0)).any()):
            raise UnsupportedError("attention_mask leaves out tokens of an image")
        rows: list[list[Item]] = []
        number = taken = 0
        for row, line in enumerate(stands.cpu().numpy()):
            columns, items = np.flatnonzero(line), []
            while columns.size:
                count = min(columns.size, lengths[number] - taken)
                if count:
                    own = columns[:count]
                    seen = self._seen(row * repeats, int(own[0]), int(own[-1]) + 1)
                    items.append(Item(Segment(images.units[number], taken, count), own, seen))
                taken, columns = taken + count, columns[count:]
                if taken == lengths[number]:
                    number, taken = number + 1, 0
            rows.append(items)
        return rows

    def _length(self, unit: Any) -> int:
        known = self._outputs.length(unit)
        if known is None:
            known = len(self._fresh[unit.digest])
        return known

    def _seen(self, row: int, first: int, end: int) -> bytes:
        parts = [value[..., row, first:end].cpu().numpy() for value in self._inputs.values()]
        return b"".join(np.ascontiguousarray(part).astype(np.int64).tobytes() for part in parts)

    def _check(self, input_ids: torch.Tensor, mask: Any) -> None:
        """Before the first image all must be as in a prompt of text alone, whose blocks are shared."""
        inside = torch.zeros(input_ids.shape, dtype=torch.bool)
        before = torch.ones(input_ids.shape, dtype=torch.bool)
        for row, items in enumerate(self.items):
            for item in items:
                inside[row, item.first : item.end] = True
                before[row, item.first :] = False
        for name in TYPES:
            if name in self._inputs and bool(self._inputs[name].cpu()[~inside].any()):
                raise UnsupportedError("token types could change what a token's KV is")
        if "position_ids" in self._inputs:
            expected = expected_positions(input_ids, mask).cpu()
            if bool(((self._inputs["position_ids"].cpu() != expected) & before).any()):
                raise UnsupportedError("position_ids are not those of the tokens that attention_mask leaves")

    @property
    def goes_on(self) -> GoesOn:
        """How prompts go on within images."""
        return self._outputs.goes_on or GoesOn()

    def inputs(self, row: int, start: int, end: int) -> dict[str, torch.Tensor]:
        """Positions and types of some columns of a row, with a batch of one."""
        return {name: value[..., row : row + 1, start:end] for name, value in self._inputs.items()}

    def features(self, items: list[Item], start: int, end: int) -> dict[str, Any]:
        """What a forward pass over some columns takes for images; the tower runs for those that are not kept."""
        items = [item for item in items if item.first < end and start < item.end]
        segments = [item.segment for item in items]
        kept = dict(zip(segments, self._outputs.get(list(segments)), strict=True)) if segments else {}
        lacking = [s for s, rows in kept.items() if rows is None]
        units = {s.unit.digest: s.unit for s in lacking if s.unit.digest not in self._fresh}
        if units:
            self._fresh |= self._outputs.encode(self._model, list(units.values()))
        found = {s: self._fresh[s.unit.digest][s.offset : s.offset + s.length] for s in lacking}
        if found:
            self._outputs.put(found)
        rows = []
        for item in items:
            whole: Any = found.get(item.segment, kept[item.segment])
            rows.append(whole[slice(*np.searchsorted(item.columns, (start, end)))])
        return self._outputs.together(rows)


def clear_of(items: list[Item], column: int) -> int:
    """The column, or where the image begins that it would cut."""
    for item in items:
        if item.first < column < item.end:
            return item.first
    return column


__all__ = ["Item", "Pictures", "clear_of"]
