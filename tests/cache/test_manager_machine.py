"""Random operations on CacheManager; every invariant is checked after every step."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import pc

BLOCK = 4
tokens_of = st.lists(st.integers(0, 1), max_size=40)


def prefix_key(tokens, block, salt):
    """What identifies a complete block, independently of the library: salt and every token up to its end."""
    return (salt, tuple(tokens[: (block + 1) * BLOCK]))


class Machine(RuleBasedStateMachine):
    """A model that remembers what was written where.

    `content` maps a block number to what its KV stands for, position by position: (salt, tokens up to and including
    that position). Writing goes through slot mappings only, as an engine's would.
    """

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(4, 24),
        policy=st.sampled_from(sorted(pc.cache.policies.POLICIES)),
        algorithm=st.sampled_from(["sha256", "blake2b", "xxh3_128"]),
        partial=st.booleans(),
    )
    def start(self, num_blocks, policy, algorithm, partial):
        self.manager = pc.CacheManager(
            num_blocks, BLOCK, policy=policy, hash_algorithm=algorithm, host_blocks=5, partial_reuse=partial
        )
        self.partial = partial
        self.host = {}
        self.preempted = {}
        self.num_blocks = num_blocks
        self.content = {}
        self.tokens = {}
        self.salts = {}
        self.committed = {}
        self.to_write = {}
        self.next_id = 0
        self.published = set()

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def identity(self, request, position):
        return (self.salts[request], tuple(self.tokens[request][: position + 1]))

    def carry_out(self, request, allocation):
        """The copies and writes an engine would do for an allocation."""
        for source, target in allocation.copies:
            for offset in range(BLOCK):
                self.content[target, offset] = self.content.get((source, offset))
        positions = [p for span in allocation.compute_spans for p in range(*span)]
        slots = allocation.slot_mapping.tolist()
        assert len(slots) == len(positions)
        for position, slot in zip(positions, slots, strict=True):
            if slot >= 0:
                block, offset = divmod(slot, BLOCK)
                assert not self.manager.pools[0].complete[block], "a findable block is written"
                self.content[block, offset] = self.identity(request, position)

    def assert_readable(self, request, spans):
        table = self.manager.block_table(request)
        for span in spans:
            for position in range(*span):
                got = self.content.get((int(table[position // BLOCK]), position % BLOCK))
                assert got == self.identity(request, position), "a wrong block was returned"

    @rule(
        target=requests,
        tokens=tokens_of,
        salt=st.sampled_from([None, None, None, "s"]),
        reuse=st.sampled_from(["prefix", "gap"]),
        priority=st.sampled_from([0, 0, 1]),
        ttl=st.sampled_from([None, None, 0.0, 100.0]),
    )
    def allocate(self, tokens, salt, reuse, priority, ttl):
        request = self.new_id()
        before = self.manager.stats()
        try:
            a = self.manager.allocate(request, tokens, salt=salt, reuse=reuse, priority=priority, ttl=ttl)
        except pc.OutOfBlocks:
            assert self.manager.stats() == before
            return multiple()
        self.tokens[request], self.salts[request], self.committed[request] = list(tokens), salt, 0
        assert a.num_cached_tokens == sum(e - s for s, e in a.cached_spans) <= max(len(tokens) - 1, 0)
        covered = sorted(p for s, e in [*a.cached_spans, *a.compute_spans] for p in range(s, e))
        assert covered == list(range(len(tokens)))
        self.carry_out(request, a)
        self.assert_readable(request, a.cached_spans)
        if tokens:  # the last token's KV too, when it is not to be written
            slots = a.slot_mapping
            assert slots.size >= 1
            if slots[-1] < 0:
                self.assert_readable(request, [(len(tokens) - 1, len(tokens))])
        hits = 0
        while prefix_key(tokens, hits, salt) in self.published and (hits + 1) * BLOCK <= len(tokens):
            hits += 1
        if reuse == "prefix":
            assert a.num_cached_tokens <= hits * BLOCK + (BLOCK - 1 if self.partial else 0)
        return request

    @rule(tokens=tokens_of, extra=tokens_of, reuse=st.sampled_from(["prefix", "gap"]))
    def serve(self, tokens, extra, reuse):
        """A request from start to end; most traffic, and what brings evictions."""
        request = self.allocate(tokens, None, reuse, 0, None)
        if isinstance(request, int):
            self.commit(request, 1.0)
            self.append(request, extra)
            self.commit(request, 1.0)
            self.free(request)

    @rule(request=requests, tokens=tokens_of)
    def append(self, request, tokens):
        if request not in self.tokens:
            return
        before = self.manager.stats(), self.manager.block_table(request).tolist()
        try:
            a = self.manager.append(request, tokens)
        except pc.OutOfBlocks:
            assert (self.manager.stats(), self.manager.block_table(request).tolist()) == before
            return
        self.tokens[request] += tokens
        self.carry_out(request, a)

    @rule(request=requests, share=st.floats(0, 1))
    def commit(self, request, share):
        if request not in self.tokens:
            return
        upto = round(share * len(self.tokens[request]))
        for old, new in self.manager.commit(request, upto):
            for offset in range(BLOCK):
                assert self.content[old, offset] == self.content[new, offset]
        self.committed[request] = max(self.committed[request], upto)
        for block in range(self.committed[request] // BLOCK):
            self.published.add(prefix_key(self.tokens[request], block, self.salts[request]))

    @rule(request=requests, target=requests)
    def fork(self, request):
        if request not in self.tokens:
            return multiple()
        child = self.new_id()
        self.manager.fork(request, child)
        self.tokens[child] = list(self.tokens[request])
        self.salts[child] = self.salts[request]
        self.committed[child] = self.committed[request]
        return child

    @rule(request=requests, share=st.floats(0, 1))
    def rollback(self, request, share):
        if request not in self.tokens:
            return
        count = round(share * len(self.tokens[request]))
        self.manager.rollback(request, count)
        del self.tokens[request][len(self.tokens[request]) - count :]
        self.committed[request] = min(self.committed[request], len(self.tokens[request]))

    @rule(request=consumes(requests))
    def free(self, request):
        if request in self.preempted:
            self.manager.free(request)
            del self.preempted[request]
        if request not in self.tokens:
            return
        self.manager.free(request)
        del self.tokens[request], self.salts[request], self.committed[request]

    @rule(request=requests, mode=st.sampled_from(["recompute", "swap"]))
    def preempt(self, request, mode):
        if request not in self.tokens:
            return
        for block, slot in self.manager.preempt(request, mode):
            for offset in range(BLOCK):
                self.host[slot, offset] = self.content.get((block, offset))
        self.preempted[request] = (self.tokens.pop(request), self.salts[request], self.committed[request])

    @rule(request=requests)
    def resume(self, request):
        if request not in self.preempted:
            return
        try:
            a = self.manager.resume(request)
        except pc.OutOfBlocks:
            return
        self.tokens[request], self.salts[request], self.committed[request] = self.preempted.pop(request)
        for slot, block in a.loads:
            for offset in range(BLOCK):
                self.content[block, offset] = self.host.get((slot, offset))
        self.carry_out(request, a)
        self.assert_readable(request, a.cached_spans)

    @rule(tokens=st.sampled_from([[-1], ["x"], [1 << 40]]))
    def fail_half_way(self, tokens):
        before = self.manager.stats()
        with pytest.raises((ValueError, TypeError)):
            self.manager.allocate("bad", tokens)
        for request in self.tokens:
            with pytest.raises((ValueError, TypeError)):
                self.manager.append(request, tokens)
        assert self.manager.stats() == before

    @invariant()
    def consistent(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        s = self.manager.stats()
        assert s.free_blocks + s.cached_blocks + s.held_blocks == self.num_blocks
        assert s.num_requests == len(self.tokens)
        for request in self.tokens:
            self.assert_readable(request, [(0, len(self.tokens[request]))])

    @invariant()
    def findable_was_committed(self):
        if not hasattr(self, "manager"):
            return
        pool = self.manager.pools[0]
        known = set(map(self.hash_of, self.published))
        for block in pool.complete.nonzero()[0].tolist():
            (digest,) = pool.digests_of([block])
            assert digest in known, "something is findable that was never committed"

    def hash_of(self, key):
        salt, tokens = key
        hasher = pc.cache.hashing.BlockHasher(self.manager.hash_algorithm, BLOCK)
        words = hasher.chain(salt=salt).extend(pc.cache.hashing.encode_tokens(list(tokens)), len(tokens) // BLOCK)
        return words[-1].tobytes()


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMachine = Machine.TestCase


def test_documented_bytes_are_the_hash():
    """The identity as docs describe it, spelled out with hashlib alone."""
    import struct

    root = b"pc.block.1" + bytes([6]) + b"sha256" + struct.pack("<I", 4) + b"n"
    root += b"s" + struct.pack("<Q", 6) + b"tenant" + struct.pack("<I", 1) + b"s" + struct.pack("<Q", 4) + b"lora"
    stream = hashlib.sha256(root)
    manager = pc.CacheManager(4, block_size=4)
    manager.allocate("a", [1, 2, 3, 4, 5, 6, 7, 8], extra_keys="lora", salt="tenant")
    manager.commit("a", 8)
    got = manager.pools[0].digests_of(manager.block_table("a"))
    expected = []
    for block in ([1, 2, 3, 4], [5, 6, 7, 8]):
        stream.update(struct.pack("<4I", *block))
        expected.append(stream.digest())
    assert got == expected
