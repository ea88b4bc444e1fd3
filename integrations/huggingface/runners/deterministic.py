"""The runner of deterministic=True: each row is computed separately, and its prompt in chunks at fixed positions.

The rounding of a matrix product depends on its number of rows, and the sums of attention depend on the keys of a pass.
Therefore a prompt is always computed in chunks that begin at multiples of `chunk`. Hits end at such a multiple, and
only whole chunks of prompts are written to blocks. The tokens of an answer are computed one by one. A later call
reads them as part of its prompt, in chunks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ....cache import OutOfBlocks
from ..admit import PromptRequests
from ..api import CausalLMOutputWithPast, DynamicCache, attention_implementation
from ..calls import Calls, refuse_if
from ..layers import columns, mark_written, take_states
from ..loop import BY_TOKEN, Loop
from ..prompts import Prompt, PromptHit, prompts_of
from ..store.kept import PromptStore
from ..support import float32_precision, host_copy
from .layout import forward, read, read_behind
from .rows import RowsInLoop

DETERMINISTIC = "with deterministic=True"


class RowByRow(RowsInLoop):
    """The model of a loop. It computes each row of the batch in separate passes."""

    def __init__(self, requests: PromptRequests, loop: Loop, prompts: list[Prompt], calls: Calls) -> None:
        super().__init__(requests, loop, prompts, calls)
        self._chunk: int = requests.store.options.chunk or 0
        self._pads = {row: prompt.pad for prompt in prompts for row in prompt.rows}
        self._caches: dict[int, DynamicCache] = {}  # by row, of prompts that are computed
        self._computed: dict[int, int] = {}  # by row: number of tokens in its cache

    def add_cache(self, result: Any) -> None:
        """Put a copy of all rows' KV into a dict result."""
        self.put_cache(result, caches=self._caches)

    def prefill(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return the logits of the last token of every prompt."""
        return self(input_ids)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        """Return the inputs of `compute`: all tokens so far."""
        return {"input_ids": input_ids}

    def compute(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Return the logits of every row's next token, `[batch, 1, vocabulary]`."""
        logits: dict[int, torch.Tensor] = {}
        self._requests.publishes()
        if self._caches:
            finished = self._criteria.dropped(len(input_ids))
            for row, tokens in enumerate(host_copy(input_ids)):
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
        """Compute a row's last token and return its logits, `[1, 1, vocabulary]`."""
        cache = self._caches[row]
        mark_written(cache, len(tokens) - 1)  # answers are not written to blocks
        self._computed[row] = len(tokens)
        return self._forward(tokens, len(tokens) - 1, len(tokens), cache)

    def _forward(self, tokens: np.ndarray, start: int, end: int, cache: DynamicCache) -> torch.Tensor:
        """Compute tokens `start` to `end` of a row and return the logits of the last one."""
        logits: torch.Tensor = forward(self._loop.model, tokens, start, end, cache).logits
        return logits[:, -1:]

    def _read(self, prompt: Prompt) -> tuple[DynamicCache, torch.Tensor]:
        """Read or compute a prompt. Return its cache and the logits of its last token. Whole chunks are published."""
        store, tokens, chunk = self._store, prompt.tokens, self._chunk
        behind = 1 if store.states is None else 2  # recurrent layers need at least two tokens to compute
        last = max(len(tokens) - behind, 0) // chunk * chunk
        self._admit(prompt, last)
        cached, room = prompt.hit.cached, max(1, min(self._loop.generation_config.max_length - len(tokens), 256))
        cache = store.take_cache(tokens[:cached], self._loop) if cached and self._alone else None
        if cache is None:
            cache = store.make_cache(room)
            if cached:
                read(cache, prompt, cached, len(tokens) - cached + room)
        at = cached
        for start, end in [*prompt.hit.later, (last, last)]:
            for begin in range(at, start, chunk):
                self._forward(tokens, begin, begin + chunk, cache)
                self._publish(prompt, cache, begin + chunk)
            if start < end:
                read_behind(cache, prompt, start, end)
            at = end
        logits = self._forward(tokens, last, len(tokens), cache)
        if len(tokens) - last == chunk:
            self._publish(prompt, cache, len(tokens))
        return cache, logits

    def _admit(self, prompt: Prompt, last: int) -> None:
        """Admit a prompt and round its hits to whole chunks before the last chunk, which begins at `last`."""
        chunk, any_prefix = self._chunk, self._store.storage.any_prefix
        try:
            self._requests.admit(prompt)
            while (whole := _down(min(prompt.hit.cached, last), chunk)) != prompt.hit.cached and not any_prefix:
                self._requests.readmit(prompt, whole)  # a shorter hit needs other blocks or states
        except OutOfBlocks as error:  # computed in the same way, without blocks
            prompt.blocks = self._requests.blocks(prompt)
            prompt.blocks.full, prompt.blocks.closed, prompt.hit = error, True, PromptHit()
            return
        spans = [(-_down(-start, chunk), _down(min(end, last), chunk)) for start, end in prompt.hit.later]
        later = [(start, end) for start, end in spans if start < end and (any_prefix or prompt.blocks.serves(end))]
        prompt.hit = prompt.hit._replace(cached=whole, later=later)

    def _publish(self, prompt: Prompt, cache: DynamicCache, end: int) -> None:
        """Publish a prompt's tokens up to `end`, the end of a chunk, from its cache."""
        blocks, states = prompt.blocks, None if self._store.states is None else take_states(cache, 0)
        blocks.publish(cache, 0, 0, prompt.tokens, end, states, prompt.hit.later)
        mark_written(cache, end if blocks.closed else blocks.written * self._store.block_size)

    @property
    def _alone(self) -> bool:
        """Whether the call may reuse the cache of an earlier call, and keep its own for later ones."""
        return len(self._loop.input_ids) == 1 and self._store.states is None

    def keep(self) -> None:
        """Keep the cache of a single row for later calls, which crop it to whole chunks of the prompt."""
        if self._caches and self._alone and self._requests.publishes():
            cache, prompt = self._caches[0], self.prompts[0]
            if columns(cache) == {self._computed[0]}:
                self._store.keep_cache(cache, prompt.tokens, self._loop)
            else:
                self._store.storage.evicts = True


def run(
    loop: Loop, store: PromptStore, calls: Calls, make: Callable[..., RowByRow] = RowByRow
) -> tuple[Any, list[Prompt]]:
    """Run a loop row by row, in chunks, and return its result and its prompts. `make` makes the model of the loop.

    Raises:
        UnsupportedError: A row of the loop cannot be computed separately.
    """
    prompts = prompts_of(loop.input_ids, loop.mask)
    _check(loop, prompts, store.probed.counts_padding)
    loop.extra_keys = (*loop.extra_keys, *conditions(loop.model))
    requests = PromptRequests.of(store, loop)
    rows = make(requests, loop, prompts, calls)
    try:
        result = rows.generate()
    finally:
        requests.close()
    try:
        rows.keep()
    except Exception as error:
        calls.warn_of_unkept(error)
    return result, prompts


def _check(loop: Loop, prompts: list[Prompt], counts_padding: bool) -> None:
    """Raise UnsupportedError for a loop whose rows cannot be computed one by one."""
    refuse_if(
        loop.mode not in BY_TOKEN, f"{DETERMINISTIC} only greedy search and sampling are supported, not {loop.mode}"
    )
    refuse_if(loop.images is not None, f"{DETERMINISTIC} chunks of a prompt may cut an image")
    refuse_if(loop.adapters is not None, f"{DETERMINISTIC} adapter_names are not supported")
    refuse_if(loop.has_types, f"{DETERMINISTIC} token types are not supported")
    refuse_if(loop.requested_outputs, f"{DETERMINISTIC} hidden states and attention weights are not supported")
    refuse_if(loop.continued is not None, f"{DETERMINISTIC} a returned cache cannot be continued")
    # Chunks are not the caller's, and only last logits are computed; for wrong values generate has its own errors.
    chunk, kept = loop.generation_config.prefill_chunk_size, loop.model_kwargs.get("logits_to_keep")
    positive = chunk is None or (isinstance(chunk, int) and chunk > 0)
    refuse_if(not positive, f"{DETERMINISTIC} prefill_chunk_size must be a positive integer")
    refuse_if(isinstance(kept, torch.Tensor), f"{DETERMINISTIC} logits_to_keep must not be a tensor")
    odd = any(not len(p.tokens) or p.pad + len(p.tokens) < loop.input_ids.shape[1] for p in prompts)
    refuse_if(odd, f"{DETERMINISTIC} every row needs tokens, and padding only on the left")
    counted = counts_padding and any(p.pad for p in prompts)
    refuse_if(counted, f"{DETERMINISTIC} padding is not computed, but this model counts it")


def conditions(model: Any) -> tuple[str | bytes, ...]:
    """Return keys for everything, except shapes, that decides the bits of KV.

    Calls with different keys share no blocks.
    """
    # Weights mapped from a file may be unaligned to 64 bytes, while a copy of them is aligned.
    alignments = bytes([weight.data_ptr() % 64 for weight in model.parameters()])
    on_gpu = model.device.type == "cuda"
    processor = torch.cuda.get_device_name(model.device) if on_gpu else torch.backends.cpu.get_cpu_capability()
    attention, threads = attention_implementation(model.config.get_text_config()), torch.get_num_threads()
    return ("bits", alignments, *map(str, (torch.__version__, processor, threads, float32_precision(), attention)))


def _down(number: int, step: int) -> int:
    """Return a number rounded down to a multiple of `step`."""
    return number // step * step
