"""Helpers shared by the cache's tests."""

from __future__ import annotations

import builtins

import numpy as np

import pc
from pc.cache.hashing import encode_tokens


def drop(pool, ids):
    """Evict the blocks `ids`, as if the policy had chosen them as victims."""
    ids = np.asarray(ids, np.int32)
    pool.policy.removed(ids)
    policy_choice = pool.policy.victims
    pool.policy.victims = lambda count: ids
    try:
        pool._evict(ids.size)
    finally:
        pool.policy.victims = policy_choice
    pool._free[pool.num_free : pool.num_free + ids.size] = ids[::-1]
    pool.num_free += ids.size


def run(manager, request_id, tokens, returns=None, **options):
    """Allocate, commit and free a request; return its allocation."""
    allocation = manager.allocate(request_id, tokens, **options)
    manager.commit(request_id, len(tokens))
    manager.free(request_id, returns)
    return allocation


def serve(manager, request_id, tokens, returns=None, **options):
    """Run a request; return the number of its cached tokens."""
    return run(manager, request_id, tokens, returns, **options).num_cached_tokens


def cached_of(manager, tokens):
    """Return the number of cached tokens of a prompt, without notifying the policy of an access."""
    pool = manager.pools[0]
    return manager.block_size * pool.table.leading(pool.hasher.hash_blocks(encode_tokens(tokens))).size


class Listener:
    """A listener that records all notifications, and follows which blocks are published, as a router does.

    Attributes:
        act: A function that is called after each notification.
        counts: The kind of each notification, and how many blocks it was about.
    """

    def __init__(self, act=lambda: None):
        self.events, self.published, self.act = [], set(), act

    @property
    def counts(self):
        return [(kind, *(len(rest[1]) for _ in rest[1:2])) for kind, *rest in self.events]

    def stored(self, group, hashes, *rest):
        self.events.append(("stored", group, hashes, *rest))
        self.published |= {(group, block_hash) for block_hash in hashes}
        self.act()

    def removed(self, group, hashes):
        self.events.append(("removed", group, hashes))
        self.published -= {(group, block_hash) for block_hash in hashes}
        self.act()

    def cleared(self):
        self.events.append(("cleared",))
        self.published = set()
        self.act()


def published_by(manager):
    """Return the group and the hash of every published block."""
    return {(g, h) for g, pool in enumerate(manager.pools) for h in pool.digests_of(pool.complete.nonzero()[0])}


def window_groups(**options):
    return [pc.FullAttention(), pc.SlidingWindow(window=8, **options)]


def recurrent(num_blocks=16, **options):
    return pc.CacheManager(
        num_blocks, block_size=4, groups=[pc.FullAttention(), pc.Recurrent()], policy="lru", **options
    )


def slots_of(runs, count):
    """Return the slots of runs, -1 where no run has one; fail if two runs have the same slot."""
    slots = np.full(count, -1, np.int64)
    for begin, first, end in runs:
        assert end > first
        assert (slots[begin : begin + end - first] == -1).all()
        slots[begin : begin + end - first] = np.arange(first, end)
    return slots.tolist()


def plant(patch, *bugs):
    """Plant bugs: for each owner and name, a function that is called in place of another, which is its first argument.

    A property takes the place of another as it is. The name may be that of a builtin that a module uses.
    """
    for owner, name, bug in bugs:
        honest = getattr(owner, name, None) or getattr(builtins, name)
        patch.setattr(owner, name, bug if isinstance(bug, property) else _instead(bug, honest), raising=False)


def _instead(bug, honest):
    return lambda *args, **options: bug(honest, *args, **options)
