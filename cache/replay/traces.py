"""Request traces, which list the blocks of each request of a real workload, and hints from a trace's own future."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]
Row = tuple[float, BlockIds, int]  # start in seconds, blocks, tokens generated

BAD_LINE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, EOFError, RecursionError, zlib.error)
NEVER = 1 << 60  # number of a request that never comes
SESSION_GAP = 60.0  # seconds between starts of sessions, if a trace has only times within sessions


@dataclass(frozen=True)
class Trace:
    """A recorded workload: its requests in the order of their start.

    Attributes:
        name: File name without its suffixes.
        block_size: Number of tokens in a block.
        requests: Block ids of each request. An id identifies the whole prefix up to and including its block.
        outputs: Number of generated tokens of each request.
        times: Start of each request, in seconds since the trace began.

    Examples:
        >>> from pc.cache.replay import Trace, replay
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> trace.num_blocks, trace.unique_blocks, len(trace.part(0, 0.4).requests)
        (8, 4, 2)
    """

    name: str
    block_size: int
    requests: list[BlockIds]
    outputs: list[int]
    times: list[float]

    @cached_property
    def unique_blocks(self) -> int:
        """Number of different blocks of all requests together."""
        return np.unique(np.concatenate(self.requests)).size if self.requests else 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all requests together."""
        return sum(r.size for r in self.requests)

    def part(self, start: float, end: float) -> Trace:
        """Return the requests between two shares of the trace, 0 to 1."""
        cut = slice(int(start * len(self.requests)), int(end * len(self.requests)))
        name = f"{self.name} {start:.0%}-{end:.0%}"
        return Trace(name, self.block_size, self.requests[cut], self.outputs[cut], self.times[cut])


