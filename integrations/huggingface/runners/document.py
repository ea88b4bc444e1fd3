"""The runner of calls over a compressed document. It keeps the KV of questions in blocks of the prefix cache.

A question is the text after the document, and is admitted like any prompt. Its KV is valid for one document only, so
the identity of the document is an extra key of its blocks. Prompts without this key never find them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from ....cache import OutOfBlocks
from ..admit import PromptRequests
from ..api import CACHE_NAMES, attention_implementation, drop_cache, positions
from ..calls import Calls, RequestReport, UnsupportedError, refuse_if
from ..compression.kept import Content
from ..compression.layers import question_cache
from ..loop import Loop
from ..prompts import Prompt, PromptHit, prompts_of
from ..store.kept import PromptStore
from ..store.storage import block_index
from ..support import is_compiled
from . import deterministic
from .batch import Batch
from .contiguous import WatchedModel
from .deterministic import RowByRow
from .layout import forward

_OVER = "over a compressed document"


def check_arguments_over_document(arguments: dict[str, Any]) -> None:
    """Raise UnsupportedError for arguments of generate that no call over a document may have."""
    for name in (*CACHE_NAMES, "assistant_model", "cache_implementation", "custom_generate", "inputs_embeds"):
        refuse_if(arguments.get(name) is not None, f"{name}: got one, needs none for a call {_OVER}")


def check_loop_over_document(loop: Loop, content: Content) -> None:
    """Raise UnsupportedError for a loop that cannot read a document, or whose result might be wrong."""
    config, model = loop.generation_config, loop.model
    refuse_if(getattr(config, "is_assistant", None), f"is_assistant {_OVER}: the model drafts for another one")
    if loop.mode == "assisted_generation":
        lookup = config.prompt_lookup_num_tokens is not None and config.assistant_early_exit is None
        name = "assistant_early_exit" if config.assistant_early_exit is not None else "use_mtp"
        refuse_if(not lookup, f"{name} {_OVER}: of assisted generation only prompt lookup is served")
    refuse_if(loop.images is not None, f"images {_OVER}")
    refuse_if(loop.adapters is not None, f"adapter_names {_OVER}")
    refuse_if(is_compiled(model), f"model.compile() or torch.compile {_OVER}")
    wants_weights = getattr(config, "output_attentions", False) or loop.model_kwargs.get("output_attentions")
    if wants_weights and attention_implementation(model.config.get_text_config(decoder=True)) == "eager":
        raise UnsupportedError(f"output_attentions {_OVER}, whose tokens have no weights")
    if loop.mask is not None:
        raise UnsupportedError(
            f"attention_mask: got padded rows, needs questions of one length for a call {_OVER}; ask them one "
            "by one, or give a mask of ones if these tokens are no padding"
        )
    no_positions = loop.model_kwargs.get("position_ids") is None
    refuse_if(
        no_positions and content.position < len(content.tokens),
        f"a press that moves keys to new positions, in a model without position_ids, {_OVER}",
    )
    _check_begins(loop, content)


def _check_begins(loop: Loop, content: Content) -> None:
    """Raise ValueError unless every row begins with the document and has more tokens after it."""
    ids, length = loop.input_ids, len(content.tokens)
    needs = (
        f"got {ids.shape[1]} tokens, needs the {length} of the compressed document and more behind them, in every row"
    )
    both = min(length, ids.shape[1])
    differ = (ids[:, :both].cpu() != content.tokens[:both]).nonzero()
    if len(differ):
        row, place = differ[0].tolist()
        there = int(content.tokens[place])
        raise ValueError(
            f"input_ids: {needs}; row {row // loop.repeats} differs at token {place}: got {int(ids[row, place])}, "
            f"which is {there} in the document"
        )
    if ids.shape[1] <= length:
        raise ValueError(f"input_ids: {needs}")


def run(loop: Loop, store: PromptStore, content: Content, calls: Calls) -> tuple[Any, list[RequestReport]]:
    """Run a loop over a document. Return its result and a report for each of the caller's rows.

    Args:
        loop: A loop that `check_loop_over_document` has accepted.
        store: The store for the KV of questions.
        content: The compressed keys and values of the document.
        calls: Gets warnings about results that could not be stored.
    """
    loop.extra_keys = ("compressed document", content.key.hex(), *loop.extra_keys)
    read = len(content.tokens)
    if store.options.chunk is not None:
        result, _ = deterministic.run(loop, store, calls, partial(QuestionRows, content))
    else:
        requests = PromptRequests.of(store, loop)
        batch = QuestionBatch(requests, loop, content)
        result, read = WatchedModel(batch, calls.warn_of_unkept).generate(), batch.start
        drop_cache(result)  # the cache holds the document's own tensors
        calls.warn_of_full(batch.prompts)
    size = loop.input_ids.shape[1]
    return result, [RequestReport.of(size, [(0, read)]) for _ in range(len(loop.input_ids) // loop.repeats)]


def _turned(places: torch.Tensor, content: Content) -> torch.Tensor:
    """Return positions `[..., tokens]` of a row, adjusted to a press that moved the kept keys to positions 0, 1, 2, ...

    After the document, positions then follow the last kept key. Without such a press, no position changes.
    """
    length = len(content.tokens)
    return torch.cat([places[..., :length], places[..., length:] - (length - content.position)], -1)


class QuestionBatch(Batch):
    """The questions of one call. The document takes the place of left padding: `pad` is its length.

    If the model's layers have windows, the KV of questions is neither read from blocks nor published.
    """

    over_document = True

    def __init__(self, requests: PromptRequests, loop: Loop, content: Content) -> None:
        self._content, self.publishes_answers = content, requests.store.storage.any_prefix
        super().__init__(requests, loop, read_cached=not loop.requested_outputs)

    def _prompts(self) -> list[Prompt]:
        """Return the distinct questions of the call."""
        length = len(self._content.tokens)
        prompts = prompts_of(self.loop.input_ids[:, length:], None)
        for prompt in prompts:
            prompt.pad = length
        return prompts

    def _admit(self, prompt: Prompt) -> None:
        """Admit a question. Without room for its blocks, it is computed in the same way and not published."""
        try:
            if self.publishes_answers:
                super()._admit(prompt)
                return
        except OutOfBlocks as error:
            prompt.blocks.full = error
        prompt.blocks.closed = True

    def _begin(self) -> None:
        """Make the cache, with the shortest hit of all questions in whole blocks."""
        size = self.store.block_size
        cached = min(prompt.hit.cached for prompt in self.prompts) // size * size
        self.cache, self.start = question_cache(self._content, self.size), len(self._content.tokens) + cached
        for prompt in self.prompts:
            prompt.hit = PromptHit(cached, prompt.hit.later)
        if cached:
            self._read(cached)

    def inputs(self) -> dict[str, Any]:
        """Return the arguments with which the loop begins."""
        inputs, places = {self.loop.cache_name: self.cache}, self.loop.model_kwargs.get("position_ids")
        return inputs if places is None else inputs | {"position_ids": _turned(places, self._content)}

    def _read(self, cached: int) -> None:
        """Fill the layers with the first `cached` tokens of each question."""
        ((_, part),) = self.store.storage.kv
        for index, layer in enumerate(self.cache.layers):
            columns = self.length - layer.first + self.room
            sides = [layer.new_buffer((self.size, *spec.shape), columns, 0, spec) for spec in part.specs[index]]
            for prompt in self.prompts:
                blocks = block_index(prompt.blocks.read_from(0, 0, cached))
                for row in prompt.rows:
                    part.read(index, blocks, *(side[row, :, :cached] for side in sides))
            layer.adopt(*sides, layer.first + cached, layer.first)


class QuestionRows(RowByRow):
    """Questions computed row by row, in chunks that begin at the document's end, for deterministic=True.

    No block is read or published, so bits depend on the document and the question only.
    """

    def __init__(self, content: Content, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._content = content

    def _read(self, prompt: Prompt) -> tuple[Any, torch.Tensor]:
        cache, first, end = question_cache(self._content), len(self._content.tokens), len(prompt.tokens)
        for begin in range(first, end, self._chunk):
            logits = self._forward(prompt.tokens, begin, min(begin + self._chunk, end), cache)
        return cache, logits

    def _forward(self, tokens: np.ndarray, start: int, end: int, cache: Any) -> torch.Tensor:
        ids, model = torch.from_numpy(tokens[:end])[None].to(self._loop.model.device), self._loop.model
        given = None
        if self._content.position < len(self._content.tokens):
            given = {"position_ids": _turned(positions(model, ids, torch.ones_like(ids)), self._content)}
        logits: torch.Tensor = forward(model, tokens, start, end, cache, given).logits
        return logits[:, -1:]

    def add_cache(self, result: Any) -> None:
        """Give the result no cache, because the cache holds the document's own tensors."""
        drop_cache(result)

    def keep(self) -> None:
        """Keep nothing, because the cache holds the document's own tensors."""
