"""The lookup of a prompt's cached blocks in all groups, and the choice of blocks to allocate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .groups import Group, Mask
from .pool import EMPTY
from .runs import MovedSpan, Span, find_runs
from .table import Ids


class GroupHit(NamedTuple):
    """The blocks that a request gets in one group.

    Attributes:
        table: Block numbers by logical block. Entries of blocks that are not cached are undefined.
        held: The cached blocks of the table, in order.
        fresh: Logical blocks to allocate.
        slots: Host slots from which the leading blocks of `fresh` are loaded, one for each, in order.
    """

    table: Ids
    held: Ids
    fresh: Ids
    slots: Sequence[int] = ()


class Hit(NamedTuple):
    """The cached part of a prompt, and the blocks to allocate.

    Attributes:
        blocks: Number of complete blocks of the prefix that need not be computed.
        position: Number of tokens of the prefix that need not be computed.
        cached: All token ranges that need not be computed.
        groups: The blocks that each group gets.
        committed: Number of tokens of the prefix whose KV is cached.
        published: Number of leading logical blocks that are published in the prefix cache in all groups.
        num_tokens: Number of tokens that get blocks.
        written: Whether the last token is computed again although its KV is cached.
        attention_hit: See `Allocation.junction`.
        borrowed: Blocks of other requests that are read before this step computes anything, without duplicates. They
            are held until the next commit.
        copied: Number of first tokens of the first borrowed block that are copied to the first fresh block. `position`
            includes them.
        moved: Runs of tokens that are cached in borrowed blocks. Their target slots are not known yet.
    """

    blocks: int
    position: int
    cached: list[Span]
    groups: list[GroupHit]
    committed: int
    published: int
    num_tokens: int
    written: bool = False
    attention_hit: int | None = None
    borrowed: Ids = EMPTY
    copied: int = 0
    moved: Sequence[MovedSpan] = ()


def find_prefix(held: Ids, num_tokens: int, wanted: int, block_size: int) -> Hit:
    """Return a prompt's hit for a manager whose only group needs all blocks of a prefix.

    `held` are the cached blocks of the prefix. At least `wanted` tokens get blocks.
    """
    end = (hit := held.size) * block_size
    count = wanted if wanted > end else end
    num_blocks = -(-count // block_size)
    table = np.empty(num_blocks, np.int32)
    table[:hit] = held
    fresh = np.arange(hit, num_blocks, dtype=np.int32)
    return _prefix_hit(hit, end, num_tokens, [GroupHit(table, held, fresh)], hit, count)


def _prefix_hit(blocks: int, end: int, whole: int, groups: list[GroupHit], published: int, num_tokens: int) -> Hit:
    """Return a hit that covers the first `end` tokens of a prompt of `whole` tokens.

    If the hit covers the whole prompt, the last token is computed again for its logits.
    """
    position = end - 1 if 0 < end == whole else end
    cached = [(0, position)] if position else []
    return Hit(blocks, position, cached, groups, end, published, num_tokens, position < end)


def longest_hit(
    groups: Sequence[Group], resident: Sequence[Mask], num_tokens: int, block_size: int, rooms: Sequence[int] = ()
) -> int:
    """Return the number of blocks of the longest prefix after which every group can continue; see `Group.servable`.

    `rooms` limits the number of blocks that a hit may need in each group; empty: no limit.
    """
    servable = np.ones(resident[0].size + 1, np.bool_)
    for i, (group, there) in enumerate(zip(groups, resident, strict=True)):
        servable &= group.servable(there, num_tokens, block_size, rooms[i] if rooms else None)
    return int(servable.nonzero()[0][-1])


def find_in_groups(
    groups: Sequence[Group],
    listed: Sequence[Ids],
    block_size: int,
    num_tokens: int,
    wanted: int,
    gaps: bool = False,
    host_end: int = 0,
    on_host: Sequence[Ids] = (),
) -> Hit:
    """Return the longest prefix that all groups can serve.

    Args:
        groups: The groups of layers.
        listed: For each group, the cached blocks of the prompt by logical block, -1 for others.
        block_size: Number of tokens in a block.
        num_tokens: Number of tokens in the prompt.
        wanted: Number of tokens that get blocks. If more are cached, all of these get blocks.
        gaps: Whether to reuse cached blocks after the prefix too.
        host_end: Position at which computing can continue with the KV in host memory; 0: nothing is there.
        on_host: For each group, the host slots of the blocks before `host_end`, -1 for others.
    """
    resident, whole = [ids >= 0 for ids in listed], host_end // block_size
    for there, slots in zip(resident, on_host, strict=False):
        there[:whole] |= slots[:whole] >= 0
    hit = longest_hit(groups, resident, num_tokens, block_size)
    attention = [i for i, group in enumerate(groups) if not group.holds_states]
    stateful = len(attention) < len(groups)
    attention_hit = None
    if stateful and attention:
        attention_hit = longest_hit(
            [groups[i] for i in attention], [resident[i] for i in attention], num_tokens, block_size
        )
    end = hit * block_size
    if host_end > end:  # the KV in host memory ends inside a block
        hit, end = whole, host_end
    count, last = max(wanted, end), -(-end // block_size)
    num_blocks = -(-count // block_size)
    fresh, reused = np.arange(last, num_blocks, dtype=np.int32), EMPTY
    if gaps and not stateful:  # a recurrent state cannot jump a gap
        everywhere: Mask = np.logical_and.reduce([there[hit : count // block_size] for there in resident])
        reused = (everywhere.nonzero()[0] + hit).astype(np.int32)
        fresh = np.setdiff1d(fresh, reused, assume_unique=True)
    position = min(end, max(num_tokens - 1, 0))
    parts, published = [], hit
    for group, (spec, ids) in enumerate(zip(groups, listed, strict=True)):
        table = np.full(num_blocks, -1, np.int32)
        needed = spec.needed(position, last, block_size)
        whole_blocks = needed[needed < hit]
        table[whole_blocks] = ids[whole_blocks]
        table[reused] = ids[reused]
        loaded = needed[table[needed] < 0]
        mine = loaded if spec.holds_states else np.concatenate((loaded, fresh))
        parts.append(GroupHit(table, table[table >= 0], mine, on_host[group][loaded].tolist() if on_host else ()))
        published = min([published, *loaded[:1].tolist()])
    found = _prefix_hit(hit, end, num_tokens, parts, published, count)
    if reused.size:
        cached, written = cached_spans(hit, reused, num_tokens, block_size)
        return found._replace(cached=cached, written=written)
    if attention_hit is not None and attention_hit > hit:
        return found._replace(attention_hit=attention_hit * block_size)
    return found


def cached_spans(hit: int, reused: Ids, num_tokens: int, block_size: int) -> tuple[list[Span], bool]:
    """Return the token ranges of the `hit` leading and the `reused` blocks, and whether the last token was cut off.

    Neighbouring ranges are joined. The last token of a prompt is computed again for its logits although its KV is
    cached.
    """
    blocks = np.concatenate((np.arange(hit), reused))
    spans = [(first * block_size, end * block_size) for _, first, end in find_runs(blocks)]
    if spans[-1][1] < num_tokens:
        return spans, False
    start, end = spans.pop()
    if end - start > 1:
        spans.append((start, end - 1))
    return spans, True


def complement(spans: list[Span], num_tokens: int) -> list[Span]:
    """Return the parts of [0, num_tokens) that are not in `spans`."""
    if not spans or (len(spans) == 1 and not spans[0][0]):
        end = spans[0][1] if spans else 0
        return [(end, num_tokens)] if end < num_tokens else []
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
