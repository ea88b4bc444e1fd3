"""One call of generate: what its loop computes behind the cached part is kept in blocks."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from ..store import Lease, Store
from .batch import Asked, Batch
from .layers import num_tokens, release
from .prompts import Prompt
from .states import States, take_states


class Call(Batch):
    """A batch whose loop is watched: prompts are kept once they are computed, answers at the end. See `Batch`."""

    def __init__(self, model: Any, store: Store, asked: Asked, lease: Lease) -> None:
        self._due = self._published = False
        self._computed = self._kept = 0
        self._decode_states: dict[int, tuple[int, States]] = {}
        super().__init__(model, store, asked, lease)

    def computed(self, tokens: int) -> None:
        """To be told after each forward pass of the loop how many tokens a row had in it."""
        self._computed += tokens
        if not self._published and self.start + self._computed >= self.length:
            self._due = True  # not now: somebody waits for the first token
        elif self.store.states is not None and self.cache is not None:
            self._watch_states()

    def abandon(self) -> None:
        """The model goes on without the cache: nothing is reused and nothing kept."""
        self.cache, self.start, self._due, self._published = None, 0, False, True
        for prompt in self.prompts:
            prompt.cached = 0

    def publish(self, at_close: bool = False) -> None:
        """Makes the prompts findable once they are computed; called before the next forward pass, and at the end."""
        if not self._due:
            return
        self._due, self._published = False, True
        for prompt in self.prompts:
            if len(prompt.tokens):
                self.rows.write(prompt, self.cache, prompt.rows[0], prompt.pad, len(prompt.tokens), None, at_close)
        self._kept = self._computed
        self._release()

    def _release(self) -> None:
        """Lets layers with windows forget what is in blocks, or will not be."""
        if self.store.storage.chunk is None or self.cache is None:
            return
        kept = [p.pad + self.unwritten(p) for p in self.prompts if self._asked.by_row and self._answers_are_kept(p)]
        release(self.cache, min(kept, default=sys.maxsize))

    def _answers_are_kept(self, prompt: Prompt) -> bool:
        return len(prompt.tokens) > 0 and prompt.pad + len(prompt.tokens) == self.length

    def keep_so_far(self, sequences: torch.Tensor) -> None:
        """Keeps answers while they are generated, so that layers with windows need not hold all of them.

        Args:
            sequences: `[batch, length]` of prompts and answers up to now.
        """
        enough = self._computed - self._kept >= self.room
        if enough and self._published and self._asked.by_row and self.store.storage.chunk is not None:
            self._kept = self._computed
            self.keep_answers(sequences, last=False)

    def _watch_states(self) -> None:
        """Remembers a row's states where its last token ends a block: the next round may go on from there."""
        for prompt in self.prompts:
            length = self.start + self._computed - prompt.pad
            if length % self.store.block_size == 0:
                for row in prompt.rows:
                    self._decode_states[row] = (length, take_states(self.cache, row))

    def add_hidden(self, outputs: Any) -> None:
        """Puts the hidden states of cached tokens before those that the first pass has computed."""
        if self._hidden is not None and not self._computed and self.start:
            outputs.hidden_states = self._hidden.before(outputs.hidden_states, self.prompts, self.start)

    def keep_hidden(self, steps: Any) -> None:
        """Keeps what a result has of hidden states, for later calls that ask for them.

        Args:
            steps: Of each pass and layer `[batch, tokens, width]`, the prompts' first.
        """
        if self._hidden is None or self.cache is None or not steps or self._computed + self.start < self.length:
            return
        self.rows.settle()
        for prompt in self.prompts:
            whole = self._asked.by_row and len(prompt.rows) == 1 and not prompt.closed
            table = self.rows.tables(prompt.request_id)[0]
            self._hidden.keep(prompt, table, self.start, steps if whole else steps[:1])

    def keep_answers(self, sequences: torch.Tensor, last: bool = True) -> None:
        """Keeps what a loop generated that gives each row of the cache its row of the result.

        Args:
            sequences: `[batch, length]` of prompts and answers.
            last: Whether the answers are whole.
        """
        if self.cache is None:
            return
        have = self.start + self._computed if self.store.states is not None else num_tokens(self.cache)
        generated = sequences[:, self.length : have].cpu().numpy()
        for prompt in self.prompts:
            if self._answers_are_kept(prompt):
                answers = [_up_to_eos(generated[row], self._asked.eos) for row in prompt.rows]
                self.rows.append(prompt, self.cache, answers, self._decode_states, last)
        self._release()


def _up_to_eos(tokens: np.ndarray, eos: frozenset[int]) -> np.ndarray:
    ends = np.flatnonzero(np.isin(tokens, list(eos))) if eos else tokens[:0]
    return tokens[: int(ends[0]) + 1] if ends.size else tokens
