"""`CacheManager.explain`: why the cached prefix of a prompt ends where it does.

The block after the hit is looked up by its hash in tables, running requests and remembered evictions (history.py). If
it is in none of them, the prompt's tokens and keys are compared with remembered texts.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ..hashing import BlockHasher, Chain, Words, feed_all, split_digests
from ..keys import EncodedKeys, ExtraKeys, Key, KeyAt, approximate_from, encode_keys
from ..lookup import Hit, find_in_groups, longest_hit
from ..request import Request
from ..reuse.content import Tokens, common_length
from ..reuse.moved import MovedText
from ..runs import find_runs
from .history import Ended

if TYPE_CHECKING:
    from ..groups import Group
    from ..state import ManagerState
    from ..table import Ids

EXCERPT = 16
"""Number of tokens of a text that an explanation shows."""


class GroupMiss(NamedTuple):
    """The reason why one of several groups cannot extend a hit.

    Attributes:
        group: Number of the group.
        kind: Name of its spec: "FullAttention", "SlidingWindow", "Recurrent", "Tensors".
        matched: Number of tokens that this group alone could serve.
        reason: Why it cannot serve more than the hit. "evicted": a block that it needs was evicted. "uncommitted": a
            running request computes the block. "state": no state was cached there (`CacheManager.checkpoint`). "never":
            no request has computed the block. None: another group ends the hit.
        position: Start of the first missing block; for a group of states, the end of the block whose state is missing.
        there: With "evicted", the seconds since the eviction, or None if its time is forgotten. With "uncommitted", the
            request.

    Examples:
        >>> groups = [pc.FullAttention(), pc.Recurrent(num_blocks=4)]
        >>> manager = pc.CacheManager(16, block_size=4, groups=groups)
        >>> allocation, merged = manager.allocate("a", range(12)), manager.commit("a", 12)
        >>> for miss in manager.explain(range(13)).groups:
        ...     print(miss.kind, miss.matched, miss.reason, miss.position)
        FullAttention 12 None None
        Recurrent 0 state 12
    """

    group: int
    kind: str
    matched: int
    reason: str | None = None
    position: int | None = None
    there: Any = None

    def __str__(self) -> str:
        said = f"group {self.group} ({self.kind})"
        if self.reason is None:
            return f"{said} lacks nothing up to token {self.matched}"
        seconds = f" {self.there:.1f} s ago" if self.reason == "evicted" and self.there else ""
        why = {
            "evicted": f"evicted{seconds}",
            "uncommitted": f"not committed yet by request {self.there!r}",
            "state": "none was cached there",
            "never": "no request has computed it",
        }[self.reason]
        where = f"state at token {self.position}" if self.kind == "Recurrent" else f"block of token {self.position}"
        return f"{said} lacks the {where}: {why}"


@dataclass(frozen=True)
class Explanation:
    """The cached length of a prompt, and the reason why it is not longer; see `CacheManager.explain`.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> allocation, merged = manager.allocate("a", range(12)), manager.commit("a", 12)
        >>> print(manager.explain([0, 1, 2, 3, 4, 5, 60, 70, 80]))
        4 of 9 tokens are cached: token 6 is 60, but 6 in the longest matching text
    """

    num_tokens: int
    """Number of tokens in the prompt."""
    matched: int
    """Number of leading tokens of the prompt that need not be computed."""
    reason: str | None
    """Why the next block is not reused. "token": the longest matching text has another token there.
    "keys": that text has other extra keys (adapter, image). "salt": it has another salt. "evicted": the block was
    evicted. "compressed": it was freed when its prompt was compressed. "uncommitted": a running request has not
    committed it yet. "block": the matching text, or the prompt, ends inside the block. "window": layers with a window
    or with states lack blocks that they need to continue there. "never": no similar text is remembered. "changed": no
    similar text is remembered, because the cache was emptied for a changed model. None: `matched` is the maximum."""
    position: int
    """The position of the first different token or key; otherwise the start of the first block that is not reused."""
    here: Any = None
    """With "token", the prompt's next 16 tokens from there on. With "keys", its own keys."""
    there: Any = None
    """Details by reason. "token": the other text's tokens. "keys": its keys. "evicted": seconds since the eviction, or
    None if forgotten. "uncommitted": the request. "block": number of matching tokens in the block. "window": the group.
    "changed": the changed part of the model. With "salt", None: a text with another salt is never shown."""
    gap_tokens: int = 0
    """Number of additional tokens that `reuse="gap"` would find."""
    moved_tokens: int = 0
    """Number of additional tokens after the exact prefix that `reuse="anywhere"` would find, at any position."""
    texts: tuple[str, str] | None = None
    """`here` and `there` as text, if a tokenizer was given."""
    groups: tuple[GroupMiss, ...] = ()
    """With several groups, what each of them lacks where the hit ends."""

    def __str__(self) -> str:
        if self.reason is None:
            return f"{self.matched} of {self.num_tokens} tokens are cached, which is the most possible"
        at, there = self.position, self.there
        why = {
            "token": lambda: (
                f"token {at} is {self.here[0]}, but {there[0]} in the longest matching text"
                if self.texts is None
                else f"from token {at} on it says {self.texts[0]!r}, not {self.texts[1]!r}"
            ),
            "keys": lambda: f"from token {at} on the same text has other keys: {there!r}, not {self.here!r}",
            "salt": lambda: f"from token {at} on the same text is cached under another salt",
            "evicted": lambda: f"the block of token {at} was evicted" + (f" {there:.1f} s ago" if there else ""),
            "compressed": lambda: f"the block of token {at} was freed when its prompt was compressed",
            "uncommitted": lambda: f"the block of token {at} is not committed yet by request {there!r}",
            "block": lambda: f"only whole blocks are found, and {there} tokens of the block of token {at} agree",
            "window": lambda: f"from token {at} on, group {there} lacks earlier blocks",
            "changed": lambda: f"nothing like it was seen since the cache was emptied because {there} changed",
            "never": lambda: f"nothing like it was seen from token {at} on",
        }[self.reason]()
        saved = [f"{n} {how}" for n, how in ((self.gap_tokens, "over gaps"), (self.moved_tokens, "anywhere")) if n]
        more = f"; more would be found: {', '.join(saved)}" if saved else ""
        shown = self.groups if self.reason in ("window", "evicted", "uncommitted") else ()
        groups = "".join(f"; {miss}" for miss in shown)
        return f"{self.matched} of {self.num_tokens} tokens are cached: {why}{groups}{more}"


