"""Prompts of a batch: which rows begin with the same tokens, and what is known of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..support import UnsupportedError
from .pictures import Item, Pictures, clear_of
from .states import States

_numbers = itertools.count()


@dataclass
class Prompt:
    """One prompt of a call, for all rows that begin with it.

    Attributes:
        request_id: Its name in the manager.
        tokens: The tokens from the first that the mask leaves up to the next that it does not, `[n]` int64.
        pad: Columns before them.
        rows: The rows of the batch that have it.
        cached: How many of the tokens are read from blocks.
        shared: The KV hit, where it is longer than what states allow to use.
        held: Tokens that have blocks.
        written: Blocks whose content is there.
        borrowed: Where its first tokens end within a block of another prompt: that block; None where they do not.
        later: Spans behind the first missing block that are read from blocks too.
        waits: Whether somebody is computing its next block at this moment.
        closed: Whether nothing more of it goes to blocks.
        branches: Of several rows with answers, each one's own blocks.
        tables: The block table of each group.
        states: At the end of the cached tokens; None where there are none.
        items: Its images.
        adapter: Named for its rows; None where none is.
        pictures: Of the call; None where this prompt has no image.
    """

    request_id: str
    tokens: np.ndarray
    pad: int
    rows: list[int]
    cached: int = 0
    shared: int = 0
    held: int = 0
    written: int = 0
    borrowed: int | None = None
    waits: bool = False
    closed: bool = False
    branches: dict[int, Prompt] = field(default_factory=dict)
    later: list[tuple[int, int]] = field(default_factory=list)
    tables: list[np.ndarray] = field(default_factory=list)
    states: States | None = None
    items: list[Item] = field(default_factory=list)
    adapter: str | None = None
    pictures: Pictures | None = None

    def blocks(self, group: int, first: int, length: int, size: int) -> np.ndarray:
        """The blocks of a group from `first` on from which its first `length` tokens are read."""
        blocks: np.ndarray = self.tables[group][first : -(-length // size)]
        if self.borrowed is not None and first + len(blocks) > self.written:
            blocks = blocks.copy()
            blocks[self.written - first] = self.borrowed
        return blocks

    def readable(self, length: int) -> int:
        """So many tokens, or fewer where what is behind them cannot be computed."""
        within = self.pictures is None or self.pictures.goes_on.reads
        return length if within else clear_of(self.items, length + self.pad) - self.pad

    def computable(self, length: int) -> bool:
        """Whether so many tokens may be computed before the rest."""
        within = self.pictures is None or self.pictures.goes_on.computes
        return within or clear_of(self.items, length + self.pad) == length + self.pad

    def settled(self, size: int) -> int:
        """Tokens that may be committed: whole blocks of them are written."""
        return min(self.held, (self.written + 1) * size - 1)

    def inputs(self, start: int, end: int) -> dict[str, Any] | None:
        """Inputs besides tokens of a forward pass over its tokens `start` to `end`; None where it has no image."""
        if self.pictures is None:
            return None
        features = {"mm_encoder_outputs": self.pictures.features(self.items, self.pad + start, self.pad + end)}
        return self.pictures.inputs(self.rows[0], self.pad, self.pad + end) | features


def prompts_of(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    pictures: Pictures | None = None,
    adapters: list[str] | None = None,
) -> list[Prompt]:
    """The distinct prompts of a batch, in the order in which rows show them."""
    ids = input_ids.cpu().numpy()
    if mask is None and len(ids) == 1 and pictures is None and adapters is None:
        return [Prompt(f"generate-{next(_numbers)}", np.ascontiguousarray(ids[0]), 0, [0])]
    kept = np.ones(ids.shape, bool) if mask is None else mask.cpu().numpy().astype(bool)
    found: dict[tuple[Any, ...], Prompt] = {}
    for row, (line, keep) in enumerate(zip(ids, kept, strict=True)):
        first = int(keep.argmax()) if keep.any() else len(line)
        gaps = np.flatnonzero(~keep[first:])
        end = first + int(gaps[0]) if gaps.size else len(line)
        items = [] if pictures is None else pictures.items[row]
        if items and items[-1].end > end:
            raise UnsupportedError("attention_mask leaves out tokens before an image")
        adapter = None if adapters is None else adapters[row]
        key = (first, line[first:].tobytes(), keep.tobytes(), adapter, *(item.key(first) for item in items))
        if key in found:
            found[key].rows.append(row)
        else:
            tokens = np.ascontiguousarray(line[first:end])
            found[key] = Prompt(f"generate-{next(_numbers)}", tokens, first, [row])
            found[key].adapter = adapter
            if items:
                found[key].items, found[key].pictures = items, pictures
    return list(found.values())
