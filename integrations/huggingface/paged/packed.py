"""Forward passes of a model over packed rows whose keys and values are in blocks, and a look whether they are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....cache.runs import pad_tables
from ..api import PACKED, cache_argument, keeps_logits, need, uses_attention_interface
from ..calls import UnsupportedError, refuse_if, refusing
from ..kernels import require_kernels
from ..support import eval_mode, harmless_tokens
from .batch import DecodeBatch, PackedBatch, Pass
from .dispatch import install, no_mask
from .layers import LayerSpec, PagedCache, PagedStorage, layer_windows


@dataclass
class BatchRow:
    """One sequence of the batch."""

    request_id: str
    tokens: np.ndarray  # the prompt without padding
    num_cached_tokens: int = 0
    length: int = 0  # tokens whose KV is in blocks, or will be after the pass under way
    # Block numbers, in order; never written to, a changed table is another array.
    table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    active: bool = False  # whether it holds blocks
    unsettled: bool = False  # whether blocks were taken out of its table that are free only after its next commit


@dataclass(frozen=True)
class RowSpan:
    """Tokens of one row to compute in one pass, at positions `start`, `start + 1`, ..."""

    row: BatchRow
    tokens: np.ndarray
    slots: np.ndarray
    start: int

    def __len__(self) -> int:
        return len(self.tokens)

    def piece(self, begin: int, end: int) -> RowSpan:
        """Tokens `begin` to `end` of this span."""
        return RowSpan(self.row, self.tokens[begin:end], self.slots[begin:end], self.start + begin)


def run(model: Any, cache: PagedCache, tokens: torch.Tensor, positions: torch.Tensor, **keep: Any) -> Any:
    """The model's output for a packed pass, tokens and positions `[1, num_tokens]`."""
    # UnsupportedError: a layer attended to something else than its blocks.
    output = model(
        input_ids=tokens,
        attention_mask=no_mask(tokens.shape[1], tokens.device),
        position_ids=positions,
        **{cache_argument(model): cache},
        use_cache=True,
        return_dict=True,
        **keep,
    )
    attended, layers = cache.layers_attended, len(cache.storage.layers)
    refuse_if(not attended == layers > 0, f"{attended} of its {layers} caching layers attended through the cache")
    return output


class PackedModel:
    """Runs a model's forward pass over packed rows whose keys and values are in blocks."""

    def __init__(self, model: Any, storage: PagedStorage) -> None:
        self.model = model
        self.storage = storage

    def forward(self, spans: Sequence[RowSpan]) -> torch.Tensor:
        """Logits of the last token of each span, `[len(spans), vocabulary]`, of one pass over all; raises as `run`."""
        lens = np.array([len(span) for span in spans], np.int32)
        tables = pad_tables([span.row.table for span in spans])
        seq_lens = np.array([span.start + len(span) for span in spans], np.int32)
        batch = PackedBatch(np.concatenate([span.slots for span in spans]), tables, seq_lens, lens)
        device = self.model.device
        tokens = torch.from_numpy(np.concatenate([span.tokens for span in spans])).to(device)
        positions = np.concatenate([np.arange(span.start, span.start + len(span)) for span in spans])
        last = torch.from_numpy(np.cumsum(lens, dtype=np.int64) - 1).to(device)
        keep = {"logits_to_keep": last} if keeps_logits(self.model) else {}
        logits = self._run(batch, tokens[None], torch.from_numpy(positions).to(device)[None], **keep)
        return logits if keep else logits[last.to(logits.device)]

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        """Logits of all rows, padding too, `[batch.num_rows, vocabulary]`, from buffers alone; raises as `run`."""
        batch.begin()
        return self._run(batch, *batch.inputs(self.model.device))

    def _run(self, batch: Pass, tokens: torch.Tensor, positions: torch.Tensor, **keep: Any) -> torch.Tensor:
        logits: torch.Tensor = run(self.model, PagedCache(self.storage, batch), tokens, positions, **keep).logits[0]
        return logits


@torch.no_grad()
def probe_packed(model: Any, block_size: int) -> dict[int, LayerSpec]:
    """What each layer keeps, as two short sequences over blocks show; UnsupportedError: it fails, or logits differ."""
    # It catches what no attribute tells: attention outside the interface, keys changed after they were cached,
    # positions that are counted rather than given.
    need(PACKED)
    if not uses_attention_interface(model):
        raise UnsupportedError("its attention does not go through transformers' AttentionInterface")
    require_kernels(model, block_size, "packed")
    lens = (2 * block_size + 3, 5)
    blocks = [-(-n // block_size) for n in lens]
    storage = PagedStorage(sum(blocks), block_size, layer_windows(model.config))
    install(model)
    packed = PackedModel(model, storage)
    rows = [BatchRow("", harmless_tokens(model, sum(lens))[-n:]) for n in lens]
    rows[0].table = np.arange(blocks[0], dtype=np.int32)[::-1].copy()  # out of order, as in a real cache
    rows[1].table = np.arange(blocks[0], sum(blocks), dtype=np.int32)

    def span(row: BatchRow, start: int, end: int) -> RowSpan:
        at = np.arange(start, end)
        slots = row.table[at // block_size].astype(np.int64) * block_size + at % block_size
        return RowSpan(row, row.tokens[start:end], slots, start)

    cut = block_size + 1
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    with eval_mode(model):
        with refusing("its forward pass fails over a paged cache"):
            packed.forward([span(rows[0], 0, cut), span(rows[1], 0, 2)])
            packed.forward([span(rows[1], 2, lens[1] - 1), span(rows[0], cut, lens[0] - 1)])
            last = [span(row, n - 1, n) for row, n in zip(rows, lens, strict=True)]
            step = DecodeBatch(4, max(blocks), pinned=False)
            step.write(
                [row.table for row in rows],
                np.array([s.start for s in last]),
                np.concatenate([s.tokens for s in last]),
                np.concatenate([s.slots for s in last]),
            )
            got = packed.decode(step)[:2].float()
        for row, logits in zip(rows, got, strict=True):
            ids = torch.from_numpy(row.tokens).to(model.device)[None]
            want = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1].float()
            difference = (logits - want).abs().max().item()
            if not difference <= want.abs().max().item() * tolerance:  # NaN fails too
                raise UnsupportedError(
                    f"its logits over a paged cache differ by {difference:.2g}, more than rounding explains"
                )
    return storage.specs
