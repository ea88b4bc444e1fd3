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
from ..api import Cache, DynamicLayer, DynamicSlidingWindowLayer, length_behind_crop
from ..calls import refuse_if
from ..runners.dispatch import MarkedCall, PagedPass, mark
from ..runners.passes import PackedBatch, needs_plan
from .kept import BLOCK, Content, KeptLayer, WindowLayer


class Questions(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The cache with which a call of generate asks questions about a document.

    It holds the document, which calls share, followed by the call's own tokens in `rows` rows.
    """

    def __init__(self, content: Content, rows: int = 1) -> None:
        self.length = len(content.tokens)
        kept = content.layers.values()
        super().__init__(
            layers=[OwnLayer(self, x) if isinstance(x, KeptLayer) else _window(x, self.length, rows) for x in kept]
        )
        self._key: tuple[int, ...] = ()
        self._step: PackedBatch

    def __deepcopy__(self, memo: dict[int, Any]) -> Questions:
        """Return a copy with copied own tokens and the same document."""
        own: Questions = copy.copy(self)
        memo[id(self)], own._key = own, ()
        own.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return own

    def step(self, layer: OwnLayer, tokens: int) -> PackedBatch:
        """Return the metadata of the current pass over the call's own tokens. The first layer of a pass makes it."""
        batch, room = layer.buffers[0].shape[:2]
        key = (batch, room, layer.tokens, tokens)
        if self._key != key:
            tables = np.arange(batch * room // BLOCK, dtype=np.int32).reshape(batch, -1)
            lens, queries = (np.full(batch, count, np.int32) for count in (layer.tokens, tokens))
            self._key, self._step = key, PackedBatch([(np.empty(0, np.int64), tables)], lens, queries)
        return self._step


class OwnLayer(PagedPass, DynamicLayer):  # type: ignore[misc]
    """A layer of a call over a document. It holds the call's own tokens.

    Buffers are `[batch, room, num_kv_heads, head_dim]` and read as blocks. `update` marks the keys that it returns, so
    that attention is computed here, over the document and over the own tokens.

    Attributes:
        first: The column of the first own token: the length of the document.
        keys: Keys of the own tokens, `[batch, num_kv_heads, tokens, head_dim]`; None before the first update. `values`
            likewise.
    """

    is_sliding, is_compileable = False, False

    def __init__(self, questions: Questions, document: KeptLayer) -> None:
        super().__init__()
        self.questions, self.document, self.tokens, self.first = questions, document, 0, questions.length
        self.buffers: tuple[torch.Tensor, ...] = ()  # until the first tokens
        self.begin: tuple[Any, int] = (None, 0)  # the object that reads cached own tokens, and this layer's index in it
        self._laid_out: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnLayer:
        own = copy.copy(self)
        own.questions, own.buffers = memo[id(self.questions)], tuple(buffer.clone() for buffer in self.buffers)
        own._show()
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

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because the first update makes the buffers."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Write new keys and values, and return them with a mark on the keys that names this layer."""
        end = self.tokens + key_states.shape[2]
        if not self.buffers or end > self.buffers[0].shape[1]:
            room = -(-(end + max(64, end // 2)) // BLOCK) * BLOCK
            before, self.buffers = self.buffers, tuple(_empty(new, room) for new in (key_states, value_states))
            for old, buffer in zip(before, self.buffers, strict=False):
                buffer[:, : self.tokens] = old[:, : self.tokens]
            if self.tokens and not before:
                source, index = self.begin
                source.read(index, *self.buffers)
        for new, buffer in zip((key_states, value_states), self.buffers, strict=True):
            buffer[:, self.tokens : end] = new.transpose(1, 2)
        self.tokens, self.is_initialized = end, True
        self.caches(value_states)
        self._show()
        return mark(key_states.view_as(key_states), self), value_states

    def _show(self) -> None:
        """Set `keys` and `values` to views of the own tokens."""
        if self.buffers:
            self.keys, self.values = (buffer[:, : self.tokens].transpose(1, 2) for buffer in self.buffers)

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of tokens of the document and of the call."""
        return self.questions.length + self.tokens

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """See `CacheLayerMixin`."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last own tokens. Raise ValueError if there are fewer."""
        left = length_behind_crop(self.get_seq_length(), tokens_to_remove) - self.questions.length
        if left < 0:
            raise ValueError(
                f"tokens_to_remove: got {tokens_to_remove}, needs at most {self.tokens}: a document's tokens stay"
            )
        self.tokens = left
        self._show()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order."""
        self.buffers = tuple(buffer[indices.to(buffer.device)] for buffer in self.buffers)
        self._show()

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.buffers = tuple(buffer.repeat_interleave(repeats, 0) for buffer in self.buffers)
        self._show()

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """See `PagedPass`."""
        refuse_if(call.window is not None, "a layer with a window reads a compressed document")
        query, scale, softcap, sinks = call.query, call.scale, call.softcap, call.sinks
        document = self.document
        batch, heads, tokens, _ = query.shape
        if tokens == 1 and not softcap and sinks is None and self.rows:
            return self._decode(query, scale)
        kv_heads, step = len(document.kept), self.questions.step(self, tokens)
        own_keys, own_values = (buffer.view(-1, BLOCK, *buffer.shape[2:]) for buffer in self.buffers)
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
        keys, values = (buffer[:, : self.tokens].transpose(1, 2) for buffer in self.buffers)
        own, own_lse = flash_kernel(grouped, keys, values, False, scale)
        of_heads = grouped.transpose(0, 1).reshape(len(self.rows), 1, 1, -1, width)
        read = [flash_kernel(q, k, v, False, scale) for q, (k, v) in zip(of_heads, self.rows, strict=True)]
        shape = (len(read), batch, -1)
        out = torch.cat([part for part, _ in read]).view(*shape, width).transpose(0, 1)
        lse = torch.cat([part for _, part in read]).view(shape).transpose(0, 1)
        weight = torch.sigmoid(own_lse - lse)[..., None].to(out.dtype)
        return torch.lerp(out, own, weight).reshape(batch, 1, heads, width)


def _empty(new: torch.Tensor, room: int) -> torch.Tensor:
    """Return a buffer with `room` tokens for keys or values like `new`."""
    batch, heads, _, width = new.shape
    return new.new_empty(batch, room, heads, width)


def _window(kept: WindowLayer, length: int, rows: int) -> Any:
    """Return a layer with a window that ends at a document's end. Until the first update, all rows share its memory."""
    layer = DynamicSlidingWindowLayer(int(kept.window))
    layer.lazy_initialization(kept.keys, kept.values)
    layer.keys, layer.values = (side.expand(rows, -1, -1, -1) for side in (kept.keys, kept.values))
    layer.cumulative_length = length
    return layer
