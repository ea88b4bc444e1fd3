"""vLLM's scheduler with a made-up model, each of whose rows depends on all cached rows before it.

So wrong KV changes tokens. A worker's knowledge comes only from `SchedulerOutput`, as in vLLM's two model runners.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from vllm_traffic import make_request

from benchmarks.engines import vllm_scheduler

BLOCK, PRIME = 16, (1 << 31) - 1
RUNNERS = pytest.mark.parametrize("runner_v2", [False, True], ids=["v1", "v2"])
ENGINES = pytest.mark.parametrize(
    "kind",
    [{"runner_v2": v2, "asynchronous": asynchronous} for v2 in (False, True) for asynchronous in (False, True)],
    ids=["v1-sync", "v1-async", "v2-sync", "v2-async"],
)


def row(token: int, position: int, before: int) -> int:
    """Return the KV of a token; `before` is the sum of all rows before it."""
    return (token * 7_368_787 + position * 104_729 + before * 31 + 1) % PRIME


def following(tokens: list[int], count: int) -> list[int]:
    """Return the model's next `count` tokens after a sequence that is computed as a whole."""
    total, said, rows = 0, [], 0
    for position in range(len(tokens) + count - 1):
        token = tokens[position] if position < len(tokens) else said[position - len(tokens)]
        rows = row(token, position, total)
        total = (total + rows) % PRIME
        if position >= len(tokens) - 1:
            said.append(rows % 1000)
    return said


def make_scheduler(
    num_blocks: int,
    policy: str = "fifo",
    reuse: str = "",
    runner_v2: bool = False,
    more: dict[str, Any] | None = None,
    cannot_move: str = "",
    stock: bool = False,
    **options: Any,
) -> Any:
    """Return our scheduler, or vLLM's own with `stock`.

    `more` has further settings of ours, `options` are arguments of the benchmarks' scheduler, and `cannot_move` is
    workers' reason to move no KV.
    """
    from vllm.config import ModelConfig, VllmConfig

    from pc.integrations.vllm.eviction import AsyncPolicyScheduler, PolicyScheduler

    kind = AsyncPolicyScheduler if options.get("asynchronous") else PolicyScheduler
    if stock:
        kind = next(each for each in kind.__mro__ if each.__module__.startswith("vllm."))
    settings = ({"pc_reuse": reuse} if reuse else {}) | (more or {})
    # A scheduler runs no kernel, and vLLM for CPUs refuses runner V2 where triton has no backend for them.
    has_triton = mock.patch("vllm.config.vllm.HAS_TRITON", True)
    reason = mock.patch.object(ModelConfig, "pc_cannot_move", cannot_move, create=True)
    with has_triton, reason, mock.patch.object(VllmConfig, "use_v2_model_runner", runner_v2):
        given = {"kind": kind, "settings": settings, "budget": 160} | options
        return vllm_scheduler.make_scheduler(None if stock else policy, num_blocks, **given)


