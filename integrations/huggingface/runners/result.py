"""The cache in the result of a loop whose KV is in blocks, or in a cache for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..api import CACHE, DynamicCache, drop_cache
from ..calls import Calls
from ..loop import CONTINUED, Loop
from ..prompts import Prompt
from ..store.blocks import RequestBlocks
from ..store.kept import PromptStore, record_of
from ..support import host_copy
from .layout import lay_out


def add_cache(
    result: Any,
    loop: Loop,
    store: PromptStore,
    calls: Calls,
    rows: Sequence[RequestBlocks | DynamicCache],
    computed: Sequence[np.ndarray] | None = None,
) -> None:
    """Put a cache into a dict result of a finished loop, as transformers does. It replaces transformers' empty cache.

    If that fails, as for lack of memory, the result has no cache, and `calls` warns.

    Args:
        result: The result of the loop, not a tensor.
        loop: A loop in which every row was computed up to the end.
        store: The store of the model.
        calls: Warns.
        rows: The blocks or the cache of each row.
        computed: The tokens from which the KV of each row was computed. If they are those of the result, a later call
            can continue the cache. None: only the model's own generate can.
    """
    drop_cache(result)
    ids = host_copy(result.sequences[:, :-1])  # the last token was not computed
    pads = [0] * len(ids) if loop.mask is None else host_copy(loop.mask).argmax(1).tolist()
    prompts = [Prompt("", line[pad:], pad, [row]) for row, (line, pad) in enumerate(zip(ids, pads, strict=True))]
    caches = {row: kept for row, kept in enumerate(rows) if isinstance(kept, DynamicCache)}
    try:
        for prompt, kept in zip(prompts, rows, strict=True):
            if isinstance(kept, RequestBlocks):
                prompt.blocks = kept
        cache, length = store.make_cache(1), ids.shape[1]
        lay_out(cache, store.storage, prompts, caches, length, length, length)
        if computed is not None and all(np.array_equal(p.tokens, c) for p, c in zip(prompts, computed, strict=True)):
            record = record_of(cache, store, host_copy(result.sequences), loop, loop.mask)
            setattr(cache, CONTINUED, record)
        result[CACHE] = cache
    except Exception as error:
        calls.warn_of_no_cache(error)
