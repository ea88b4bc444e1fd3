"""Serves the decoding loops of a model over contiguous caches that blocks fill and are filled from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ....cache import CacheManager, FullAttention, OutOfBlocks
from ..loop import Loop
from ..memory import memory_budget
from ..options import Options
from ..reports import RequestReport
from ..store import Store
from ..support import CONTINUED, OWN_CACHE, UnsupportedError
from .batch import FORWARD_COST, Asked
from .call import Call
from .continued import goes_on, mark
from .decoding import WatchedModel
from .disk import DiskBlocks, disk_blocks
from .grouped import grouped_storage
from .hidden import HiddenRows
from .host import HostBlocks
from .kept import KeptRows
from .layers import has_indexer, index_reach, new_cache
from .pictures import Pictures
from .probe import LONG, Probed, probe, probe_images, probe_window
from .saved import load, save
from .vision import VisionOutputs

LOOPS = ("greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation")
BY_TOKEN = ("greedy_search", "sample")
BY_ROW = ("greedy_search", "sample", "assisted_generation")
"""Loops whose result has a row for each row of the cache."""


class Contiguous:
    """One model's prompts in blocks, and its calls over copies of them.

    Args:
        model: The model.
        options: Of its cache.

    Attributes:
        store: Where KV is kept.

    Raises:
        UnsupportedError: The model cannot be served.
    """

    def __init__(self, model: Any, options: Options) -> None:
        self._options = options
        self._disk = options.disk
        self._disk_blocks: DiskBlocks | None = None
        self._make(model, probe(model))

    def _make(self, model: Any, probed: Probed) -> None:
        options = self._options
        self._probed = probed
        self._window_problem: UnsupportedError | None = None
        self._proven_window = min(probed.window, LONG)
        blocks = (options.num_blocks, options.window_blocks, options.block_size)
        storage = grouped_storage(model, *blocks, probed.specs, probed.windows, probed.states)
        partial, count = storage.simple, storage.parts[0].num_blocks
        manager = CacheManager(
            count, options.block_size, policy=options.policy, groups=storage.groups, partial_reuse=partial
        )
        host = None
        if self._disk is not None:
            self._disk_blocks = disk_blocks(model, manager, storage, self._disk, options.disk_bytes)
        self._disk = None
        if options.host_blocks or self._disk_blocks is not None:
            host = HostBlocks(storage, options.host_blocks, self._disk_blocks)
            manager.on_evict = host.evicted
        vision = VisionOutputs(memory_budget(model) // 8)
        kept = KeptRows(sum(part.num_blocks * part.bytes_per_block for _, part in storage.kv) // 4)
        empty = new_cache(model.config)
        self._reach = index_reach(model.config) if has_indexer(empty) else None
        self.store = Store(
            manager, storage, storage.states, probed.heeds_padding, host, options.reuse, vision, empty, kept
        )
        self.store.hidden = HiddenRows(manager, memory_budget(model) // 2)

    def close(self) -> None:
        """Writes what is cached to disk, where there is one."""
        if self.store.host is not None:
            self.store.host.close(self.store.manager)

    def empty(self, model: Any, changed: bool = False) -> None:
        """An empty cache from now on; calls under way go on with the blocks they have.

        Args:
            model: The model.
            changed: Whether it is another than before: then its blocks on disk are not its own any more.
        """
        if changed and self._disk_blocks is not None:
            self._disk_blocks.close(())
            self._disk_blocks = None
        self._make(model, self._probed)

    def save(self, model: Any, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
        """Writes the blocks to a file: see `PrefixCaching.save`."""
        return save(model, self.store, adapters, path)

    def load(self, model: Any, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
        """Takes blocks from a file into host memory: see `PrefixCaching.load`."""
        groups, store = load(model, self.store, adapters, path), self.store
        if store.host is None:
            store.host = HostBlocks(store.storage, 0)
        store.host.max_blocks = max(store.host.max_blocks, len(store.host) + max(map(len, groups)))
        for group, blocks in enumerate(groups):
            for digest, content in blocks.items():
                store.host.put(group, digest, content)
        return sum(map(len, groups))

    def leaves_alone(self, loop: Loop) -> bool:
        """Whether a call ends within its first block, so that there is next to nothing to read and nothing to keep."""
        config, kwargs = loop.generation_config, loop.model_kwargs
        return (
            config.max_length <= min(self.store.block_size, FORWARD_COST)
            and loop.mode in BY_TOKEN
            and loop.repeats == 1
            and loop.images is None
            and not config.return_dict_in_generate
            and kwargs.get("attention_mask") is None
            and not hasattr(kwargs[loop.cache_name], CONTINUED)
        )

    def _keeps_hidden(self, loop: Loop) -> bool:
        """Whether hidden states of a call are rows of blocks: all tokens count, and blocks of all are there."""
        mask = loop.model_kwargs.get("attention_mask")
        return (
            loop.shown == {"output_hidden_states": True}  # not of some layers alone
            and isinstance(self.store.manager.groups[0], FullAttention)
            and self.store.states is None
            and loop.mode in (*BY_TOKEN, "beam_search", "beam_sample")
            and loop.images is None
            and loop.adapters is None
            and not loop.generation_config.prefill_chunk_size
            and (mask is None or bool(mask.all()))
        )

    def _prove_window(self, model: Any) -> None:
        if self._window_problem is None:
            try:
                probe_window(model, self._probed.window)
            except UnsupportedError as error:
                self._window_problem = error
            else:
                self._proven_window = self._probed.window
        if self._window_problem is not None:
            raise self._window_problem

    def _sees_nothing(self, mask: torch.Tensor, config: Any) -> bool:
        """Whether a row's last token may attend to none: what it then gives depends on every masked column."""
        seen = min(self._probed.windows.values(), default=mask.shape[1])
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            seen = 1  # it may be the first of its chunk
        return bool((mask[:, -seen:] == 0).all(1).any())

    def run(
        self, loop: Loop, keys: tuple[str, ...], salt: Any, out_of_blocks: Callable[[OutOfBlocks], None]
    ) -> tuple[Any, list[RequestReport]]:
        """Runs a loop over the cache.

        Args:
            loop: The loop.
            keys: What the KV of its tokens depends on besides them.
            salt: Whose blocks may be shared.
            out_of_blocks: Told that an answer was not kept.

        Returns:
            What the loop gives, and a report for each row.

        Raises:
            UnsupportedError: Before a token was computed.
        """
        config, kwargs = loop.generation_config, loop.model_kwargs
        if loop.mode not in LOOPS:
            raise UnsupportedError(f"generation mode {loop.mode} is served by the model's own generate")
        if self.store.states is not None and (loop.mode == "assisted_generation" or config.prefill_chunk_size):
            raise UnsupportedError("its recurrent states cannot be rolled back, or are not those of a chunk")
        if self._reach is not None and config.max_length > self._reach:
            raise UnsupportedError("which keys its indexer chooses among more than it takes may hang on rounding")
        if self._proven_window < self._probed.window < loop.input_ids.shape[1]:
            self._prove_window(loop.model)
        mask = kwargs.get("attention_mask")
        hidden = self.store.hidden if self._keeps_hidden(loop) else None
        shown = bool(loop.shown) and hidden is None
        if mask is not None and not self._probed.continues_padded:
            raise UnsupportedError("it does not go on from a cached prefix behind padding")
        if mask is not None and self._sees_nothing(mask, loop.model.config.get_text_config(decoder=True)):
            shown, hidden = True, None
        store, pictures = self.store, None
        if loop.images is not None:
            pictures = Pictures(loop.model, store.vision, loop.images, loop.input_ids, kwargs, loop.repeats)
            if store.vision.goes_on is None:
                store.vision.goes_on = probe_images(loop.model, loop.input_ids, mask, pictures)
        continued = kwargs[loop.cache_name] if hasattr(kwargs[loop.cache_name], CONTINUED) else None
        by_token = loop.mode in BY_TOKEN and loop.repeats == 1 and store.states is None and pictures is None
        if continued is not None and not (
            by_token
            and not shown
            and not config.prefill_chunk_size
            and goes_on(continued, store, loop.input_ids, mask, (*keys, loop.adapters), salt)
        ):
            raise UnsupportedError(OWN_CACHE)
        alone = by_token and len(loop.input_ids) == 1 and mask is None and loop.adapters is None and continued is None
        lease = store.lease(loop.returns)  # before the call: an interrupt may come between its making and its name
        try:
            call = Call(
                loop.model,
                store,
                Asked(
                    loop.input_ids,
                    mask,
                    keys,
                    salt,
                    config.max_length,
                    reuse=not shown,
                    pictures=pictures,
                    adapters=loop.adapters,
                    continued=continued,
                    alone=alone,
                    by_row=loop.mode in BY_ROW,
                    eos=frozenset(loop.eos),
                    hidden=hidden,
                    chunk=config.prefill_chunk_size,
                ),
                lease,
            )
        except OutOfBlocks as error:
            raise UnsupportedError(
                "the prompt needs more blocks than there are; give a larger num_blocks", str(error)
            ) from error
        try:
            watched = WatchedModel(loop.model, call, bool(config.prefill_chunk_size))
            if call.cache is not None and any(getattr(x, "record_past", False) for x in kwargs[loop.cache_name].layers):
                call.cache.activate_past_recording()  # an assistant's, which will be cropped
            inputs = {} if pictures is None else {"mm_encoder_outputs": call.features()}
            result = loop.run(watched, **{loop.cache_name: call.cache}, **inputs)
            call.publish(at_close=True)
            if loop.mode in BY_ROW:
                call.keep_answers(result if not hasattr(result, "sequences") else result.sequences)
            call.keep_hidden(getattr(result, "hidden_states", None))
            if call.rows.full is not None:
                out_of_blocks(call.rows.full)
            if by_token and call.cache is not None and getattr(result, "past_key_values", None) is call.cache:
                mark(call.cache, store, result.sequences, mask, (*keys, loop.adapters), salt)
            elif alone and call.cache is not None and isinstance(result, torch.Tensor):
                store.kept.put(call.cache, result[0].cpu().numpy(), keys, salt)
        finally:
            try:
                call.publish(at_close=True)
            finally:
                call.close()
        reports = {
            row: RequestReport.of(len(p.tokens), [(0, p.cached), *p.later]) for p in call.prompts for row in p.rows
        }
        return result, [reports[row] for row in range(call.batch)]
