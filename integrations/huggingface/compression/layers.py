"""The cache with which a call of generate reads a compressed document.

The call's own tokens are in blocks that all heads share. Attention over the document and attention over these tokens
are merged by their log-sum-exps, without a copy of keys or values.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from ....triton_ops import attention_plan, merge_attention, paged_attention_with_lse, sparse_gap_attention_with_lse
from ....triton_ops._attention.cpu_masked import flash_kernel
from ....triton_ops._core.runtime import KERNELS_ON_CPU
from ..api import Cache, DynamicSlidingWindowLayer, length_behind_crop
from ..calls import refuse_if
from ..layers import GrowingLayer
from ..runners.dispatch import MarkedCall, PagedPass, mark
from ..runners.passes import PackedBatch, needs_plan
from .kept import BLOCK, Content, KeptLayer, WindowLayer


def question_cache(content: Content, rows: int = 1) -> Any:
    """Return the cache with which a call of generate asks questions about a document.

    It holds the document, which calls share, followed by the call's own tokens in `rows` rows.
    """
    length, steps = len(content.tokens), dict[tuple[int, ...], PackedBatch]()
    kept = content.layers.values()
    return Cache(
        layers=[OwnLayer(x, length, steps) if isinstance(x, KeptLayer) else _window(x, length, rows) for x in kept]
    )


def in_blocks(sizes: tuple[int, ...], columns: int, first: int, like: Any) -> torch.Tensor:
    """Return a buffer as `aligned` does, with the memory layout of blocks of `BLOCK` tokens."""
    (batch, heads, width), room = sizes, -(-columns // BLOCK) * BLOCK
    whole = torch.empty((batch, room, heads, width), dtype=like.dtype, device=like.device)
    return whole.transpose(1, 2).data


class OwnLayer(PagedPass, GrowingLayer):
    """A layer of a call over a document. It holds the call's own tokens, whose first column is the document's length.

    `update` marks the keys that it returns, so that attention is computed here, over the document and over the own
    tokens.
    """

    new_buffer = staticmethod(in_blocks)

    def __init__(self, document: KeptLayer, first: int, steps: dict[tuple[int, ...], PackedBatch]) -> None:
        super().__init__()
        self.document, self.first = document, first
        self._steps = steps  # the metadata of the latest pass by its sizes, which all layers share
        self._laid_out: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnLayer:
        own = copy.copy(self)
        if self.is_initialized:
            own.keys, own.values = self.keys.clone(), self.values.clone()
        return own

    @functools.cached_property
    def rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The document's KV of each head, `[1, 1, tokens, head_dim]`; [] unless PyTorch's attention can read it."""
        keys, values, tables, kept, _ = self.document
        if KERNELS_ON_CPU or not keys.is_cpu or not kept.all() or keys.shape != values.shape:
            return []
        spans = [slice(first * BLOCK, first * BLOCK + count) for first, count in zip(tables[:, 0], kept, strict=True)]
        flat = [side.flatten(0, 1).transpose(0, 1)[None] for side in (keys, values)]
        return [(flat[0][:, :, span], flat[1][:, :, span]) for span in spans]

    def laid_out(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the document's tables, lengths, starts and plan for `count` queries per head.

        They are cached for the same count.
        """
        if self._laid_out is None or self._laid_out[0] != count:
            # Operators need lengths that include the queries. A hole before a head's tokens adds their number.
            hole, kept = -(-count // BLOCK) if count > 1 else 0, self.document.kept
            tables, lens = pad(self.document.tables, (hole, 0), value=-1), kept + hole * BLOCK
            starts = torch.arange(len(kept) + 1, dtype=torch.int32, device=kept.device) * count
            plan = None
            if needs_plan(kept.device):
                plan = attention_plan(tables, lens, starts, BLOCK, causal=False, num_kv_heads=1)
            self._laid_out = count, tables, lens, starts, plan
        return self._laid_out[1:]

    def _step(self, tokens: int) -> PackedBatch:
        """Return the metadata of the current pass over the call's own tokens. The first layer of a pass makes it."""
        (batch, _, room, _), length = self._keys_buffer.shape, self.keys.shape[2]
        key = (batch, room, length, tokens)
        if key not in self._steps:
            tables = np.arange(batch * room // BLOCK, dtype=np.int32).reshape(batch, -1)
            lens, queries = (np.full(batch, count, np.int32) for count in (length, tokens))
            self._steps.clear()
            self._steps[key] = PackedBatch([(np.empty(0, np.int64), tables)], lens, queries)
        return self._steps[key]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Write new keys and values, and return them with a mark on the keys that names this layer."""
        super().update(key_states, value_states)
        self.caches(value_states)
        return mark(key_states.view_as(key_states), self), value_states

    def get_seq_length(self) -> int:
        """Return the number of tokens of the document and of the call."""
        return self.first + (self.keys.shape[2] if self.is_initialized else 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last own tokens. Raise ValueError if there are fewer."""
        own = self.get_seq_length() - self.first
        left = length_behind_crop(self.get_seq_length(), tokens_to_remove) - self.first
        if left < 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, needs at most {own}: a document's tokens stay")
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :left], self.values[:, :, :left]

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """See `PagedPass`."""
        refuse_if(call.window is not None, "a layer with a window reads a compressed document")
        query, scale, softcap, sinks = call.query, call.scale, call.softcap, call.sinks
        document = self.document
        batch, heads, tokens, _ = query.shape
        if tokens == 1 and not softcap and sinks is None and self.rows:
            return self._decode(query, scale)
        kv_heads, step = len(document.kept), self._step(tokens)
        sides = (side.transpose(1, 2) for side in (self._keys_buffer, self._values_buffer))
        own_keys, own_values = (side.view(-1, BLOCK, *side.shape[2:]) for side in sides)
        rows = query.transpose(1, 2).flatten(0, 1)
        batch_of_own = (own_keys, own_values, *step.on(query.device)[1:], scale)
        bounds: dict[str, Any] = {"max_query_len": tokens, "max_seq_len": step.max_seq_len}
        bounds["plan"] = step.plan(query.device, BLOCK, 0, kv_heads)
        own = paged_attention_with_lse(rows, *batch_of_own, softcap=softcap, sinks=sinks, **bounds)
        # Queries of one KV head follow each other over all rows, because they read the same kept tokens.
        of_heads = query.unflatten(1, (kv_heads, -1)).permute(1, 0, 3, 2, 4).flatten(0, 2)
        count = batch * tokens
        tables, kept, starts, plan = self.laid_out(count)
        batch_of_heads = (document.keys, document.values, tables, kept, starts, None, scale)
        bounds = {"max_query_len": count, "max_seq_len": tables.shape[1] * BLOCK, "plan": plan}
        read = sparse_gap_attention_with_lse(of_heads, *batch_of_heads, causal=False, softcap=softcap, **bounds)
        out, lse = (t.unflatten(0, (kv_heads, count)).transpose(0, 1).flatten(1, 2) for t in read)
        merged, _ = merge_attention(out, lse, *own)
        return merged.view(batch, tokens, heads, -1)

    def _decode(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Decode one token on a CPU with one call of PyTorch for each head, which is faster than the operators."""
        batch, heads, _, width = query.shape
        grouped = query.reshape(batch, len(self.rows), -1, width)
        own, own_lse = flash_kernel(grouped, self.keys, self.values, False, scale)
        of_heads = grouped.transpose(0, 1).reshape(len(self.rows), 1, 1, -1, width)
        read = [flash_kernel(q, k, v, False, scale) for q, (k, v) in zip(of_heads, self.rows, strict=True)]
        shape = (len(read), batch, -1)
        out = torch.cat([part for part, _ in read]).view(*shape, width).transpose(0, 1)
        lse = torch.cat([part for _, part in read]).view(shape).transpose(0, 1)
        weight = torch.sigmoid(own_lse - lse)[..., None].to(out.dtype)
        return torch.lerp(out, own, weight).reshape(batch, 1, heads, width)


def _window(kept: WindowLayer, length: int, rows: int) -> Any:
    """Return a layer with a window that ends at a document's end. Until the first update, all rows share its memory."""
    layer = DynamicSlidingWindowLayer(int(kept.window))
    layer.lazy_initialization(kept.keys, kept.values)
    layer.keys, layer.values = (side.expand(rows, -1, -1, -1) for side in (kept.keys, kept.values))
    layer.cumulative_length = length
    return layer