def load_trace(path: str | Path, block_size: int | None = None) -> Trace:
    """Read a trace from a `.jsonl` or `.jsonl.gz` file.

    The keys of the first line decide between two layouts.

    - A request in each line, with `hash_ids`, `timestamp` and `output_length`. In Mooncake's traces times are
      milliseconds and blocks have 512 tokens. In Qwen-Bailian's traces, which have `chat_id`, times are seconds and
      blocks have 16 tokens.
    - A session in each line, with `id`, `block_size` and `requests`. Ids are local to the session. A request has all
      ids (`hash_ids`), or it continues the request before. Then `keep` is the number of leading ids that both share,
      and `runs` of [start, count] give the others. Sub-agents are nested. Session k starts at k * 60 s.

    If an id of the first layout follows different blocks, ids identify only a block's own tokens. They are then
    replaced by ids of the whole prefix.

    Args:
        path: The file.
        block_size: Number of tokens in a block. None: the number that the file gives, or else the one above.

    Raises:
        ValueError: There are no requests, or a line has neither layout. The message names the line. Or `block_size` is
            below 1.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from pc.cache.replay import load_trace
        >>> line = json.dumps({"timestamp": 0, "hash_ids": [1, 2], "output_length": 8})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "mine.jsonl")
        ...     count = path.write_text(line)
        ...     trace = load_trace(path)
        >>> trace.name, trace.block_size, trace.requests
        ('mine', 512, [array([1, 2])])
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size: got {block_size}, needs at least 1")
    path = Path(path)
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    first: dict[str, Any] = {}
    rows: list[Row] = []
    number = 0
    with opener(path, "rt", encoding="utf-8") as file:
        try:
            for number, text in enumerate(file, 1):
                if text.strip():
                    line = json.loads(text)
                    first = first or line
                    rows += _checked(_rows(line, first, number - 1))
        except BAD_LINE as error:
            cause = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"path: {path}, line {number}: {cause}") from None
    if not rows:
        raise ValueError(f"path: {path} holds no requests")
    rows.sort(key=lambda row: row[0])
    size = block_size or int(first.get("block_size", 16 if "chat_id" in first else 512))
    if size < 1:
        raise ValueError(f"path: {path}, block_size: got {size}, needs at least 1")
    requests = [row[1] for row in rows]
    if "hash_ids" in first:
        requests = prefix_ids(requests)
    return Trace(path.name.split(".")[0], size, requests, [row[2] for row in rows], [row[0] for row in rows])


def _rows(line: Any, first: dict[str, Any], number: int) -> list[Row]:
    """Return the requests of a line, in the layout of the first line."""
    if not isinstance(line, dict):
        raise ValueError(f"got {type(line).__name__}, needs a JSON object")
    if "hash_ids" in first:
        at = float(line["timestamp"]) * (1.0 if "chat_id" in first else 1e-3) if "timestamp" in line else float(number)
        return [(at, _ids(line["hash_ids"]), int(line.get("output_length", 0)))]
    if "requests" in first:
        got, needs = (each.get("block_size") for each in (line, first))
        if got != needs:
            raise ValueError(f"block_size: got {got}, needs {needs} as in the first line")
        return [(at, ids + (number << 32), out) for at, ids, out in _session(line["requests"], SESSION_GAP * number)]
    raise ValueError(f"got the keys {sorted(first)}, needs hash_ids or requests")


def _checked(rows: list[Row]) -> list[Row]:
    """Return requests after a check of their times. NaN would leave requests in any order."""
    for at, _, _ in rows:
        if not math.isfinite(at):
            raise ValueError(f"got the time {at}, needs a finite number")
    return rows


def _session(requests: Iterable[dict[str, Any]], start: float) -> Iterator[Row]:
    """Yield the requests of a session that starts at `start` seconds, and those of its sub-agents."""
    before: BlockIds = np.empty(0, np.int64)
    for request in requests:
        at = start + float(request.get("t", 0.0))
        if "requests" in request:
            yield from _session(request["requests"], at)
            continue
        if "hash_ids" in request:
            before = _ids(request["hash_ids"])
        else:
            runs = [np.arange(index(first), first + index(count), dtype=np.int64) for first, count in request["runs"]]
            keep = int(request["keep"])
            if not 0 <= keep <= before.size:
                raise ValueError(f"keep: got {keep}, needs 0 to {before.size}, the ids of the request before")
            before = np.concatenate([before[:keep], *runs])
        if before.size and not 0 <= before.min() <= before.max() < 1 << 32:
            raise ValueError(f"got ids from {before.min()} to {before.max()}, a session's need 0 to 2**32 - 1")
        yield at, before, int(request.get("out", 0))


def _ids(values: Any) -> BlockIds:
    ids = np.array(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"got {str(values)[:40]} as ids, needs a list of integers")
    return ids.astype(np.int64)


def prefix_ids(requests: list[BlockIds]) -> list[BlockIds]:
    """Return ids that identify whole prefixes: the given ids, unless one of them follows different blocks."""
    if not any(ids.size for ids in requests):
        return requests
    ids = np.concatenate(requests)
    starts = np.cumsum([0, *(r.size for r in requests if r.size)][:-1])
    before = np.roll(ids, 1)
    at_start = np.zeros(ids.size, np.bool_)
    at_start[starts] = True
    order = np.argsort(ids, kind="stable")
    same = ids[order][1:] == ids[order][:-1]
    one, two = order[1:][same], order[:-1][same]
    if (at_start[one] == at_start[two]).all() and (at_start[one] | (before[one] == before[two])).all():
        return requests
    known: dict[tuple[int, int], int] = {}
    chained = []
    for request in requests:
        prefix, row = -1, []
        for block in request.tolist():
            prefix = known.setdefault((prefix, block), len(known))
            row.append(prefix)
        chained.append(np.array(row, np.int64))
    return chained


def digests_of(ids: BlockIds) -> npt.NDArray[np.uint64]:
    """Return two words for each block in place of its hash: the id, scattered over 64 bits, and the id itself."""
    words = np.empty((ids.size, 2), np.uint64)
    words[:, 1] = ids.astype(np.uint64)
    mixed = words[:, 1] * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    words[:, 0] = mixed * np.uint64(0xBF58476D1CE4E5B9)
    words[:, 0] ^= words[:, 0] >> np.uint64(29)
    return words


def next_turns(trace: Trace) -> list[int]:
    """Return for each request the number of the next request that continues it, or `NEVER`.

    A request continues another if it uses the other's last block but one, or its only block.
    """
    next_use: dict[int, int] = {}
    turns = []
    for number, ids in reversed(list(enumerate(trace.requests))):
        turns.append(next_use.get(int(ids[-2:][0]), NEVER) if ids.size else NEVER)
        next_use.update(dict.fromkeys(ids.tolist(), number))
    return turns[::-1]


def hints_of(trace: Trace, hints: str, seed: int = 0) -> list[float]:
    """Return the `returns` that `free` gets after each request.

    Args:
        trace: The requests.
        hints: "oracle" gives 1 if a later request continues the request, else 0. A number from 0.5 to 1 gives noisy
            hints with this area under the ROC curve (AUC): the true bit is flipped with probability 1 - AUC, and the
            hint is the probability of a continuation, given the resulting bit.
        seed: Seed of the noise.

    Raises:
        ValueError: `hints` is neither.

    Examples:
        >>> from pc.cache.replay import Trace, hints_of
        >>> requests = [np.array(ids) for ids in ([1, 2], [3], [1, 2], [4], [1, 2])]  # blocks of each prompt
        >>> trace = Trace("small", 16, requests, outputs=[0] * 5, times=[0.0] * 5)
        >>> hints_of(trace, "oracle")
        [1.0, 0.0, 1.0, 0.0, 0.0]
    """
    truth = np.array(next_turns(trace), np.int64) < NEVER  # whether a later request continues each
    if hints == "oracle":
        return [float(goes_on) for goes_on in truth]
    try:
        auc = float(hints)
    except ValueError:
        auc = 0.0
    if not 0.5 <= auc <= 1:
        raise ValueError(f"hints: got {hints!r}, needs oracle or an area under the curve of 0.5 to 1")
    said = truth ^ (np.random.default_rng(seed).random(truth.size) >= auc)
    base = float(truth.mean()) if truth.size else 0.0
    yes = auc * base / max(auc * base + (1 - auc) * (1 - base), 1e-12)
    no = (1 - auc) * base / max((1 - auc) * base + auc * (1 - base), 1e-12)
    return [yes if bit else no for bit in said.tolist()]
