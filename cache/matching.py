"""What of a prompt is cached, over all groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .allocation import Span
from .groups import Group
from .hashing import Words
from .pool import EMPTY, BlockPool
from .table import Ids

Mask = npt.NDArray[np.bool_]


class Match(NamedTuple):
    """Cached blocks of a prompt."""

    hit: int
    """Blocks of the prefix behind which every group can go on."""
    reused: Ids
    """Logical blocks behind the prefix that every group has."""
    listed: list[Ids]
    """Per group, blocks by logical block as far as they matter, -1 for none."""


def match_groups(
    groups: Sequence[Group], pools: Sequence[BlockPool], digests: Words, num_tokens: int, block_size: int, gaps: bool
) -> Match:
    """Finds the longest prefix that all groups can serve and, with `gaps`, the blocks behind it that all have."""
    listed = [pool.table.find(digests) for pool in pools]
    servable = np.ones(len(digests) + 1, np.bool_)
    for group, ids in zip(groups, listed, strict=True):
        servable &= group.servable(ids >= 0, num_tokens, block_size)
    hit = int(np.flatnonzero(servable)[-1])
    reused = EMPTY
    if gaps and not any(group.aligned for group in groups):  # a recurrent state cannot jump a gap
        everywhere: Mask = np.logical_and.reduce([ids[hit:] >= 0 for ids in listed])
        reused = (everywhere.nonzero()[0] + hit).astype(np.int32)
    return Match(hit, reused, listed)


def cached_part(group: Group, match: Match, listed: Ids, num_blocks: int, position: int, block_size: int) -> Ids:
    """A group's block table with the cached blocks that queries at `position` and later need, all else -1."""
    table = np.full(num_blocks, -1, np.int32)
    table[: match.hit] = listed[: match.hit]
    first = min(group.first_needed(position, block_size), match.hit)
    table[group.sink_blocks(block_size) : first] = -1
    if match.reused.size:
        table[match.reused] = listed[match.reused]
    return table


def cached_spans(match: Match, num_tokens: int, block_size: int) -> tuple[list[Span], bool]:
    """Token ranges of the cached blocks, neighbours joined, and whether the last token was cut off them.

    The last token is computed again for its logits though its KV is there.
    """
    hit = match.hit * block_size
    spans = [(0, hit)] if hit else []
    if match.reused.size:
        blocks = np.concatenate((np.arange(match.hit), match.reused))
        runs = np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
        spans = [(int(run[0]) * block_size, (int(run[-1]) + 1) * block_size) for run in runs]
    if not spans or spans[-1][1] < num_tokens:
        return spans, False
    start, end = spans.pop()
    if end - start > 1:
        spans.append((start, end - 1))
    return spans, True


def complement(spans: list[Span], num_tokens: int) -> list[Span]:
    """What `spans` leave of [0, num_tokens)."""
    if len(spans) < 2:
        start, end = spans[0] if spans else (0, 0)
        return [span for span in ((0, start), (end, num_tokens)) if span[0] < span[1]]
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
