"""Replays request traces through a block pool and an eviction policy, and measures what would have been hit.

Rules, the same for every policy: requests run one after another in the order of their start; the blocks of the
current request are pinned while it runs and released at its end; the cache starts empty and cold misses count. A
request of more blocks than the capacity keeps its first blocks only. Hit rates are shares of all blocks of all
requests.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .hashing import BlockHasher
from .policies import EvictionPolicy, make_policy
from .policies.belady import Belady
from .pool import BlockPool

BlockIds = npt.NDArray[np.int64]
SESSION_GAP = 60.0
"""Seconds between the starts of sessions whose traces have times of their own only."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their start.

    Attributes:
        name: File name without its suffixes.
        block_size: Tokens a block.
        requests: Per request the ids of its blocks; an id stands for the whole prefix up to and including its block.
        outputs: Per request, tokens it generated.
        times: Per request, seconds since the trace began.
    """

    name: str
    block_size: int
    requests: list[BlockIds]
    outputs: list[int]
    times: list[float]
    unique_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        unique = np.unique(np.concatenate(self.requests)).size if self.requests else 0
        object.__setattr__(self, "unique_blocks", unique)

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests together."""
        return sum(r.size for r in self.requests)

    def part(self, start: float, end: float) -> Trace:
        """The requests between two shares of the trace, 0 to 1."""
        cut = slice(int(start * len(self.requests)), int(end * len(self.requests)))
        return Trace(self.name, self.block_size, self.requests[cut], self.outputs[cut], self.times[cut])


@dataclass(frozen=True)
class Result:
    """What one policy reached at one capacity."""

    trace: str
    policy: str
    capacity_share: float
    """Capacity as a share of the trace's unique blocks."""
    capacity_blocks: int
    hit_rate: float
    """Share of blocks in leading runs of cached blocks."""
    gap_hit_rate: float
    """Share of blocks cached anywhere in the prompt at lookup: what reuse behind gaps could take at most."""
    lru_ratio: float
    """`hit_rate` over that of lru at this capacity; nan when lru was not run or hit nothing."""
    seconds: float
    """Wall time of the replay."""


def load_trace(path: str | Path, block_size: int | None = None) -> Trace:
    """Reads a trace, `.jsonl` or `.jsonl.gz`.

    Two layouts are recognized by their keys. A request a line with `hash_ids`, `timestamp`, `output_length` (Mooncake:
    milliseconds, 512 tokens a block; Qwen-Bailian: seconds, `chat_id` present, 16 tokens a block). A session a line
    with `id`, `block_size` and `requests`, whose ids are local to the session and given whole (`hash_ids`) or as
    `keep` leading ids of the request before plus `runs` of [start, count]; sub-agents nest. Session k is taken to
    begin at k * 60 s.

    Args:
        path: The file.
        block_size: Tokens a block where the file does not say it and the above does not hold.

    Raises:
        ValueError: A line of neither layout.
    """
    path = Path(path)
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    if not lines:
        raise ValueError(f"path: {path} holds no requests")
    name = path.name.split(".")[0]
    if "hash_ids" in lines[0]:
        scale = 1.0 if "chat_id" in lines[0] else 1e-3
        size = block_size or (16 if "chat_id" in lines[0] else 512)
        rows = [
            (float(x.get("timestamp", i)) * scale, np.array(x["hash_ids"], np.int64), int(x.get("output_length", 0)))
            for i, x in enumerate(lines)
        ]
    elif "requests" in lines[0]:
        size = block_size or int(lines[0]["block_size"])
        rows = []
        for k, session in enumerate(lines):
            for t, ids, out in _session(session["requests"], SESSION_GAP * k):
                rows.append((t, ids + (k << 32), out))
    else:
        raise ValueError(f"path: {path} has lines with the keys {sorted(lines[0])}, needs hash_ids or requests")
    rows.sort(key=lambda row: row[0])
    return Trace(name, size, [r[1] for r in rows], [r[2] for r in rows], [r[0] for r in rows])


