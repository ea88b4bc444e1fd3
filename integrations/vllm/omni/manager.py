"""The interface of vLLM-Omni's `OmniPrefixCacheManager`, over a `TensorCache` that follows vLLM's slots."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....cache.tensors.step import StepSlots
from ....cache.tensors.tensor_cache import TensorCache
from .. import api
from ..scheduler_output import ScheduledRequest, entering_requests
from .steps import GroupView, SavedStep, copied_outputs, copied_rows


class OmniPrefixCacheManager:
    """A replacement for vLLM-Omni's manager, without threads and without staging copies.

    A step's rows are written once, into the slots of their tokens in host memory, pinned if there is a GPU. They
    are read once, by `materialize` or before the next step writes. In addition to vLLM-Omni it supports several groups
    of layers, hits shorter than a block, and blocks that kernels split. A request that resumes after a longer hit gets
    only the rows that it did not get before. `eager` is ignored, because nothing runs in the background.

    Thread-safe: threads take turns. A returned row always belongs to its token. If a row of the hidden states is
    missing, `materialize` raises OmniPrefixCacheUnmatchError. Missing rows of other names are zero, as in vLLM-Omni.
    """

    def __init__(self, config: Any, view: GroupView, *, eager: bool | None = None) -> None:
        self._config, self._view = config, view
        self._size = view.block_size
        self._hidden_key = api.ModelCachePolicy().hidden_key
        self._cache = TensorCache(None, config.num_blocks, self._size)
        self._limit = config.num_blocks * self._size
        self._lock = threading.RLock()
        self._taken = threading.Condition(self._lock)
        self._reached: dict[str, int] = {}  # for each live request, the position after its last saved token
        self._counts: dict[str, int] = {}
        self._hits: dict[str, tuple[int, ScheduledRequest]] = {}
        self._steps: dict[int, SavedStep] = {}
        self._next_step_id = 1

    def register_policy(self, policy: Any) -> None:
        """Set the name under which hidden states are kept; None: they are not kept. Other fields are ignored."""
        self._hidden_key = policy.hidden_key

    def new_step_starts(self, scheduler_output: Any) -> None:
        """Record which requests enter, with their hits, and which have ended.

        Raises:
            OmniPrefixCacheUnmatchError: A hit has no blocks.
        """
        with self._lock:
            self._hits = {}
            for request in scheduler_output.finished_req_ids or ():
                self._reached.pop(request, None)
            for each in entering_requests(scheduler_output, self._view.group):
                self._enter(each)
            self._counts = dict(scheduler_output.num_scheduled_tokens)

    def _enter(self, request: ScheduledRequest) -> None:
        """Record the hit of a request that enters: the tokens after those that it got before."""
        name, computed = request.request_id, request.begin
        had = min(self._reached.get(name, 0), computed)
        self._reached[name] = computed
        if had < computed:
            if len(request.blocks) * self._size < computed:
                got = f"{len(request.blocks)} for {computed} cached tokens"
                raise api.OmniPrefixCacheUnmatchError(
                    f"block_ids: got {got}: prefix hit of {name} carries no block_ids"
                )
            self._hits[name] = had, request

    def save_outputs(
        self,
        hidden_states: torch.Tensor | None,
        mm_outputs: Mapping[str, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        """Keep the outputs of a step; return its id, for one call of `materialize` or `discard_step`.

        The first num_tokens_unpadded rows of `hidden_states` count. Tensors of `mm_outputs` with num_tokens_unpadded or
        num_tokens_padded rows are kept; captured graphs return padded ones. Other outputs are passed on.

        Raises:
            OmniPrefixCacheUnmatchError: Rows do not fit the step, or the earlier rows of the same name.
            OmniPrefixCacheStagingTimeoutError: Too many steps wait to be read, and none was read in time.
        """
        count, counts = num_tokens_unpadded, self._counts
        requests = self._view.batch_req_ids()
        slots = self._view.slots(requests, counts) if count else StepSlots(0, [])
        if slots.count != count or slots.low < 0:
            raise api.OmniPrefixCacheUnmatchError(f"slot mapping covers {slots.count} of {count} scheduled tokens")
        if slots.high >= self._limit:
            raise api.OmniPrefixCacheUnmatchError(f"slots: got {slots.high}, needs at most {self._limit - 1}")
        with self._lock:
            try:
                kept, rest = self._sort(hidden_states, mm_outputs, count, num_tokens_padded)
                others, ready = copied_outputs(rest)
                if self._steps:
                    self._wait_for_room()
                    self._read_waiting()
                new = copied_rows(kept)
                self._cache.write(slots, kept)
            except BaseException:
                self._read_waiting()
                self._cache.write(slots, {})  # the step overwrites the KV of these slots, so this drops their old rows
                raise
            spans, begin, reached = {}, 0, self._reached
            for request in requests:
                end = begin + counts.get(request, 0)
                spans[request] = begin, end
                if request in reached:
                    reached[request] += end - begin
                begin = end
            step_id = self._next_step_id
            self._next_step_id += 1
            self._steps[step_id] = SavedStep(slots, tuple(kept), spans, self._hits, others, ready, new)
            self._hits = {}
            return step_id

    def _sort(
        self, hidden_states: torch.Tensor | None, outputs: Mapping[str, Any] | None, count: int, padded: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Register and return the tensors that have a row for each token. Also return all other outputs."""
        kept: dict[str, torch.Tensor] = {}
        rest: dict[str, Any] = {}
        if count and hidden_states is not None and self._hidden_key is not None:
            shape = hidden_states.shape
            if len(shape) < 2 or shape[0] < count:
                raise api.OmniPrefixCacheUnmatchError(f"hidden_states: got {list(shape)}, needs {count} rows")
            self._keep(kept, self._hidden_key, hidden_states, count)
        for name, value in outputs.items() if outputs else ():
            if api.is_hidden_key(name):
                continue
            per_token = count and isinstance(value, torch.Tensor) and value.dim() > 1 and value.layout == torch.strided
            if per_token and value.shape[0] in (count, padded):
                self._keep(kept, name, value, count)
            else:
                rest[name] = value
        return kept, rest

    def _keep(self, kept: dict[str, torch.Tensor], name: str, value: torch.Tensor, count: int) -> None:
        """Add the rows of one name to `kept`, and register the name."""
        try:
            self._cache.register(name, value.shape[1:], value.dtype)
        except ValueError as error:
            raise api.OmniPrefixCacheUnmatchError(str(error)) from error
        kept[name] = value if value.shape[0] == count else value[:count]

    def _wait_for_room(self) -> None:
        """Wait until fewer than `staging_depth` steps wait to be read."""
        limit = self._config.staging_claim_timeout_s
        if not self._taken.wait_for(lambda: len(self._steps) < self._config.staging_depth, limit):
            raise api.OmniPrefixCacheStagingTimeoutError(
                f"no place for a step within {limit} s: unconsumed step contexts (ids={sorted(self._steps)})"
            )

    def _read_waiting(self) -> None:
        """Read rows of waiting steps before their slots are written again."""
        for saved in self._steps.values():
            if saved.rows is None:
                try:
                    saved.rows = saved.read(self._cache, list(saved.spans))
                except api.OmniPrefixCacheUnmatchError as error:
                    saved.rows = error

    def materialize(self, step_id: int, req_ids: Sequence[str]) -> Any:
        """Return the outputs of a step for each request, once: its rows, preceded by the rows of its hit.

        Returns:
            Hidden states `[num_tokens, hidden_size]` in host memory by request (None if none are kept), and the other
            outputs by name and request.

        Raises:
            OmniPrefixCacheUnmatchError: The step is not waiting, a request was not in it, or rows of a hit's hidden
                states are missing.
        """
        with self._lock:
            saved = self._take(step_id)
            strange = [request for request in req_ids if request not in saved.spans]
            if strange:
                raise api.OmniPrefixCacheUnmatchError(
                    f"materialize(step {step_id}) got req ids outside the save snapshot: {sorted(strange)[:8]}"
                )
            rows = saved.read(self._cache, req_ids) if saved.rows is None else saved.rows
        if isinstance(rows, Exception):
            raise rows
        hidden = None
        outputs: dict[str, dict[str, Any]] = {}
        for name, mine in rows.items():
            if len(mine) > len(req_ids):  # the rows were read for all requests of the step
                mine = {request: mine[request] for request in req_ids}
            if api.is_hidden_key(name):
                hidden = mine
            else:
                outputs[name] = mine
        outputs.update(saved.split(req_ids))
        return api.StageCacheOutputs(hidden, outputs)

    def discard_step(self, step_id: int) -> None:
        """Drop the outputs of a step. Its rows stay for later hits."""
        with self._lock:
            self._take(step_id)

    def _take(self, step_id: int) -> SavedStep:
        """Remove a waiting step and return it."""
        saved = self._steps.pop(step_id, None)
        if saved is None:
            raise api.OmniPrefixCacheUnmatchError(
                f"step context {step_id} missing (have {sorted(self._steps)}); already consumed or never saved"
            )
        if len(self._steps) + 1 >= self._config.staging_depth:  # otherwise no save waits
            self._taken.notify_all()
        return saved

    def shutdown(self) -> None:
        """Forget the waiting steps."""
        with self._lock:
            self._steps.clear()
            self._taken.notify_all()
