"""Forward passes of a model over packed rows, whose keys and values are in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..support import UnsupportedError
from .batch import DecodeBatch, PackedBatch, Pass
from .dispatch import no_mask
from .layers import BlockStorage, PagedCache


@dataclass
class Row:
    """One sequence of the batch.

    Attributes:
        request_id: Its name in the manager.
        tokens: The prompt without padding.
        num_cached_tokens: How many of them were read from the cache.
        length: Tokens whose KV is in blocks, or will be after the pass under way.
        table: Block numbers, in order; never written to, a changed table is another array.
        active: Whether it holds blocks.
        unsettled: Whether blocks were taken out of its table that are free only after its next commit.
    """

    request_id: str
    tokens: np.ndarray
    num_cached_tokens: int = 0
    length: int = 0
    table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    active: bool = False
    unsettled: bool = False


@dataclass(frozen=True)
class Span:
    """Tokens of one row to compute in one pass, at positions `start`, `start + 1`, ..."""

    row: Row
    tokens: np.ndarray
    slots: np.ndarray
    start: int

    def __len__(self) -> int:
        return len(self.tokens)

    def piece(self, begin: int, end: int) -> Span:
        """Tokens `begin` to `end` of this span."""
        return Span(self.row, self.tokens[begin:end], self.slots[begin:end], self.start + begin)


class PackedModel:
    """Runs a model's forward pass over packed rows whose keys and values are in blocks."""

    def __init__(self, model: Any, storage: BlockStorage) -> None:
        self.model = model
        self.storage = storage

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """One pass over all spans.

        Returns:
            Logits of the last token of each span, `[len(spans), vocabulary]`.

        Raises:
            UnsupportedError: The model did something the blocks cannot follow.
        """
        lens = np.array([len(span) for span in spans], np.int32)
        width = max(len(span.row.table) for span in spans)
        tables = np.full((len(spans), width), -1, np.int32)
        for line, span in zip(tables, spans, strict=True):
            line[: len(span.row.table)] = span.row.table
        batch = PackedBatch(
            slot_mapping=np.concatenate([span.slots for span in spans]),
            block_tables=tables,
            seq_lens=np.array([span.start + len(span) for span in spans], np.int32),
            query_lens=lens,
        )
        device = self.model.device
        tokens = torch.from_numpy(np.concatenate([span.tokens for span in spans])).to(device)
        positions = np.concatenate([np.arange(span.start, span.start + len(span)) for span in spans])
        last = torch.from_numpy(np.cumsum(lens, dtype=np.int64) - 1).to(device)
        keep = {"logits_to_keep": last} if self.model._supports_logits_to_keep() else {}
        logits = self._run(batch, tokens[None], torch.from_numpy(positions).to(device)[None], **keep)
        return logits if keep else logits[last.to(logits.device)]

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """The pass over the tokens written to a batch; what changes from step to step it reads from its buffers alone.

        Returns:
            Logits of all rows, padding included, `[batch.num_rows, vocabulary]`.

        Raises:
            UnsupportedError: As `forward`.
        """
        batch.begin()
        return self._run(batch, *batch.inputs(self.model.device))

    def _run(self, batch: Pass, tokens: torch.Tensor, positions: torch.Tensor, **keep: Any) -> torch.Tensor:
        cache = PagedCache(self.storage, batch)
        output = self.model(
            input_ids=tokens,
            attention_mask=no_mask(tokens.shape[1], tokens.device, cache),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **keep,
        )
        if cache.layers_attended == 0 or cache.layers_attended != len(self.storage.layers):
            raise UnsupportedError(
                f"{cache.layers_attended} of its {len(self.storage.layers)} caching layers attended through the cache"
            )
        logits: torch.Tensor = output.logits[0]
        return logits
