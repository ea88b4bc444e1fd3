"""Transformers' continuous batching over shared blocks in place of its own cache.

The loop, the scheduler, sampling, routing and cancellation remain transformers'. This module replaces the cache, the
forward pass, the queue of new requests, and the handling of a step in which nothing can be scheduled.
"""

from __future__ import annotations

import copy
import operator
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from .....cache import OutOfBlocks
from ...api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    RequestState,
    become_plain,
    fail,
    finish,
    make_scheduler,
    model_in_step,
    plain_processor,
    plain_start,
    serve_batches,
    share_prefixes,
    update_cb_config_after_cache_creation,
    without_masks,
)
from ...calls import Calls, UnsupportedError
from ...settings import value_of
from ...support import rope_keys
from ..packed import pack, run
from .blocks import ScheduledBlocks

MAX_BATCH_TOKENS = 8192  # tokens of a step by default: transformers' own default

NOT_OURS: dict[str, Any] = {
    "use_cuda_graph": False,
    "use_async_batching": False,
    "cpu_offload_space": 0.0,
    "max_blocks_per_request": 0,
    "default_compile_level": 0,
    "varlen_compile_config": None,
    "decode_compile_config": None,
}
"""Options of transformers' config that have no effect here, and the values that sessions set them to."""

UNBOUNDED = 1 << 30


class SaltedState(RequestState):  # type: ignore[misc]  # transformers is untyped here
    """A request with a salt, which it keeps through forks and when it is queued again."""

    salt: Any = None

    def create_equivalent_initial_request(self) -> Any:
        """Return the same request as transformers does, with its salt."""
        state = super().create_equivalent_initial_request()
        state.__class__, state.salt = SaltedState, self.salt
        return state


class RequestQueue(queue.Queue):  # type: ignore[type-arg]
    """The queue of new requests. `put`, in a client's thread, sets a request's salt. The loop's thread calls `get`."""

    def __init__(
        self,
        maxsize: int,
        salt_setting: object,
        check: Callable[[Any], str | None],
        fail: Callable[[Any, Exception], None],
    ) -> None:
        super().__init__(maxsize)
        # `check` returns why a request cannot be served, or None; `fail` ends such a request.
        self._salt_setting, self._check, self._fail = salt_setting, check, fail

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Give a request the salt of its thread, turn elements of a tensor or array into ints, and queue it."""
        item.__class__, item.salt = SaltedState, value_of(self._salt_setting)
        with suppress(TypeError):  # the check refuses tokens that are no integers
            item.initial_tokens = [operator.index(token) for token in item.initial_tokens]
            item.remaining_prefill_tokens = item.initial_tokens[:]
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next request that can be served."""
        while True:
            state = super().get(block, timeout)
            reason = self._check(state)
            if reason is None:
                return state
            self._fail(state, ValueError(reason))


