"""Serves the decoding loops of a model over contiguous caches that blocks fill and are filled from."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ....cache import Explanation, FullAttention, OutOfBlocks
from ....cache.tiers.writer import TierWriter
from ..api import ASSISTED, CHUNKS, need, result_cache
from ..calls import Calls, RequestReport, UnsupportedError, refuse_if, refusing
from ..settings import CacheOptions
from ..store import Lease
from ..support import BY_TOKEN, OWN_CACHE, Loop
from .batch import FORWARD_COST, Batch
from .call import Call, WatchedModel
from .deterministic import RowByRow, conditions
from .layers import GrowingIndexedLayer, index_reach
from .moved import probe_moved
from .probe import LONG, Probed, probe, probe_images, probe_window
from .prompts import Prompt, RowImages, prompts_of
from .requests import extra_keys
from .store import ContiguousStore, continues, note_content
from .tiers import LowerTiers, SavedBlocks, disk_writers

LOOPS = (*BY_TOKEN, "beam_search", "beam_sample", "assisted_generation")


class Contiguous:
    """One model's prompts in blocks, and its calls over copies of them; UnsupportedError: it cannot be served."""

    def __init__(self, model: Any, options: CacheOptions) -> None:
        self._options = options
        self._disk: list[TierWriter] | None = None
        with refusing("a look at it fails"):
            probed = probe(model)
        self._moving = probe_moved(model, probed) if options.reuse == "anywhere" else None
        self._make(model, probed)
        if options.disk is not None:
            store = self.store
            self._disk = disk_writers(model, store.manager, store.storage, options.disk, options.disk_bytes)
            store.evict_to(LowerTiers(store.storage, options.host_blocks, self._disk))

    def _make(self, model: Any, probed: Probed) -> None:
        self._probed = probed
        self._window_problem: UnsupportedError | None = None
        self._proven_window = min(probed.window, LONG)
        self.store = store = ContiguousStore(model, self._options, probed, self._moving)
        indexed = any(isinstance(layer, GrowingIndexedLayer) for layer in store.empty_cache.layers)
        self._reach = index_reach(model.config) if indexed else None  # sparse attention chooses by keys of its own
        if self._options.host_blocks or self._disk is not None:
            store.evict_to(LowerTiers(store.storage, self._options.host_blocks, self._disk))

    def close(self) -> None:
        """Writes what is cached to disk, where there is one."""
        if self.store.evicted is not None:
            self.store.evicted.close(self.store.manager)

    def empty(self, model: Any) -> None:
        """Begin anew with an empty cache; calls under way keep the blocks they have."""
        self._make(model, self._probed)

    def leave_disk(self) -> None:
        """Finish what is being written to disk and write no more: another cache takes its place."""
        for writer in self._disk or ():
            writer.close()

    def save(self, model: Any, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
        """Writes the blocks to a file: see `PrefixCaching.save`."""
        store = self.store
        return SavedBlocks(model, store.manager, store.storage, adapters).write(path, store.evicted)

    def load(self, model: Any, adapters: tuple[str, ...], path: str | os.PathLike[str]) -> int:
        """Takes blocks from a file into host memory: see `PrefixCaching.load`."""
        store = self.store
        groups = SavedBlocks(model, store.manager, store.storage, adapters).read(path)
        if store.evicted is None:
            store.evicted = LowerTiers(store.storage, 0)
        for group, blocks in enumerate(groups):
            store.evicted.add(group, blocks)
        return sum(map(len, groups))

    def bypasses(self, loop: Loop) -> bool:
        """Whether a call ends within its first block, so that there is next to nothing to read and nothing to keep."""
        config = loop.generation_config
        return (
            self._options.chunk is None
            and config.max_length <= min(self.store.block_size, FORWARD_COST)
            and loop.by_token
            and loop.images is None
            and not config.return_dict_in_generate
            and loop.mask is None
            and loop.continued is None
        )

    def _keeps_hidden(self, loop: Loop) -> bool:
        """Whether hidden states of a call are rows of blocks: all tokens count, and blocks of all are there."""
        mask = loop.mask
        return (
            loop.requested_outputs == {"output_hidden_states": True}  # not of some layers alone
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

    def run(self, loop: Loop, calls: Calls) -> tuple[Any, list[RequestReport]]:
        """Runs a loop over the cache: its result and a report by row. UnsupportedError: before a token was computed."""
        # `calls` are told what was not kept, or not read.
        self.check(loop)
        if self._options.chunk is not None:
            return self._run_alone(loop, calls, self._options.chunk)
        lease = self.store.lease(
            loop.returns, loop.unchanged
        )  # before the batch: an interrupt may come before that has its name
        try:
            batch = self._batch(loop, lease)
        except OutOfBlocks as error:
            raise UnsupportedError(
                "the prompt needs more blocks than there are; give a larger num_blocks", str(error)
            ) from error
        call = Call(batch, calls.tell_unkept)
        try:
            result = self._generate(loop, call)
        finally:
            try:
                call.keep(call.publish)
            finally:
                batch.requests.close()
        reports = _tell(batch.prompts, calls)
        if batch.computed_for_hidden:
            calls.tell_hidden(batch.computed_for_hidden, self.store.hidden.max_blocks or 0, self.store.block_size)
        return result, reports

    def _run_alone(self, loop: Loop, calls: Calls, chunk: int) -> tuple[Any, list[RequestReport]]:
        """As `run`, each row by itself in chunks of so many tokens."""
        lease = self.store.lease(loop.returns, loop.unchanged)
        try:
            rows = RowByRow(self.store, loop, lease, chunk)
            result = loop.run_over(rows, rows.criteria)
        finally:
            lease.close()
        try:
            rows.keep()
        except Exception as error:
            calls.tell_unkept(error)
        return result, _tell(rows.prompts, calls)

    def explain(self, loop: Loop) -> list[Explanation]:
        """Return why each prompt of a loop is not cached further; UnsupportedError: it would not be served."""
        self.check(loop)
        manager, images = self.store.manager, self._images(loop)
        if self._options.chunk is not None:
            loop.keys = (*loop.keys, *conditions(loop.model))
        prompts = prompts_of(loop.input_ids, loop.mask, images, loop.adapters)
        evicted = self.store.evicted if self.store.storage.simple else None
        below = None if evicted is None else partial(evicted.has, manager, 0)
        found = [manager.explain(p.tokens, extra_keys(self.store, loop.keys, p), loop.salt, below) for p in prompts]
        return [self._in_chunks(explanation) for explanation in found]

    def _in_chunks(self, found: Explanation) -> Explanation:
        """Return an explanation of what a call reads: whole chunks with deterministic=True."""
        chunk = self._options.chunk
        if chunk is None:
            return found
        last = max(found.num_tokens - (1 if self.store.states is None else 2), 0) // chunk * chunk
        whole = min(found.matched, last) // chunk * chunk
        if whole == last:  # the rest is computed whatever is cached of it
            return Explanation(found.num_tokens, whole, None, whole)
        return replace(found, matched=whole)

    def _images(self, loop: Loop) -> RowImages | None:
        """The images of a loop; UnsupportedError: they cannot be gone on with."""
        vision = self.store.vision
        if loop.images is None:
            return None
        images = RowImages(loop.model, vision, loop.images, loop.input_ids, loop.model_kwargs, loop.repeats)
        if vision.split is None:
            vision.split = probe_images(loop.model, loop.input_ids, loop.mask, images)
        return images

    def check(self, loop: Loop) -> None:
        """Raise UnsupportedError for a loop that the model, as it was probed, does not allow."""
        config = loop.generation_config
        refuse_if(self.store.storage.evicts, "something takes tokens from its cache, as hooks that evict do")
        refuse_if(loop.mode not in LOOPS, f"generation mode {loop.mode}")
        if loop.mode == "assisted_generation":
            need(ASSISTED)
        if config.prefill_chunk_size:
            need(CHUNKS)
        if self.store.states is not None and (loop.mode == "assisted_generation" or config.prefill_chunk_size):
            raise UnsupportedError("its recurrent states cannot be rolled back, or are not those of a chunk")
        if self._reach is not None and config.max_length > self._reach:
            raise UnsupportedError("which keys its indexer chooses among more than it takes may hang on rounding")
        if self._proven_window < self._probed.window < loop.input_ids.shape[1]:
            self._prove_window(loop.model)
        if loop.mask is not None and not self._probed.continues_padded:
            raise UnsupportedError("it does not go on from a cached prefix behind padding")

    def _batch(self, loop: Loop, lease: Lease) -> Batch:
        """The batch of a loop; UnsupportedError: its images, or a cache of the caller's, cannot be gone on with."""
        store, mask = self.store, loop.mask
        hidden = store.hidden if self._keeps_hidden(loop) else None
        reuse = not loop.requested_outputs or hidden is not None
        if mask is not None and self._sees_nothing(mask, loop.model.config.get_text_config(decoder=True)):
            reuse, hidden = False, None
        images = self._images(loop)
        if loop.continued is not None:
            alone = loop.by_token and store.states is None and images is None
            refuse_if(not (alone and reuse) or loop.generation_config.prefill_chunk_size, OWN_CACHE)
            keys = (*loop.keys, loop.adapters)
            refuse_if(not continues(loop.continued, store, loop.input_ids, mask, keys, loop.salt), OWN_CACHE)
        return Batch(store, loop, lease, images, hidden, reuse)

    def _generate(self, loop: Loop, call: Call) -> Any:
        """Runs the loop over a call's cache and keeps what it computes."""
        batch, cache = call.batch, call.batch.cache
        watched = WatchedModel(call, bool(loop.generation_config.prefill_chunk_size))
        if cache is not None and any(getattr(layer, "record_past", False) for layer in loop.cache.layers):
            cache.activate_past_recording()  # an assistant's, which will be cropped
        inputs = {} if batch.images is None else {"mm_encoder_outputs": batch.features()}
        result = loop.run(watched, **{loop.cache_name: cache}, **inputs)
        call.keep(self._keep_result, loop, call, result)
        return result

    def _keep_result(self, loop: Loop, call: Call, result: Any) -> None:
        """Keeps what a loop has computed."""
        batch = call.batch
        call.publish()
        if loop.by_row:
            call.keep_answers(_sequences(result))
        call.keep_hidden(getattr(result, "hidden_states", None))
        if batch.cache is None or any(prompt.approximate for prompt in batch.prompts):
            return  # no later call goes on with what is approximate as if it were not
        if loop.by_row and not call.intact(_sequences(result).shape[1] - 1):
            return
        if batch.by_token and result_cache(result) is batch.cache:
            note_content(batch.cache, self.store, result.sequences, loop.mask, (*loop.keys, loop.adapters), loop.salt)
        elif batch.alone and isinstance(result, torch.Tensor):
            self.store.kept.put(batch.cache, result[0].cpu().numpy(), loop.keys, loop.salt)


def _sequences(result: Any) -> torch.Tensor:
    sequences: torch.Tensor = result if isinstance(result, torch.Tensor) else result.sequences
    return sequences


def _tell(prompts: list[Prompt], calls: Calls) -> list[RequestReport]:
    """A report by row; `calls` are told what found no block, and what was computed again."""
    every = (blocks for prompt in prompts for blocks in (prompt.blocks, *prompt.branches.values()))
    full = next((blocks.full for blocks in every if blocks.full is not None), None)
    if full is not None:
        calls.tell_out_of_blocks(full)
    calls.repair(sum(len(prompt.reused.repaired) for prompt in prompts))
    reports = {row: prompt.reused.report(len(prompt.tokens)) for prompt in prompts for row in prompt.rows}
    return [reports[row] for row in range(len(reports))]