class Source(NamedTuple):
    """The parts of a cache that an explanation reads. The cache is a manager's or, through an adapter, an engine's.

    Attributes:
        hasher: The hash function of blocks.
        groups: The groups of the cache.
        find: For each group, a function that returns the cached block of each hash, -1 where no block has it.
        texts: Pairs of a text and its request: first remembered texts, oldest first, with None as their request. Then
            the texts of running requests, each with the request's id.
        evicted: Evictions: the time, the hashes of the evicted blocks, and the group.
        manager: The state of a manager, to find parts of blocks and text at other positions that it would reuse. None
            for an engine's cache.
    """

    hasher: BlockHasher
    groups: Sequence[Group]
    find: Sequence[Callable[[Words], Ids]]
    texts: Sequence[tuple[Ended, Hashable]]
    evicted: Iterable[tuple[float, Words, int]] = ()
    manager: ManagerState | None = None


Known = list[tuple[Request, Hashable]]
"""Texts, each from its first token on, as requests with tokens, keys, digests and `committed`. The second value is the
id of a running request, else None."""


def explain(
    state: ManagerState, tokens: array[int], keys: EncodedKeys, below: Callable[[bytes], bool] | None = None
) -> Explanation:
    """Explain how far a manager caches a prompt; see `CacheManager.explain`."""
    if below is not None and not callable(below):
        raise TypeError(f"below: got {below!r}, needs a function of a hash, or None")
    texts: list[tuple[Ended, Hashable]] = [(entry, None) for entry, _ in state.history.ended]
    for name, request in state.running.items():
        text = request.tokens + request.pending if request.pending else request.tokens
        texts.append(((request.keys, None, text, request.committed), name))
    find = [pool.table.find for pool in state.pools]
    evicted = [entry for entry, _ in state.history.evicted]
    return explain_from(Source(state.hasher, state.groups, find, texts, evicted, state), tokens, keys, below)