class Processor(ContinuousBatchProcessor):  # type: ignore[misc]
    """Transformers' processor, with batches that run over blocks."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.cache.waiting = self.scheduler.waiting_requests
        self._offload = self.offloading_manager.offload_requests
        self.offloading_manager.offload_requests = self.make_room

    def prepare_next_batch(self) -> bool:
        """Schedule the next batch and return whether there is one."""
        if not self.scheduler.active_requests:  # transformers forgets this after a cancellation
            self.scheduler.block_new_requests = False
        self.cache.waiting = self.scheduler.waiting_requests
        self.cache.begin()
        try:
            return bool(super().prepare_next_batch())
        except OutOfBlocks:
            return False

    def step(self, model: Any) -> None:
        """Run the batch that was prepared."""
        spans, copies = self.cache.take_step()
        batch = self.inputs_and_outputs.get_model_kwargs(use_padding=False)
        if not batch["input_ids"].shape[1]:  # only forks: sampling still needs a row
            batch["input_ids"] = batch["position_ids"] = batch["input_ids"].new_zeros(1, 1)
        storage = self.cache.storage
        packed = pack(spans, storage.block_size)

        def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
            for group, pairs in copies:
                storage.copy(pairs, group)
            keep = {name: kwargs[name] for name in ("logits_to_keep",) if name in kwargs}
            return run(model, storage, packed, input_ids.long(), position_ids.long(), **keep)

        self.model_runner.compute_batch(model_in_step(model, forward), batch)
        self.cache.look()
        self.inputs_and_outputs.retrieve_device_outputs()

    def make_room(self) -> bool:
        """Make room: queue a running request again, or end one that can never fit. Return whether this was done.

        Transformers calls this if the cache is full. Unlike its own method, this one ends single requests and never
        the loop.

        Raises:
            OutOfBlocks: Only another session can make room.
        """
        if self._offload():
            return True
        blocks: ScheduledBlocks = self.cache
        if blocks.scheduled:
            return False
        active = list(self.scheduler.active_requests.values())
        if len(active) > 1:
            self._queue_again(active[-1])
            return True
        if blocks.others_hold():
            if not blocks.is_first():
                if active:
                    self._queue_again(active[0])
                blocks.let_go()
            raise OutOfBlocks(1, 0)
        stuck = active or blocks.refused
        if not stuck:
            return False
        self.fail(stuck[0], f"it needs more blocks than the {blocks.num_blocks} there are")
        return True

    def _queue_again(self, state: Any) -> None:
        """End a request and queue an equal one, which computes its tokens again later."""
        again = state.create_equivalent_initial_request()
        finish(state)
        self.scheduler.finish_request(state.request_id)
        self.scheduler.add_waiting_request(again)

    def fail(self, state: Any, reason: str) -> None:
        """End one request with an error."""
        fail(self, RuntimeError(f"request {state.request_id}: {reason}"), state)
        self.scheduler.finish_request(state.request_id)
        if self.scheduler.waiting_requests.pop(state.request_id, None) is not None:
            self.scheduler.waiting_requests_order.remove(state.request_id)
        self.scheduler.block_new_requests = False


class Session(ContinuousBatchingManager):  # type: ignore[misc]
    """Transformers' manager of continuous batching, over a model's blocks."""

    def __init__(
        self,
        handle: Any,  # a `ContinuousBatching`, whose module imports this one
        model: Any,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ) -> None:
        self._handle = handle
        self._given = model, generation_config, continuous_batching_config, workload_hints
        settings = copy.deepcopy(continuous_batching_config)
        _warn_of_options(settings, handle.calls)
        for name, value in NOT_OURS.items():
            setattr(settings, name, value)
        settings.page_size, settings.num_blocks = handle.block_size, None
        super().__init__(model, generation_config, settings, workload_hints)
        resolved = self.continuous_batching_config
        resolved.varlen_compile_config = resolved.decode_compile_config = None
        self.input_queue = RequestQueue(
            resolved.max_queue_size, handle.salt_setting, self._refusal, self.output_router.fail_and_deliver
        )

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Do nothing: packed passes run with any attention implementation, and other calls use the model's own."""

    def start(self) -> None:
        """Start the loop over blocks for the model's current state, or fall back to transformers' own manager."""
        if not self.is_running():
            self._prepare()
        plain_start(self)  # not super(): a manager that falls back is no session any more

    def _prepare(self) -> None:
        """Make the processor in the caller's thread. A failure in the loop's thread would end all requests."""
        try:
            made = getattr(self, "batch_processor", None)
            if made is not None and made.cache.shared is not self._handle.shared(self.model):
                self.batch_processor = None
        except Exception as error:
            self._fall_back(error)
            return
        if self.batch_processor is None:
            self.batch_processor = self.make_processor()
        if isinstance(self, Session):
            self._handle.calls.serve()

    def _fall_back(self, error: Exception) -> None:
        """Become a manager of transformers' own, which also serves the requests queued so far.

        Raises:
            UnsupportedError: The handle was made with fallback="raise".
        """
        self._handle.calls.raise_if_asked(error)
        become_plain(self, *self._given)
        self._handle.calls.fall_back(error)

    def _refusal(self, state: Any) -> str | None:
        """Return why a request cannot be served, or None. The loop's thread calls this."""
        processor: Any = self.batch_processor
        if processor is None:
            return None
        scheduler, request_id = processor.scheduler, state.request_id
        arrived = processor.cache.arrived
        if request_id in arrived or request_id in scheduler.active_requests or request_id in scheduler.waiting_requests:
            return f"request_id: got {request_id!r}, which is running, needs a new one"
        arrived.add(request_id)
        tokens, capacity = state.initial_tokens, processor.cache.capacity
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if not tokens:
            return "input_ids: got no token, needs one"
        if not all(isinstance(token, int) for token in tokens) or min(tokens) < 0 or max(tokens) >= vocabulary:
            return f"input_ids: got tokens out of range, needs integers from 0 to {vocabulary - 1}"
        if len(tokens) > capacity:
            return f"input_ids: got {len(tokens)} tokens, needs at most {capacity}, which the blocks hold"
        new = UNBOUNDED if state.max_new_tokens is None else state.max_new_tokens
        try:
            rope_keys(self.model.config, [0], len(tokens) + new)
        except UnsupportedError as error:
            return str(error)
        return None

    def make_processor(self) -> Any:
        """Return the loop's processor: the existing one after a reset, a new one over blocks, or transformers' own."""
        processor: Any = self.batch_processor
        if processor is not None:
            processor.reset()
            return processor
        try:
            return self._new_processor()
        except Exception as error:
            self._fall_back(error)
        return plain_processor(self)

    def _new_processor(self) -> Processor:
        """Make blocks for the model's current state, and transformers' scheduler and processor over them."""
        settings = self.continuous_batching_config
        cache = self._handle.blocks(
            self.model, settings.allow_block_sharing, settings.max_batch_tokens or MAX_BATCH_TOKENS
        )
        share_prefixes(self, cache.use_prefix_sharing)
        update_cb_config_after_cache_creation(
            cb_config=settings, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
        )
        config = without_masks(self.model.config.get_text_config())
        scheduler = make_scheduler(settings, cache)
        return Processor(
            cache=cache,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=settings,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )


serve_batches(Processor, Session)


def _warn_of_options(settings: Any, calls: Calls) -> None:
    """Warn once of each option of a continuous batching config that has no meaning here."""
    default = type(settings)()
    for name in (*NOT_OURS, "num_blocks"):
        value = getattr(settings, name)
        if value not in (getattr(default, name), NOT_OURS.get(name)):
            calls.warn(name, f"{name}={value!r} has no meaning here and is left out")
