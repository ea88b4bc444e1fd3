"""Replay of request traces through a block pool and an eviction policy, to measure the hits.

The rules are the same for every policy. Requests run one after another in the order of their start. The blocks of the
current request are pinned while it runs and released at its end. The cache starts empty and cold misses count. If a
request has more blocks than the capacity, only its first blocks are kept. Hit rates are shares of all blocks of all
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time

import numpy as np

from ...triton_ops._core.checks import check_integer, check_share
from ..hashing import BlockHasher
from ..policies import EvictionPolicy, make_policy
from ..pool import BlockPool
from .policies import Belady, NextTurn
from .traces import Trace, digests_of, hints_of, next_turns

ORACLES: dict[str, Callable[[Trace], EvictionPolicy]] = {
    "belady": lambda trace: Belady(trace.requests),
    "next_turn": lambda trace: NextTurn(next_turns(trace)),
}
DEAF = ("lru", *ORACLES)  # policies that use no hints and run only once


@dataclass(frozen=True)
class Result:
    """Result of one policy at one capacity.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> result = replay(trace, "lru", capacity=3)
        >>> result.policy, result.capacity_blocks, result.capacity_share
        ('lru', 3, 0.75)
    """

    trace: str
    policy: str
    hints: str
    """The hints that the policy received, as for `hints_of`. "none": no hints; "given": the caller's own list."""
    capacity_share: float
    """Capacity as a share of the trace's unique blocks."""
    capacity_blocks: int
    hit_rate: float
    """Share of blocks in leading runs of cached blocks."""
    gap_hit_rate: float
    """Share of blocks that were cached anywhere in the prompt at lookup: the upper bound for reuse after gaps."""
    lru_ratio: float
    """`hit_rate` divided by that of lru at this capacity; nan if lru was not run or had no hits."""
    seconds: float
    """CPU time of the replay."""


def replay(
    trace: Trace,
    policy: str | EvictionPolicy,
    capacity: int,
    progress: Callable[[int], None] | None = None,
    hints: str | Sequence[float] = "none",
    hits_of_each: list[int] | None = None,
) -> Result:
    """Run a trace at one capacity; see the module's docstring for the rules.

    Args:
        trace: The requests.
        policy: Name of a policy, or a new policy. "belady" knows the future. "next_turn" knows when each conversation
            resumes.
        capacity: Number of blocks.
        progress: Called from time to time with the number of requests done since the last call.
        hints: "none"; a name for `hints_of`; or, for each request, the `returns` that `CacheManager.free` gets.
        hits_of_each: A list to which the number of hit blocks of each request is appended.

    Raises:
        TypeError: `capacity` is no int, or a hint is no number.
        ValueError: `capacity` is below 1, the policy or the hints are unknown, there are not as many hints as requests,
            or one is not between 0 and 1.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> round(replay(trace, "lru", capacity=3).hit_rate, 2), round(replay(trace, "belady", 3).hit_rate, 2)
        (0.5, 0.5)
    """
    capacity = check_integer("capacity", capacity, 1, 30)
    hint_name = hints if isinstance(hints, str) else "given"
    returns = None if hint_name == "none" else hints_of(trace, hints) if isinstance(hints, str) else hints
    if returns is not None and len(returns) != len(trace.requests):
        raise ValueError(f"hints: got {len(returns)}, needs one for each of the {len(trace.requests)} requests")
    for hint in () if returns is None else returns:
        check_share("returns", hint)
    name = policy if isinstance(policy, str) else type(policy).__name__.lower()
    made = ORACLES[policy](trace) if isinstance(policy, str) and policy in ORACLES else make_policy(policy)
    pool = BlockPool(capacity, BlockHasher("blake2b", trace.block_size, words=2), made)
    hits = anywhere = 0
    began = process_time()
    for number, (ids, output) in enumerate(zip(trace.requests, trace.outputs, strict=True)):
        digests = digests_of(ids)
        cached = pool.table.leading(digests)
        rest = digests[cached.size :]
        hits += cached.size
        if hits_of_each is not None:
            hits_of_each.append(cached.size)
        anywhere += cached.size + int(np.count_nonzero(pool.table.find(rest) >= 0))
        if cached.size:
            pool.hold(cached)
        room = min(len(rest), pool.available)
        held = [cached]
        if room:
            lengths = np.arange(cached.size + 1, cached.size + room + 1, dtype=np.int32)
            fresh = pool.take(lengths)
            old, duplicates = pool.publish(fresh, rest[:room])
            if old.size:
                fresh[np.isin(fresh, old)] = duplicates
                pool.release(old)
            held.append(fresh)
        if returns is not None:
            pool.policy.returning(returns[number])
        pool.policy.finished(output)
        pool.release(np.concatenate(held))
        if progress is not None and number % 256 == 255:
            progress(256)
    total, share = max(trace.num_blocks, 1), capacity / max(trace.unique_blocks, 1)
    rates = hits / total, anywhere / total, float("nan")
    return Result(trace.name, name, hint_name, share, capacity, *rates, process_time() - began)


def compare(
    trace: Trace,
    policies: Sequence[str],
    shares: Sequence[float],
    progress: Callable[[int], None] | None = None,
    unique_blocks: int | None = None,
    hints: Sequence[str] = ("none",),
) -> list[Result]:
    """Replay every policy at every capacity. `lru_ratio` is filled in if lru is among the policies.

    Args:
        trace: The requests.
        policies: Names of policies.
        shares: Capacities, as shares of `unique_blocks`.
        progress: As in `replay`.
        unique_blocks: Number of unique blocks in the whole trace, if `trace` is a part. None: of `trace`.
        hints: Hints, as in `replay`. Each is tried with every policy. lru, belady and next_turn read no hints and run
            once.

    Examples:
        >>> from pc.cache.replay import Trace, compare
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> [(row.policy, round(row.lru_ratio, 2)) for row in compare(trace, ["lru", "lfu"], shares=[0.75])]
        [('lru', 1.0), ('lfu', 1.0)]
    """
    results = []
    for share in shares:
        capacity = max(1, round(share * (unique_blocks or trace.unique_blocks)))
        row = [
            replay(trace, policy, capacity, progress, hint)
            for number, hint in enumerate(hints)
            for policy in policies
            if not number or policy not in DEAF
        ]
        lru = next((r.hit_rate for r in row if r.policy == "lru"), 0.0)
        for r in row:
            ratio = r.hit_rate / lru if lru else float("nan")
            results.append(Result(**{**r.__dict__, "capacity_share": share, "lru_ratio": ratio}))
    return results
