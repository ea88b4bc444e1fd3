"""Questions and answers behind a document, in blocks of the prefix cache: the next question reads what it shares.

Their keys and values hold for one compressed document alone: its identity is an extra key of their blocks, the first
token behind the document is their first, and no prompt without that key finds them.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from ....cache import OutOfBlocks
from ..api import CACHE
from ..contiguous.storage import BlockIds
from ..contiguous.store import ContiguousStore
from ..store import Lease
from .document import OwnLayer, Questions

_GIVEN = {"input_ids", "attention_mask", CACHE}
_WHOLE = ("output_hidden_states", "output_attentions")  # results that have something of every token of the prompt


def are_kept(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether keys and values of a call hang on its tokens alone, and its result on no more than what is computed."""
    config = arguments.get("generation_config") or model.generation_config
    known = _GIVEN | vars(model.generation_config).keys() | inspect.signature(type(model).generate).parameters.keys()
    return arguments.keys() <= known and not any(arguments.get(n, getattr(config, n, False)) for n in _WHOLE)


class KeptQuestions:
    """The questions of one call, `rows [batch, tokens]` behind the document, as requests of a store's manager."""

    def __init__(
        self, store: ContiguousStore, lease: Lease, keys: tuple[Any, ...], salt: Any, rows: np.ndarray
    ) -> None:
        self.store, self.rows = store, rows
        self.cached = rows.shape[1] - 1
        self._tables: list[np.ndarray] = []
        self._written: list[int] = []  # blocks of each row that are there already
        self._ids = [f"question {id(lease)} {row}" for row in range(len(rows))]
        size = store.block_size
        try:
            for request_id, tokens in zip(self._ids, rows, strict=True):
                lease.take(request_id)
                found = store.manager.allocate(request_id, tokens, extra_keys=list(keys), salt=salt)
                cached = found.num_cached_tokens // size * size
                whole = int(found.group_slot_mapping(0)[-1]) < 0  # the last token's too, which is computed again
                self._written.append((len(tokens) if whole else cached) // size)
                self._tables.append(store.manager.block_table(request_id))
                self.cached = min(self.cached, cached)
        except OutOfBlocks:
            self.cached, self._tables = 0, []

    def attach(self, cache: Questions) -> None:
        """Lets the layers of a call's cache begin with what is cached."""
        for index, layer in enumerate(cache.layers) if self.cached else ():
            layer.tokens, layer.begin = self.cached, (self, index)

    def read(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fills what is cached of a layer, `[batch, tokens, num_kv_heads, head_dim]`, of several rows a question."""
        ((_, part),) = self.store.storage.kv
        blocks = [BlockIds(table[: self.cached // self.store.block_size]) for table in self._tables]
        for row in range(len(keys)):
            of_row = blocks[row * len(blocks) // len(keys)]
            part.read(index, of_row, *(side[row, : self.cached].transpose(0, 1) for side in (keys, values)))

    def keep(self, cache: Questions, sequences: torch.Tensor) -> None:
        """Publishes whole blocks of questions, and of answers where rows of the cache are those of the result."""
        manager, size, ((_, part),) = self.store.manager, self.store.block_size, self.store.storage.kv
        layers: list[OwnLayer] = list(cache.layers)
        batch, end = len(layers[0].buffers[0]), layers[0].tokens
        tokens = sequences[:, cache.length :].cpu().numpy() if len(sequences) == batch == len(self.rows) else self.rows
        last = min(tokens.shape[1], end) // size
        for row, (request_id, first) in enumerate(zip(self._ids[: len(self._tables)], self._written, strict=True)):
            if last <= first:
                continue
            held = self.rows.shape[1]
            try:
                if last * size > held:
                    manager.append(request_id, tokens[row, held : last * size])
            except OutOfBlocks:
                continue
            blocks = BlockIds(manager.block_table(request_id)[first:last])
            for index, layer in enumerate(layers):
                of_row = (side[row * batch // len(self.rows), first * size : last * size] for side in layer.buffers)
                part.write(index, blocks, *(side.transpose(0, 1) for side in of_row))
            manager.commit(request_id, last * size)