def explain_from(
    source: Source, tokens: array[int], keys: EncodedKeys, below: Callable[[bytes], bool] | None = None
) -> Explanation:
    """Explain how far a prompt is cached, and why no further.

    Args:
        source: The cache.
        tokens: The prompt.
        keys: Its salt and extra keys.
        below: Returns whether a lower tier has the block of a hash. Such blocks count as cached if they directly follow
            the hit.
    """
    hasher = copy.copy(source.hasher)
    hasher.begin = feed_all  # so that an explanation adds nothing to the remembered hashes
    size, count = source.hasher.block_size, len(tokens)
    chain = Chain(hasher, keys)
    digests = chain.extend(tokens, count // size)
    prompt = Request(tokens, chain, digests, keys)
    listed = [find(digests) for find in source.find]
    hit, over_gaps = (find_in_groups(source.groups, listed, size, count, count, gaps) for gaps in (False, True))
    gap_tokens = sum(end - start for start, end in over_gaps.cached) - hit.position
    blocks = hit.blocks
    if below is not None and not gap_tokens:
        blocks += sum(takewhile(bool, map(below, split_digests(digests)[blocks:])))
    if blocks > hit.blocks:
        hit = hit._replace(blocks=blocks, position=min(blocks * size, max(count - 1, 0)))
    elif source.manager is not None:
        hit = source.manager.extended(prompt, hit)
    if hit.position >= count - 1:
        return Explanation(count, hit.position, None, hit.position)
    known = list(_known(source, hasher, prompt))
    why = _why_by_hash(source, known, prompt, hit.blocks) or _why_by_text(source, prompt, known, hit)
    moved = _moved_tokens(source, hasher, prompt, known, hit)
    groups = _by_group(source, known, prompt, hit)
    return Explanation(count, hit.position, *why, gap_tokens, moved, groups=groups)


Why = tuple[str, int, Any, Any]
"""`reason`, `position`, `here` and `there` of an explanation."""


def _as_array(text: Request) -> Tokens:
    return np.frombuffer(text.tokens, np.uint32) if text.tokens else np.empty(0, np.uint32)


def _known(source: Source, hasher: BlockHasher, prompt: Request) -> Iterator[tuple[Request, Hashable]]:
    """Yield the texts of a source as in `Known`: remembered texts, oldest first, and texts of running requests."""
    size = source.hasher.block_size
    needed = {before for (_, before, *_), _ in source.texts}
    text_before = {digest: (prompt.tokens, i) for i, digest in enumerate(split_digests(prompt.digests), 1)}
    for (keys, before, tokens, committed), request_id in source.texts:
        if before is not None:
            if (earlier := text_before.get(before)) is None:
                continue  # the request that computed the earlier text is forgotten
            tokens = earlier[0][: earlier[1] * size] + tokens
        moved = approximate_from(keys)
        if moved is not None:  # KV from there on is approximate; the same text has other hashes in an exact prompt
            keys, tokens, committed = keys._replace(placed=()), tokens[:moved], min(committed, moved)
        digests = hasher.hash_blocks(tokens, keys)
        text_before.update({key: (tokens, i) for i, key in enumerate(split_digests(digests), 1) if key in needed})
        yield Request(tokens, None, digests, keys, committed=committed), request_id


def _why_by_hash(source: Source, known: Known, prompt: Request, block: int) -> Why | None:
    """Return why the prompt's block after the hit is not reused; None if its hash was never seen."""
    if block == len(prompt.digests):
        return None
    start, digest = block * source.hasher.block_size, prompt.digests[block]
    there = [bool(find(digest[None])[0] >= 0) for find in source.find]
    parts = [group.holds_states or bool(group.first_needed(1 << 40, 1)) for group in source.groups]
    if any(there) and all(is_there for is_there, part in zip(there, parts, strict=True) if not part):
        lacking = [i for i, part in enumerate(parts) if part]
        return "window", start, None, min(lacking, key=lambda i: there[i])
    found = _why_not_cached(source, known, prompt, block)
    return found and (found[0], start, None, found[1])


def _why_not_cached(
    source: Source, known: Known, prompt: Request, block: int, group: int | None = None
) -> tuple[str, Any] | None:
    """Return why a block is not cached (in a group), or None if its hash was never seen.

    The second value is the seconds since an eviction, or the request that has not committed the block.
    """
    digest, end = prompt.digests[block], (block + 1) * source.hasher.block_size
    same = [pair for pair in known if len(pair[0].digests) > block and (pair[0].digests[block] == digest).all()]
    for text, request_id in same:
        if request_id is not None and text.committed < end:
            return "uncommitted", request_id
    times = [when for when, words, of in source.evicted if group in (None, of) and (words == digest).all(1).any()]
    if times:
        return "evicted", monotonic() - max(times)
    return ("evicted", None) if any(text.committed >= end for text, _ in same) else None


def _by_group(source: Source, known: Known, prompt: Request, hit: Hit) -> tuple[GroupMiss, ...]:
    """Return what each of several groups lacks after a hit.

    Groups of states are examined where the hit of the attention groups alone would end.
    """
    size, count, misses = source.hasher.block_size, len(prompt.tokens), []
    if len(source.groups) == 1:
        return ()
    resident = [find(prompt.digests) >= 0 for find in source.find]
    own = [longest_hit([g], [there], count, size) for g, there in zip(source.groups, resident, strict=True)]
    reach = (hit.attention_hit or 0) // size
    for group, (spec, there) in enumerate(zip(source.groups, resident, strict=True)):
        miss = GroupMiss(group, type(spec).__name__, own[group] * size)
        last = (count - 1) // size if spec.holds_states else len(prompt.digests)
        end = min(max(reach, hit.blocks + 1) if spec.holds_states else hit.blocks + 1, last)
        needed = spec.needed(end * size, end, size) if own[group] <= hit.blocks < end else np.empty(0, np.int32)
        lacking = needed[~there[needed]]
        if lacking.size:
            block = lacking.item(0)
            found = _why_not_cached(source, known, prompt, block, group)
            if spec.holds_states and (found == ("evicted", None) or (found is None and reach > hit.blocks)):
                found = "state", None  # its text was computed or is cached, but its state was not kept
            reason, other = found or ("never", None)
            miss = miss._replace(reason=reason, position=(block + spec.holds_states) * size, there=other)
        misses.append(miss)
    return tuple(misses)


def _why_by_text(source: Source, prompt: Request, known: Known, hit: Hit) -> Why:
    """Return how the prompt differs from remembered texts at the block after a hit."""
    size, block = source.hasher.block_size, hit.blocks
    start = block * size
    agreed, end, other = _longest_match(prompt, known, block)
    # A text with another salt or other keys explains more if its tokens agree longer and its block is cached.
    other_agreed, other_at = max(
        (
            (common_length(_as_array(prompt), _as_array(text)), i)
            for i, (text, _) in enumerate(known)
            if text.keys.header != prompt.keys.header and _is_cached(source, text, block)
        ),
        default=(0, -1),
    )
    if other_agreed // size > max(agreed, start) // size:
        text = known[other_at][0]
        if _salt(text.keys) != _salt(prompt.keys):
            return "salt", start, None, None
        return "keys", start, prompt.keys.extra_keys, text.keys.extra_keys
    if other is not None and agreed >= hit.position and end != "end":
        if end == "keys":
            return end, agreed, _key_at(prompt.keys, agreed), _key_at(other.keys, agreed)
        here, there = (tuple(text.tokens[agreed : agreed + EXCERPT].tolist()) for text in (prompt, other))
        return end, agreed, here, there
    if agreed > start or hit.blocks == len(prompt.digests):
        return "block", start, None, max(agreed - start, 0)
    return "never", start, None, None


def _is_cached(source: Source, text: Request, block: int) -> bool:
    """Return whether a block of a remembered text is still in the cache."""
    return any(find(digest[None])[0] >= 0 for find in source.find for digest in text.digests[block : block + 1])


def _longest_match(prompt: Request, known: Known, block: int) -> tuple[int, str, Request | None]:
    """Return the longest match with a text of the same salt and keys: its length, why it ends, and the text."""
    best: tuple[int, str, Request | None] = (0, "end", None)
    one = _as_array(prompt)
    for text, _ in known:
        if text.keys.header != prompt.keys.header:
            continue
        other = _as_array(text)
        both, common = min(one.size, other.size), common_length(one, other)
        placed = {position for position, _ in set(text.keys.placed) ^ set(prompt.keys.placed)}
        border = min(placed, default=both)
        end = "keys" if border < common else "token" if common < both else "end"
        begins = end == "token" and common < 2 and not block
        if begins and 2 * np.count_nonzero(one[:both] == other[:both]) < both:
            continue  # they share only the token with which all texts start
        if min(border, common) >= best[0]:
            best = (min(border, common), end, text)
    return best


def _salt(keys: EncodedKeys) -> bytes:
    """Return the encoded salt."""
    rest = encode_keys(cast("ExtraKeys", keys.extra_keys)).header[1:]  # after the encoding of the salt None
    return keys.header[: len(keys.header) - len(rest)]


def _key_at(keys: EncodedKeys, position: int) -> Key:
    """Return the key placed at a position, or None."""
    given = keys.extra_keys if isinstance(keys.extra_keys, tuple) else (keys.extra_keys,)
    return next((key.key for key in given if isinstance(key, KeyAt) and key.position == position), None)


def _moved_tokens(source: Source, hasher: BlockHasher, prompt: Request, known: Known, hit: Hit) -> int:
    """Return how many tokens after a hit `reuse="anywhere"` would find."""
    namespace, size, manager = prompt.namespace, source.hasher.block_size, source.manager
    if namespace is None or manager is None or not manager.prefix_only:
        return 0
    user, pool = manager.reuses.get("anywhere"), manager.pools[0]
    if isinstance(user, MovedText):
        content = user.index
    else:  # built from remembered texts
        content = MovedText(pool).index
        for text, _ in known:
            own = Chain(hasher, text.keys).namespace
            if own is None:  # the KV depends on a key placed inside the text
                continue
            ids = source.find[0](text.digests)
            for _, first, end in find_runs((ids >= 0).nonzero()[0]):
                tokens, blocks = text.tokens[first * size : end * size], ids[first:end]
                before = int(ids[first - 1]) if first else -1
                content.add(blocks, pool.taken_at[blocks], first, before, tokens, own, True)
    last = len(prompt.tokens) - 1
    found = content.find(_as_array(prompt)[:last], hit.position, last, namespace)
    return sum([run.end - run.start for run in found if run.end - run.start >= size])