def _session(requests: Iterable[dict[str, Any]], start: float) -> Iterator[tuple[float, BlockIds, int]]:
    before: BlockIds = np.empty(0, np.int64)
    for request in requests:
        at = start + float(request.get("t", 0.0))
        if "requests" in request:
            yield from _session(request["requests"], at)
            continue
        if "hash_ids" in request:
            before = np.array(request["hash_ids"], np.int64)
        else:
            runs = [np.arange(first, first + count, dtype=np.int64) for first, count in request["runs"]]
            before = np.concatenate([before[: request["keep"]], *runs])
        yield at, before, int(request.get("out", 0))


def digests_of(ids: BlockIds) -> npt.NDArray[np.uint64]:
    """Two words a block that stand in for its hash: the id, scattered over 64 bits, and the id itself."""
    words = np.empty((ids.size, 2), np.uint64)
    words[:, 1] = ids.astype(np.uint64)
    mixed = words[:, 1] * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    words[:, 0] = mixed * np.uint64(0xBF58476D1CE4E5B9)
    words[:, 0] ^= words[:, 0] >> np.uint64(29)
    return words


def replay(
    trace: Trace, policy: str | EvictionPolicy, capacity: int, progress: Callable[[int], None] | None = None
) -> Result:
    """Runs a trace at one capacity; see the module's docstring for the rules.

    Args:
        trace: The requests.
        policy: A policy's name, a fresh policy, or "belady", which knows the future.
        capacity: Blocks.
        progress: Called now and then with the number of requests done since the last call.
    """
    name = policy if isinstance(policy, str) else type(policy).__name__.lower()
    made = Belady(trace.requests) if policy == "belady" else make_policy(policy)
    pool = BlockPool(capacity, BlockHasher("blake2b", trace.block_size, words=2), made)
    hits = anywhere = 0
    began = perf_counter()
    for number, (ids, output) in enumerate(zip(trace.requests, trace.outputs, strict=True)):
        digests = digests_of(ids)
        cached = pool.leading(digests, [])
        rest = digests[cached.size :]
        hits += cached.size
        anywhere += cached.size + int(np.count_nonzero(pool.table.find(rest) >= 0))
        if cached.size:
            pool.hold(cached)
        room = min(len(rest), pool.available)
        held = [cached]
        if room:
            lengths = np.arange(cached.size + 1, cached.size + room + 1, dtype=np.int32)
            fresh = pool.take(lengths, rest[:room])
            old, twins = pool.publish(fresh)
            if old.size:
                fresh[np.isin(fresh, old)] = twins
                pool.release(old)
            held.append(fresh)
        pool.policy.finished(output)
        pool.release(np.concatenate(held))
        if progress is not None and number % 256 == 255:
            progress(256)
    total = max(trace.num_blocks, 1)
    share = capacity / max(trace.unique_blocks, 1)
    return Result(
        trace=trace.name,
        policy=name,
        capacity_share=share,
        capacity_blocks=capacity,
        hit_rate=hits / total,
        gap_hit_rate=anywhere / total,
        lru_ratio=float("nan"),
        seconds=perf_counter() - began,
    )


def compare(
    trace: Trace,
    policies: Sequence[str],
    shares: Sequence[float],
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Replays every policy at every capacity; `lru_ratio` is filled in where lru is among the policies."""
    results = []
    for share in shares:
        capacity = max(1, round(share * trace.unique_blocks))
        row = [replay(trace, policy, capacity, progress) for policy in policies]
        lru = next((r.hit_rate for r in row if r.policy == "lru"), 0.0)
        for r in row:
            ratio = r.hit_rate / lru if lru else float("nan")
            results.append(Result(**{**r.__dict__, "capacity_share": share, "lru_ratio": ratio}))
    return results
