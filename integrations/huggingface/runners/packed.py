"""Forward passes of a model over packed rows whose KV is in blocks, and the probe of such passes.

Two hooks of transformers carry a pass. The `update` of a `PagedCache` writes blocks and marks the key tensor that it
returns. The attention registry of `dispatch` sends a call with a marked key to `PagedCache.attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ....cache.tensors.rows import pad_tables
from ..api import (
    PACKED,
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    cache_argument,
    keeps_logits,
    need,
    uses_attention_interface,
)
from ..calls import UnsupportedError, refuse_if, refusing
from ..kernels import wrong_kernel
from ..settings import CacheOptions
from ..store.blocks import RequestBlocks
from ..store.storage import ModelStorage, Specs, model_storage
from ..support import harmless_tokens
from .dispatch import MarkedCall, PagedPass, install, mark, no_mask
from .passes import DecodeBatch, PackedBatch, Pass

PackedSpan = tuple[RequestBlocks, int, int]
"""The tokens of one request in a packed pass: the request's blocks, the position of the first token, and their number.

The number is 0 for a request that is only forked and has no tokens in this pass.
"""


def pack(spans: Sequence[PackedSpan], block_size: int) -> PackedBatch:
    """Return the metadata of a packed pass. A pass without tokens gets one token of padding.

    Raises:
        RuntimeError: A token has no block.
    """
    requests = [blocks for blocks, *_ in spans]
    starts, counts = np.array([lens for _, *lens in spans], np.int32).T
    row_of = np.repeat(np.arange(len(spans)), counts)
    first = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) - np.repeat(first - starts, counts)
    known = positions < np.array([request.known for request in requests])[row_of]
    groups = []
    for tables in zip(*(request.tables for request in requests), strict=True):
        padded = pad_tables(tables)
        blocks = padded[row_of, positions // block_size].astype(np.int64)
        if blocks.size and blocks.min() < 0:
            raise RuntimeError(
                f"request {requests[row_of[blocks.argmin()]].request_id}: a token of this step has no block"
            )
        slots = np.where(known, -1, blocks * block_size + positions % block_size) if blocks.size else np.array([-1])
        groups.append((slots, padded))
    return PackedBatch(groups, starts + counts, counts)


class PagedCache(PagedPass, Cache):  # type: ignore[misc]  # transformers is untyped here
    """The cache of one packed pass, given to the model as its `past_key_values`.

    Args:
        storage: The blocks.
        batch: The metadata of the pass, for the groups of the storage.
    """

    def __init__(self, storage: ModelStorage, batch: Pass) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.storage, self.batch = storage, batch
        self.layers_attended = 0
        self._written: tuple[torch.Tensor, torch.Tensor, int] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: rows of a packed batch have no common length, and positions are always given."""
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values `[1, num_kv_heads, num_tokens, head_dim]` to their slots and return them."""
        new = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        slot_mapping, *_ = self.batch.on(key_states.device, self.storage.group_of[layer_idx])
        torch.ops.pc.reshape_and_cache(*new, *self.storage.caches(layer_idx), slot_mapping)
        self._written = (key_states, value_states, layer_idx)
        return mark(key_states, self), value_states

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """Return attention over the blocks to which `update` has just written this layer's keys.

        Raises:
            UnsupportedError: The layer attends to other keys, such as another layer's, or over an unexpected window.
        """
        if self._written is None or self._written[0] is not call.key or self._written[1] is not call.value:
            return super().attend(call)
        query, window, layer_idx = call.query, call.window, self._written[2]
        self._written = None
        self.layers_attended += 1
        known = self.storage.windows.get(layer_idx)
        if window != known:
            raise UnsupportedError(
                f"layer {layer_idx} attends over a window of {window}, but its cache has a window of {known}"
            )
        key_cache, value_cache = self.storage.caches(layer_idx)
        batch, group = self.batch, self.storage.group_of[layer_idx]
        _, block_tables, seq_lens, query_start_loc = batch.on(query.device, group)
        block_size, num_kv_heads = key_cache.shape[1:3]
        options = {
            "softcap": call.softcap,
            "sinks": call.sinks,
            "max_query_len": batch.max_query_len,
            "max_seq_len": batch.max_seq_len,
            "plan": batch.plan(query.device, block_size, window or 0, num_kv_heads, group),
        }
        rows = query[0].transpose(0, 1)
        tensors = (rows, key_cache, value_cache, block_tables, seq_lens, query_start_loc, call.scale)
        out: torch.Tensor
        if window is None:
            out = torch.ops.pc.paged_attention(*tensors, **options)
        else:
            out = torch.ops.pc.sliding_window_attention(*tensors, window, **options)
        return out.unsqueeze(0)


def run(
    model: Any, storage: ModelStorage, batch: Pass, tokens: torch.Tensor, positions: torch.Tensor, **keep: Any
) -> Any:
    """Return the model's output for a packed pass over blocks, tokens and positions `[1, num_tokens]`.

    Raises:
        UnsupportedError: A layer did not attend through its blocks.
    """
    cache = PagedCache(storage, batch)
    output = model(
        input_ids=tokens,
        attention_mask=no_mask(tokens.shape[1], tokens.device),
        position_ids=positions,
        **{cache_argument(model): cache},
        use_cache=True,
        return_dict=True,
        **keep,
    )
    attended, layers = cache.layers_attended, len(storage.specs)
    refuse_if(not attended == layers > 0, f"{attended} of its {layers} caching layers attended through the cache")
    return output


def compute(
    model: Any, storage: ModelStorage, spans: Sequence[PackedSpan], tokens: Sequence[np.ndarray]
) -> torch.Tensor:
    """Compute all spans in one pass and return the logits of each span's last token, `[len(spans), vocabulary]`.

    `tokens` has an int64 array for each span. Raise like `run`.
    """
    device = model.device
    positions = np.concatenate([np.arange(start, start + length) for _, start, length in spans])
    inputs = [torch.from_numpy(array).to(device)[None] for array in (np.concatenate(tokens), positions)]
    last = torch.from_numpy(np.cumsum([length for *_, length in spans], dtype=np.int64) - 1).to(device)
    keep = {"logits_to_keep": last} if keeps_logits(model) else {}
    logits: torch.Tensor = run(model, storage, pack(spans, storage.block_size), *inputs, **keep).logits[0]
    return logits if keep else logits[last.to(logits.device)]


def decode(model: Any, storage: ModelStorage, batch: DecodeBatch) -> torch.Tensor:
    """Compute a decode step and return the logits of all rows with padding, `[num_rows, vocabulary]`.

    All inputs are in the buffers of `batch`. Raise like `run`.
    """
    batch.begin()
    logits: torch.Tensor = run(model, storage, batch, *batch.inputs(model.device)).logits[0]
    return logits


def layer_windows(config: Any) -> dict[int, int]:
    """Return the window of each layer that has one.

    Raises:
        UnsupportedError: A layer has neither full nor sliding-window attention.
    """
    text = config.get_text_config(decoder=True)
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    refuse_if(other, f"it has layers of {', '.join(sorted(other))}")
    windows = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows[index] = layer.sliding_window
        else:
            refuse_if(type(layer) is not DynamicLayer, f"layer {index} keeps a {type(layer).__name__}")
    return windows


def probe_packed(model: Any, block_size: int, specs: Specs) -> UnsupportedError | None:
    """Compute two short sequences over blocks and compare their logits with the model's own.

    If a kernel that the model needs is wrong, compute nothing, and return an error that names the kernel.
    The comparison finds properties that no attribute shows. Examples are attention outside the interface, keys that
    change after they are cached, and positions that the model counts itself. It must run within `own_passes`.

    Args:
        model: A model on its device.
        block_size: Number of tokens in a block.
        specs: The shapes that each layer stores per token.

    Raises:
        UnsupportedError: The model fails, or its logits differ.
    """
    need(PACKED)
    if not uses_attention_interface(model):
        raise UnsupportedError("its attention does not go through transformers' AttentionInterface")
    for layer, (keys, values) in specs.items():
        refuse_if(keys != values, f"layer {layer} has keys and values of different shapes, which must be alike")
    wrong = wrong_kernel(model, block_size, "packed")
    if wrong is not None:
        return wrong
    lens = (2 * block_size + 3, 5)
    counts = [-(-n // block_size) for n in lens]
    options = CacheOptions(sum(counts), block_size)
    storage = model_storage(model, options, specs, layer_windows(model.config), {})
    install(model)
    tokens = [harmless_tokens(model, sum(lens))[-n:] for n in lens]
    tables = [np.arange(counts[0], dtype=np.int32)[::-1].copy()]  # out of order, as in a real cache
    tables.append(np.arange(counts[0], sum(counts), dtype=np.int32))
    groups = len(storage.groups)
    rows: list[Any] = [
        SimpleNamespace(request_id=row, tables=[own] * groups, known=0) for row, own in enumerate(tables)
    ]

    def forward(*pieces: tuple[int, int, int]) -> None:
        """Compute tokens `start` to `end` of some rows."""
        spans = [(rows[row], start, end - start) for row, start, end in pieces]
        compute(model, storage, spans, [tokens[row][start:end] for row, start, end in pieces])

    cut, tolerance = block_size + 1, 1e-3 if model.dtype == torch.float32 else 5e-2
    with refusing("its forward pass fails with a paged cache"):
        forward((0, 0, cut), (1, 0, 2))
        forward((1, 2, lens[1] - 1), (0, cut, lens[0] - 1))
        last = np.array(lens) - 1
        slots = np.array([table[n // block_size] for table, n in zip(tables, last, strict=True)], np.int64)
        step = DecodeBatch(4, max(counts), pinned=False, groups=groups)
        slots = slots * block_size + last % block_size
        step.write([tables] * groups, last, [row[-1] for row in tokens], [slots] * groups)
        got = decode(model, storage, step)[:2].float()
    for row, logits in zip(tokens, got, strict=True):
        ids = torch.from_numpy(row).to(model.device)[None]
        want = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1].float()
        difference = (logits - want).abs().max().item()
        if not difference <= want.abs().max().item() * tolerance:  # NaN fails too
            raise UnsupportedError(
                f"its logits over a paged cache differ by {difference:.2g}, more than rounding explains"
            )
    return None
