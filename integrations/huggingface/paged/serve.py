"""Serves the decoding loops of a model with packed passes over blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ....cache import CacheManager, OutOfBlocks
from ..loop import Loop
from ..memory import default_num_blocks
from ..reports import RequestReport
from ..store import Store
from ..support import UnsupportedError
from .decoder import PagedDecoder, RecordedCriteria
from .dispatch import install
from .graphs import DecodeSteps
from .layers import BlockStorage, layer_windows
from .packed import PackedModel
from .probe import probe
from .requests import Requests, prompts_of


class Paged:
    """One model's blocks, its decode steps, and its calls over them.

    Args:
        model: The model.
        num_blocks: Blocks of the cache; None: see `default_num_blocks`.
        block_size: Tokens of a block.
        policy: See `CacheManager`.
        steps: Runs decode steps.

    Attributes:
        store: Where KV is kept.

    Raises:
        UnsupportedError: The model cannot be served.
    """

    def __init__(self, model: Any, num_blocks: int | None, block_size: int, policy: Any, steps: DecodeSteps) -> None:
        self._policy, self._steps = policy, steps
        self._turn = threading.RLock()
        bytes_per_block = probe(model, block_size)
        num_blocks = num_blocks or default_num_blocks(model, bytes_per_block, block_size)
        storage = BlockStorage(num_blocks, block_size, layer_windows(model.config))
        self.store = Store(CacheManager(num_blocks, block_size, policy=policy), storage)

    def empty(self, model: Any, changed: bool = False) -> None:
        """An empty cache from now on; calls under way go on with the blocks they have."""
        install(model)
        storage = self.store.storage.fresh()
        manager = CacheManager(storage.num_blocks, storage.block_size, policy=self._policy)
        with self._turn:
            self._steps.drop()
            self.store = Store(manager, storage)

    def run(
        self, loop: Loop, keys: tuple[str, ...], salt: Any, out_of_blocks: Callable[[OutOfBlocks], None]
    ) -> tuple[Any, list[RequestReport]]:
        """Runs a loop over the blocks: see `Contiguous.run`."""
        check_paged(loop)
        config, store, model = loop.generation_config, self.store, loop.model
        criteria = RecordedCriteria(loop.options["stopping_criteria"])
        # Rows that met an eos are padded from then on, so that nobody sees their logits but who asked for them.
        seen = loop.own_processors or config.output_scores or config.output_logits
        drop_finished = not seen and any(hasattr(c, "eos_token_id") for c in criteria)
        with self._turn:
            self._steps.prepare(model, (id(store), keys))
        requests = Requests(
            store.manager,
            PackedModel(model, store.storage),
            self._steps,
            prompts_of(loop.input_ids, loop.model_kwargs.get("attention_mask")),
            keys or None,
            config.prefill_chunk_size,
            self._turn,
            salt,
            store.lease(loop.returns),
        )
        decoder = PagedDecoder(model, requests, criteria, drop_finished, out_of_blocks)
        try:
            result = loop.run(decoder, {"stopping_criteria": criteria})
        finally:
            requests.close()
        if hasattr(result, "past_key_values"):
            result.past_key_values = None  # the empty one that transformers made; the cache itself stays here
        return result, [RequestReport.of(len(r.tokens), [(0, r.num_cached_tokens)]) for r in requests.rows]


def check_paged(loop: Loop) -> None:
    """Raises UnsupportedError for a loop that packed passes cannot follow."""
    if loop.mode not in ("greedy_search", "sample"):
        raise UnsupportedError(f"generation mode {loop.mode} is served by the model's own generate")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(loop.generation_config, name, False) or loop.model_kwargs.get(name):
            raise UnsupportedError(f"{name}=True needs tensors that are not there for cached tokens")
    if loop.adapters is not None:
        raise UnsupportedError("packed passes know no rows that adapters could be named for")
    if loop.images is not None:
        raise UnsupportedError("packed passes take no images")
    mask = loop.model_kwargs.get("attention_mask")
    if mask is None:
        return
    if not bool(mask[:, -1].all()):
        raise UnsupportedError("the batch is padded on the right")
    if layer_windows(loop.model.config) and bool((mask.diff(dim=-1) < 0).any()):
        raise UnsupportedError("windows are counted over the holes of its attention_mask")
