"""The engine of one model: its blocks, and the runner that serves each decoding loop."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from ...cache import Explanation
from ...cache.tiers.writer import TierWriter
from .admit import extra_keys
from .api import ASSISTED, CHUNKS, need
from .calls import Calls, RequestReport, UnsupportedError, refuse_if, refusing
from .compression.kept import Content
from .identity import has_own_code
from .layers import GrowingIndexedLayer, index_reach
from .loop import BY_TOKEN, Loop
from .probe import EVICTS, LONG, TOKENS, Probed, probe, probe_hooks, probe_window
from .prompts import Prompt, prompts_of
from .runners import contiguous, deterministic, document, paged
from .runners.batch import FORWARD_COST
from .runners.dispatch import install
from .runners.graphs import CAPTURERS, DecodeSteps
from .runners.moved import probe_moved
from .runners.packed import probe_packed
from .settings import CacheOptions
from .store.kept import PromptStore
from .store.tiers import LowerTiers, disk_writers
from .support import padding_token

LOOPS = (*BY_TOKEN, "beam_search", "beam_sample", "assisted_generation")


class Engine:
    """The blocks of one model's prompts, and the runners of its calls over them.

    A call runs as packed passes over the blocks if the device has kernels and these passes support the call. Otherwise
    it runs over contiguous copies of the blocks.

    Raises:
        UnsupportedError: The model cannot be served.
    """

    def __init__(self, model: Any, options: CacheOptions, steps: DecodeSteps, calls: Calls) -> None:
        self._options, self._calls = options, calls
        self._disk: list[TierWriter] | None = None
        with refusing("the probe of the model fails"):
            probed = probe(model)
        self._steps = steps if self._probe_packed(model, probed, steps) else None
        self._make(model, probe_moved(model, probed) if options.reuse == "anywhere" else probed)

    def _make(self, model: Any, probed: Probed) -> None:
        """Make an empty store for the model, with its lower tiers."""
        self._problem: UnsupportedError | None = None  # of a longer probe
        self._proven_window = min(probed.window, LONG)
        self._proven_length = TOKENS if has_own_code(model) else sys.maxsize
        self.store = store = PromptStore(model, self._options, probed)
        indexed = any(isinstance(layer, GrowingIndexedLayer) for layer in store.empty_cache.layers)
        # The longest sequence of a sparse model; None for others.
        self._reach = index_reach(model.config, "index_topk" if indexed else "keep_window_size")
        self._set_tiers()

    def _set_tiers(self) -> None:
        """Let evicted blocks go to host memory and to disk, if the options say so."""
        host_blocks = self._options.host_blocks
        if host_blocks or self._disk is not None:
            self.store.evicted = LowerTiers(self.store.storage, host_blocks, self._disk)
            self.store.manager.on_evict = self.store.evicted.evicted

    def open_disk(self, disk: str | os.PathLike[str], fingerprint: str) -> None:
        """Open a directory for blocks of the model with this fingerprint, which get there once they are evicted.

        Raises:
            OSError: The directory cannot be made.
        """
        store = self.store
        self._disk = disk_writers(fingerprint, store.manager, store.storage, disk, self._options.disk_bytes)
        self._set_tiers()

    def _probe_packed(self, model: Any, probed: Probed, steps: DecodeSteps) -> bool:
        """Return whether packed passes can serve the model. Otherwise contiguous copies serve every call."""
        options = self._options
        if model.device.type not in CAPTURERS or options.reuse != "prefix" or options.chunk is not None:
            return False
        try:
            with refusing("the probe of the model fails"):
                refuse_if(probed.states, "its recurrent states have no blocks")
                wrong = probe_packed(model, options.block_size, probed.specs)
        except UnsupportedError as error:
            steps.refuse(str(error))
            return False
        if wrong is not None:
            steps.refuse(str(wrong))
            self._calls.warn("kernels", f"{wrong}. The model is served over contiguous copies, in PyTorch")
        return wrong is None

    def _packs(self, loop: Loop) -> bool:
        """Return whether this loop runs as packed passes."""
        return self._steps is not None and paged.follows(loop, bool(self.store.probed.windows))

    def close(self) -> None:
        """Write the cached blocks to disk, if `disk` was given."""
        self.store.evicted.close(self.store.manager)

    def empty(self, model: Any) -> None:
        """Replace the cache by an empty one. Running calls keep the blocks they have."""
        if self._steps is not None:
            install(model)
            self._steps.drop()
        self._make(model, self.store.probed)

    def leave_disk(self) -> None:
        """Finish pending writes to disk and write no more, because another cache may use the directory."""
        for writer in self._disk or ():
            writer.close()

    def bypasses(self, loop: Loop) -> bool:
        """Return whether a call bypasses the cache: it is at most a block long and needs nothing from the cache."""
        config = loop.generation_config
        return (
            self._options.chunk is None
            and config.max_length <= min(self.store.block_size, FORWARD_COST)
            and loop.by_token
            and loop.images is None
            and not config.return_dict_in_generate
            and loop.mask is None
            and loop.continued is None
            and not self._packs(loop)
        )

    def in_pieces(self, loop: Loop) -> bool:
        """Return whether several forward passes may compute a prompt, besides one for its last token."""
        options, store = self._options, self.store
        by_options = options.chunk is not None or options.reuse != "prefix" or store.storage.chunk is not None
        return by_options or store.states is not None or bool(loop.generation_config.prefill_chunk_size)

    def _prove(self, loop: Loop) -> None:
        """Probe the model with longer rows if this loop has the first ones beyond its window, or beyond proven passes.

        Raises:
            UnsupportedError: Such a probe failed, now or before.
        """
        length, window = loop.input_ids.shape[1], self.store.probed.window
        beyond = self._proven_window < window < length
        if not beyond and length <= self._proven_length:
            return
        if self._problem is not None:
            raise self._problem
        try:
            if beyond:
                probe_window(loop.model, window)
                self._proven_window = window
            if length > self._proven_length:
                self._proven_length = probe_hooks(loop.model, length, self._reach)
        except UnsupportedError as error:
            self._problem = error
            raise

    def run(self, loop: Loop, content: Content | None = None) -> tuple[Any, list[RequestReport]]:
        """Run a loop over the cache and return its result and a report for each row.

        With the `content` of a compressed document, the loop reads the document.

        Raises:
            UnsupportedError: The loop cannot be served; no token was computed.
        """
        calls = self._calls
        if content is None and self._steps is not None and self._packs(loop):
            self._prove(loop)
            result, prompts = paged.run(loop, self.store, self._steps, calls)
            return result, _reports(prompts, calls)
        self.check(loop)
        if content is not None:
            return document.run(loop, self.store, content, calls)
        run = contiguous.run if self._options.chunk is None else deterministic.run
        result, prompts = run(loop, self.store, calls)
        return result, _reports(prompts, calls)

    def explain(self, loop: Loop) -> list[Explanation]:
        """Return how far each prompt of a loop is cached, and why no further.

        Raises:
            UnsupportedError: The loop cannot be served.
        """
        by_row = self._packs(loop)
        if not by_row:
            self.check(loop)
        manager, images = self.store.manager, contiguous.images_of(loop, self.store)
        if self._options.chunk is not None:
            loop.extra_keys = (*loop.extra_keys, *deterministic.conditions(loop.model))
        prompts = paged.row_prompts(loop) if by_row else prompts_of(loop.input_ids, loop.mask, images, loop.adapters)
        evicted = self.store.evicted
        below = partial(evicted.has, manager, 0) if evicted.used and self.store.storage.any_prefix else None
        keys = [extra_keys(self.store, loop.extra_keys, prompt) or None for prompt in prompts]
        found = [manager.explain(p.tokens, k, loop.salt, below) for p, k in zip(prompts, keys, strict=True)]
        return [self._in_chunks(explanation) for explanation in found]

    def _in_chunks(self, found: Explanation) -> Explanation:
        """Round an explanation down to whole chunks if the model is deterministic, since calls then read only these."""
        chunk = self._options.chunk
        if chunk is None:
            return found
        last = max(found.num_tokens - (1 if self.store.states is None else 2), 0) // chunk * chunk
        whole = min(found.matched, last) // chunk * chunk
        if whole == last:  # the rest is always computed, even if it is cached
            return Explanation(found.num_tokens, whole, None, whole)
        return replace(found, matched=whole)

    def check(self, loop: Loop) -> None:
        """Raise UnsupportedError if the model, its mode or the installed transformers rules out serving this loop."""
        config = loop.generation_config
        refuse_if(self.store.storage.evicts, EVICTS)
        refuse_if(loop.mode not in LOOPS, f"generation mode {loop.mode}")
        if loop.mode == "assisted_generation":
            need(ASSISTED)
        if config.prefill_chunk_size:
            need(CHUNKS)
        if self.store.states is not None and (loop.mode == "assisted_generation" or config.prefill_chunk_size):
            raise UnsupportedError("its recurrent states do not support assisted decoding or chunked prefill")
        if self._reach is not None and config.max_length > self._reach:
            raise UnsupportedError("rounding may change which keys its indexer or attention selects")
        self._prove(loop)
        typed = loop.model_kwargs.get("token_type_ids") is not None
        refuse_if(typed and not self.store.probed.continues_typed, "token types could change a token's KV")
        if not self.store.probed.continues_padded:
            pads = loop.mask is not None or padding_token(loop.model) in loop.input_ids
            refuse_if(pads, "it computes other values when it continues from a cached prefix after padding")


def _reports(prompts: list[Prompt], calls: Calls) -> list[RequestReport]:
    """Return a report for each row. `calls` counts repaired tokens, and warns if there were too few blocks."""
    calls.warn_of_full(prompts)
    calls.repair(sum(len(prompt.hit.repaired) for prompt in prompts))
    reports = {row: prompt.hit.report(len(prompt.tokens)) for prompt in prompts for row in prompt.rows}
    return [reports[row] for row in range(len(reports))]
