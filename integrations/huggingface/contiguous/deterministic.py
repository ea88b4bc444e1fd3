"""Calls whose bits do not depend on what is cached: each row by itself, its prompt in chunks at fixed places.

What a matrix product rounds to depends on its number of rows, and what attention adds up on the keys it is given. So a
prompt is computed in chunks that begin at multiples of `chunk`, whatever is cached of it: hits end at such a multiple,
and only whole chunks of prompts go to blocks. The tokens of an answer are computed one at a time; a later call reads
them as part of its prompt, in chunks.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from ....cache import OutOfBlocks
from ..api import CausalLMOutputWithPast, DynamicCache, ModelInLoop, attention_implementation
from ..calls import refuse_if
from ..store import Lease
from ..support import BY_TOKEN, Loop, RecordedCriteria, float32_precision
from .layers import columns, release, take_states
from .layout import forward, read, read_behind
from .prompts import Prompt, Reused, prompts_of
from .requests import PromptRequests
from .store import ContiguousStore

DETERMINISTIC = "with deterministic=True"


class RowByRow(ModelInLoop):
    """Stands in the model's place in a loop, and computes each row of the batch in passes of its own."""

    def __init__(self, store: ContiguousStore, loop: Loop, lease: Lease, chunk: int) -> None:
        # UnsupportedError: it cannot follow the loop.
        super().__init__(loop)
        self._store, self._chunk = store, chunk
        self.criteria = RecordedCriteria.of(loop)  # which the loop is to be given
        self.prompts = prompts_of(loop.input_ids, loop.mask)
        _check(loop, self.prompts, store.counts_padding)
        self._pads = {row: prompt.pad for prompt in self.prompts for row in prompt.rows}
        loop.keys = (*loop.keys, *conditions(loop.model))
        self._requests = PromptRequests(store, loop, lease)
        self._caches: dict[int, DynamicCache] = {}  # of each row, once its prompt is computed
        self._computed: dict[int, int] = {}  # tokens of each row that its cache has

    def prefill(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Logits behind every prompt."""
        return self(input_ids)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        """The inputs of `compute`: all tokens so far."""
        return {"input_ids": input_ids}

    def compute(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Logits of every row's next token, `[batch, 1, vocabulary]`."""
        logits: dict[int, torch.Tensor] = {}
        self._requests.publishes()
        if self._caches:
            finished = self.criteria.dropped(len(input_ids))
            for row, tokens in enumerate(input_ids.cpu().numpy()):
                if not finished[row]:
                    logits[row] = self._decode(row, tokens[self._pads[row] :])
        else:
            for prompt in self.prompts:
                own, found = self._read(prompt)
                for row in prompt.rows:
                    self._computed[row] = len(prompt.tokens)
                    self._caches[row], logits[row] = own if row == prompt.rows[0] else copy.deepcopy(own), found
        padding = torch.zeros_like(next(iter(logits.values())))  # a finished row's next token is padding
        return CausalLMOutputWithPast(logits=torch.cat([logits.get(row, padding) for row in range(len(input_ids))]))

    def _decode(self, row: int, tokens: np.ndarray) -> torch.Tensor:
        """Logits behind a row's last token, `[1, 1, vocabulary]`."""
        cache = self._caches[row]
        release(cache, len(tokens) - 1)  # nothing of an answer goes to blocks
        self._computed[row] = len(tokens)
        return self._forward(tokens, len(tokens) - 1, len(tokens), cache)

    def _forward(self, tokens: np.ndarray, start: int, end: int, cache: DynamicCache) -> torch.Tensor:
        logits: torch.Tensor = forward(self._loop.model, tokens, start, end, cache).logits
        return logits[:, -1:]

    def _read(self, prompt: Prompt) -> tuple[DynamicCache, torch.Tensor]:
        """A cache with a whole prompt, and the logits behind it; whole chunks go to blocks."""
        store, tokens, chunk = self._store, prompt.tokens, self._chunk
        behind = 1 if store.states is None else 2  # recurrent layers go on with two tokens at least
        last = max(len(tokens) - behind, 0) // chunk * chunk
        self._admit(prompt, last)
        cached, room = prompt.reused.cached, max(1, min(self._loop.generation_config.max_length - len(tokens), 256))
        cache = store.kept.take(tokens[:cached], self._loop.keys, self._loop.salt) if cached and self._alone else None
        if cache is None:
            cache = store.make_cache(room)
            if cached:
                read(cache, store.storage, prompt, cached, len(tokens) - cached + room)
        at = cached
        for start, end in [*prompt.reused.later, (last, last)]:
            for begin in range(at, start, chunk):
                self._forward(tokens, begin, begin + chunk, cache)
                self._publish(prompt, cache, begin + chunk)
            if start < end:
                read_behind(cache, store.storage, prompt, start, end)
            at = end
        logits = self._forward(tokens, last, len(tokens), cache)
        if len(tokens) - last == chunk:
            self._publish(prompt, cache, len(tokens))
        return cache, logits

    def _admit(self, prompt: Prompt, last: int) -> None:
        """Finds what is cached of a prompt in whole chunks, before the one that begins at `last`."""
        chunk, simple = self._chunk, self._store.storage.simple
        try:
            self._requests.admit(prompt)
            while (whole := _down(min(prompt.reused.cached, last), chunk)) != prompt.reused.cached and not simple:
                self._requests.readmit(prompt, whole)  # other blocks of windows, or another state, serve there
        except OutOfBlocks as error:  # computed alike, and not kept
            prompt.blocks = self._requests.blocks(prompt)
            prompt.blocks.full, prompt.blocks.closed, prompt.reused = error, True, Reused()
            return
        spans = [(-_down(-start, chunk), _down(min(end, last), chunk)) for start, end in prompt.reused.later]
        later = [(start, end) for start, end in spans if start < end and (simple or prompt.blocks.serves(end))]
        prompt.reused = prompt.reused._replace(cached=whole, later=later)

    def _publish(self, prompt: Prompt, cache: DynamicCache, end: int) -> None:
        """Publishes what a cache has of a prompt, which ends with a whole chunk."""
        blocks, states = prompt.blocks, None if self._store.states is None else take_states(cache, 0)
        blocks.publish(cache, 0, 0, prompt.tokens, end, states, prompt.reused.later)
        release(cache, end if blocks.closed else blocks.written * self._store.block_size)

    @property
    def _alone(self) -> bool:
        """Whether the call's cache may be another call's, and be left to one."""
        return len(self._loop.input_ids) == 1 and self._store.states is None

    def keep(self) -> None:
        """Leaves a single row's cache to later calls, which go on behind a whole chunk of the prompt's."""
        if self._caches and self._alone and self._requests.publishes():
            cache, prompt = self._caches[0], self.prompts[0]
            if columns(cache) == {self._computed[0]}:
                self._store.kept.put(cache, prompt.tokens, self._loop.keys, self._loop.salt)
            else:
                self._store.storage.evicts = True


def _check(loop: Loop, prompts: list[Prompt], counts_padding: bool) -> None:
    """Raises UnsupportedError for a loop whose rows cannot be computed one by one."""
    refuse_if(loop.mode not in BY_TOKEN, f"{DETERMINISTIC} rows are computed one by one, not in {loop.mode}")
    refuse_if(loop.images is not None, f"{DETERMINISTIC} chunks of a prompt may cut an image")
    refuse_if(loop.adapters is not None, f"{DETERMINISTIC} no rows are there that adapters could be named for")
    refuse_if(loop.requested_outputs, f"{DETERMINISTIC} no hidden states or attention weights are kept")
    refuse_if(loop.continued is not None, f"{DETERMINISTIC} no cache of a result is gone on with")
    if any(not len(p.tokens) or p.pad + len(p.tokens) < loop.input_ids.shape[1] for p in prompts):
        refuse_if(True, f"{DETERMINISTIC} a row needs tokens, none of them masked, and padding on the left alone")
    if counts_padding and any(p.pad for p in prompts):
        refuse_if(True, f"{DETERMINISTIC} padding is left out, and this model counts it")


def conditions(model: Any) -> tuple[str | bytes, ...]:
    """What bits depend on besides shapes, of this process: blocks of others are not read."""
    # Weights that are mapped from a file need not lie at multiples of 64 bytes, and a copy of them does.
    lie = bytes([weight.data_ptr() % 64 for weight in model.parameters()])
    on_gpu = model.device.type == "cuda"
    processor = torch.cuda.get_device_name(model.device) if on_gpu else torch.backends.cpu.get_cpu_capability()
    attention, threads = attention_implementation(model.config.get_text_config()), torch.get_num_threads()
    return ("bits", lie, *map(str, (torch.__version__, processor, threads, float32_precision(), attention)))


def _down(number: int, step: int) -> int:
    return number // step * step
