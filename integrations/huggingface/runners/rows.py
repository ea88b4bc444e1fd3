"""The model of a loop as runners see it that compute each row of the batch themselves."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..admit import PromptRequests
from ..api import CACHE, DynamicCache, ModelInLoop, StoppingCriteriaList, drop_cache
from ..calls import Calls, described
from ..loop import CONTINUED, Loop
from ..prompts import Prompt
from ..store.blocks import RequestBlocks
from ..store.kept import record_of
from ..support import host_copy
from .layout import lay_out


class RecordedCriteria(StoppingCriteriaList):  # type: ignore[misc]  # transformers is untyped here
    """Stopping criteria that record which rows have stopped."""

    finished: torch.Tensor | None = None
    _drops = False

    @classmethod
    def of(cls, loop: Loop) -> RecordedCriteria:
        """Return the stopping criteria of a loop."""
        criteria, config = cls(loop.options["stopping_criteria"]), loop.generation_config
        # After an eos a row gets padding. Its logits and its KV matter only to a caller that reads them.
        seen = loop.own_processors or config.output_scores or config.output_logits or config.return_dict_in_generate
        criteria._drops = not seen and any(hasattr(c, "eos_token_id") for c in criteria)
        return criteria

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return which rows stop now, as transformers' own list decides."""
        done = super().__call__(input_ids, scores, **kwargs)
        self.finished = done if self.finished is None else self.finished | done
        return done

    def dropped(self, num_rows: int) -> list[bool]:
        """Return for each row whether no more passes are needed: it has stopped, and its logits and KV are not read."""
        if not self._drops or self.finished is None:
            return [False] * num_rows
        finished: list[bool] = self.finished.tolist()
        return finished


class RowsInLoop(ModelInLoop):
    """The model of a loop, with passes of a runner in place of its forward pass.

    Subclasses override the methods of `ModelInLoop`, and `add_cache`.

    Args:
        requests: Admits the prompts. The caller must hold the only strong reference.
        loop: The call, greedy search or sampling.
        prompts: The prompts of its rows.
        calls: Gets warnings.
    """

    def __init__(self, requests: PromptRequests, loop: Loop, prompts: Sequence[Prompt], calls: Calls) -> None:
        super().__init__(loop)
        self._requests: PromptRequests = weakref.proxy(requests)
        self._store, self.prompts, self._calls = requests.store, prompts, calls
        self._criteria = RecordedCriteria.of(loop)

    def generate(self) -> Any:
        """Run the loop and return its result, with a cache if transformers' own result has one."""
        result = self._loop.run(self, {"stopping_criteria": self._criteria})
        if not isinstance(result, torch.Tensor):
            self.add_cache(result)
        return result

    def add_cache(self, result: Any) -> None:
        """Replace transformers' empty cache in a dict result; see `put_cache`."""
        raise NotImplementedError

    def put_cache(
        self,
        result: Any,
        blocks: Sequence[RequestBlocks] = (),
        caches: Mapping[int, DynamicCache] = MappingProxyType({}),
        computed: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Put a copy of all rows' KV into a dict result of the loop, in place of transformers' empty cache.

        If that fails, as for lack of memory, the result has no cache, and a warning says so.

        Args:
            result: The result. All its tokens but the last were computed in every row.
            blocks: The blocks of each row, unless `caches` has the rows.
            caches: The cache of each row.
            computed: The tokens from which the KV of each row was computed. If they are those of the result, a later
                call can continue the cache. None: only the model's own generate can.
        """
        drop_cache(result)
        loop, store, sequences = self._loop, self._store, host_copy(result.sequences)
        ids = sequences[:, :-1]  # the last token was not computed
        pads = [0] * len(ids) if loop.mask is None else host_copy(loop.mask).argmax(1).tolist()
        rows = [Prompt("", line[pad:], pad, [row]) for row, (line, pad) in enumerate(zip(ids, pads, strict=True))]
        for row, own in zip(rows, blocks, strict=False):
            row.blocks = own
        try:
            cache, length = store.make_cache(1), ids.shape[1]
            lay_out(cache, store.storage, rows, caches, length, length, length)
            if computed is not None and all(np.array_equal(r.tokens, c) for r, c in zip(rows, computed, strict=True)):
                setattr(cache, CONTINUED, record_of(cache, store, sequences, loop, loop.mask))
            result[CACHE] = cache
        except Exception as error:
            self._calls.warn("no cache in a result", f"a result has no cache: {described(error)}")