class ExactEngine:
    """An engine with that model.

    Attributes:
        said: Tokens generated so far, by request.
        computed: Tokens that forward passes have computed, by request.
        moved: Positions whose KV was copied from other places, by request.
    """

    def __init__(self, num_blocks: int, **options: Any) -> None:
        self.scheduler = make_scheduler(num_blocks, **options)
        self.lag = int(options.get("asynchronous", False))
        self.kv = [0] * (num_blocks * BLOCK)
        self.written: list[Any] = [None] * (num_blocks * BLOCK)  # the token of each slot's KV
        self.moved: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.computed: Counter[str] = Counter()
        self._flying: deque[tuple[Any, Any]] = deque()

    def add(self, name: str, tokens: list[int], generate: int = 4, salt: str | None = None, **extra: Any) -> Any:
        """Add a request; `extra` is its `extra_args`."""
        request = make_request(name, tokens, BLOCK, salt, generate, ignore_eos=True, extra_args=extra or None)
        self.said[name] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """Abort a request, as when a client disconnects."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.said.pop(name, None)

    def step(self) -> None:
        """Schedule, execute and pass the sampled tokens to the scheduler, one step later if it is asynchronous."""
        output = self.scheduler.schedule()
        self.check()
        self._flying.append((output, self._execute(output)))
        while len(self._flying) > (self.lag if output.num_scheduled_tokens else 0):
            self.scheduler.update_from_output(*self._flying.popleft())
        self.check()

    def run(self) -> None:
        """Run steps until no request is left."""
        while self.scheduler.requests:
            self.step()

    def _execute(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        self.begins = begins = self._follow(output)
        names, sampled = list(output.num_scheduled_tokens), []
        self.prepare(output)
        self._move(output)
        for name in names:
            begin, count = begins[name], output.num_scheduled_tokens[name]
            tokens, slots = self.tokens[name], self.slots(name, begin + count)
            assert begin + count <= len(tokens)
            total = sum(self.kv[slot] for slot in slots[:begin]) % PRIME
            for position in range(begin, begin + count):
                self.kv[slots[position]] = made = row(tokens[position], position, total)
                self.written[slots[position]] = tokens[position]
                total = (total + made) % PRIME
            self.computed[name] += count
            sampled.append([])
            if begin + count == len(tokens):
                tokens.append(made % 1000)
                sampled[-1].append(made % 1000)
                if name in self.said:
                    self.said[name].append(made % 1000)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)

    def prepare(self, output: Any) -> None:
        """Do what a worker does before the forward pass. This one does nothing."""

    def _move(self, output: Any) -> None:
        """Copy KV of the same tokens from other places, before what a request of the step computes."""
        owners = {block: name for name in output.num_scheduled_tokens for block in self.tables[name]}
        for sources, targets, deltas in getattr(output, "pc_moves", ()):
            name = owners[int(targets[0]) // BLOCK]
            begin = self.slots(name, self.begins[name]).index(int(targets[0]))
            assert targets.tolist() == self.slots(name, self.begins[name])[begin : begin + len(targets)]
            assert [self.written[slot] for slot in sources] == self.tokens[name][begin : begin + len(targets)]
            stood = np.arange(begin, begin + len(targets)) - deltas
            assert stood.min() >= 0
            assert (sources % BLOCK == stood % BLOCK).all()
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                self.kv[target], self.written[target] = self.kv[source], self.written[source]
            self.moved.setdefault(name, []).extend(range(begin, begin + len(targets)))

    def slots(self, name: str, count: int) -> list[int]:
        """Return the slots of a request's first `count` tokens."""
        return [self.tables[name][at // BLOCK] * BLOCK + at % BLOCK for at in range(count)]

    def _follow(self, output: Any) -> dict[str, int]:
        begins = {}
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.tables[new.req_id] = list(new.block_ids[0])
            begins[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, begin in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            fresh = list(blocks[0]) if blocks else []
            self.tables[name] = fresh if name in cached.resumed_req_ids else self.tables[name] + fresh
            begins[name] = begin
        return begins

    def check(self) -> None:
        """Recount references."""
        check_references(self.scheduler)


def check_references(scheduler: Any) -> None:
    """Check that the references to blocks are those of tables and of pins."""
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    tables = manager.req_to_blocks.values()
    held = Counter(block.block_id for table in tables for block in table if not block.is_null)
    jumps, pool = getattr(scheduler, "jumps", None), scheduler.kv_cache_manager.block_pool
    if jumps is not None:
        assert all(jumps.pinned.values())
        held.update(block.block_id for block in pinned_by(jumps))
    blocks = [block for block in pool.blocks if not block.is_null]
    assert {block.block_id: block.ref_cnt for block in blocks if block.ref_cnt} == dict(held)
    assert pool.get_num_free_blocks() == sum(not block.ref_cnt for block in blocks)


def pinned_by(jumps: Any) -> list[Any]:
    """Return the blocks that jumps pin, each as often as it is pinned."""
    pieces = [piece for found in (*jumps.pieces.values(), *jumps._moving.values()) for piece in found]
    runs = [block for pins in jumps.pinned.values() for block in pins.values()]
    return runs + [block for piece in pieces for block in piece.blocks]


def lose(scheduler: Any, count: int, rng: random.Random) -> None:
    """Evict `count` random cached blocks that no request holds."""
    pool = scheduler.block_pool
    cached = [block.block_id for block in pool.blocks if block.block_hash is not None and not block.ref_cnt]
    pool.evict_blocks(set(rng.sample(cached, min(count, len(cached)))))


def preempt(scheduler: Any, name: str) -> None:
    """Preempt a running request, as if blocks were lacking."""
    request = scheduler.requests[name]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    check_references(scheduler)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return random.Random(seed).choices(range(3, 1000), k=length)


Asked = tuple[list[int], int]
"""The prompt of a request, and the number of tokens that it generates."""


def random_traffic(
    engine: ExactEngine, rng: random.Random, ask: Callable[[dict[str, Asked]], tuple[list[int], int, dict[str, Any]]]
) -> dict[str, Asked]:
    """Run 60 requests with aborts, preemptions and evictions; return what the requests that were not aborted asked for.

    Args:
        engine: The engine. Its references to blocks are recounted after every step.
        rng: The source of the disturbances.
        ask: Called with the requests so far; returns the prompt of the next one, the number of tokens that it
            generates, and further arguments of `ExactEngine.add`.
    """
    asked: dict[str, Asked] = {}
    for number in range(60):
        tokens, count, more = ask(asked)
        asked[f"r{number}"] = tokens, count
        engine.add(f"r{number}", tokens, count, **more)
        for _ in range(rng.randrange(0, 12)):
            engine.step()
        if rng.random() < 0.3 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        if rng.random() < 0.3 and engine.scheduler.running:
            preempt(engine.scheduler, rng.choice(engine.scheduler.running).request_id)
        if rng.random() < 0.7:
            lose(engine.scheduler, rng.randrange(1, 6), rng)
    engine.run()
    return {name: asked[name] for name in engine.said}
