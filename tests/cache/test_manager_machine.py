"""Random operations on CacheManager; every invariant is checked after every step."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import pc

BLOCK = 4
tokens_of = st.lists(st.integers(0, 1), max_size=40)


CASES = {
    "full": [pc.FullAttention()],
    "window": [pc.SlidingWindow(window=6)],
    "window and sinks": [pc.SlidingWindow(window=9, num_sink_tokens=5)],
    "state": [pc.Recurrent()],
    "full and window": [pc.FullAttention(), pc.SlidingWindow(window=5)],
    "full and state": [pc.FullAttention(), pc.Recurrent(num_blocks=12)],
    "all": [pc.Tensors(), pc.SlidingWindow(window=7, num_sink_tokens=2), pc.Recurrent(), pc.SlidingWindow(window=1)],
}


def prefix_key(tokens, block, salt):
    """What identifies a complete block, independently of the library: salt and every token up to its end."""
    return (salt, tuple(tokens[: (block + 1) * BLOCK]))


def read_by(group, position):
    """Positions that a query reads before it writes its own, by the definition of the group."""
    if isinstance(group, pc.SlidingWindow):
        return [t for t in range(position) if t > position - group.window or t < group.num_sink_tokens]
    if isinstance(group, pc.Recurrent):
        return [position - 1] if position else []
    return list(range(position))


class Machine(RuleBasedStateMachine):
    """A model that remembers what was written where, group by group.

    `content` maps (block number, offset) to what its KV stands for: salt and tokens up to and including that position;
    a recurrent group has one state a block, the one written last. Writing goes through slot mappings only, as an
    engine's would, and every query finds what it reads.
    """

    requests = Bundle("requests")

    @initialize(
        groups=st.sampled_from(list(CASES)),
        num_blocks=st.integers(4, 24),
        policy=st.sampled_from(sorted(pc.cache.policies.POLICIES)),
        algorithm=st.sampled_from(["sha256", "blake2b", "xxh3_128"]),
        partial=st.booleans(),
        host_blocks=st.integers(0, 12),
    )
    def start(self, groups, num_blocks, policy, algorithm, partial, host_blocks):
        self.groups = CASES[groups]
        self.partial = partial and groups == "full"
        self.manager = pc.CacheManager(
            num_blocks,
            BLOCK,
            policy=policy,
            hash_algorithm=algorithm,
            groups=self.groups,
            host_blocks=host_blocks,
            partial_reuse=self.partial,
        )
        self.host_blocks = host_blocks
        self.num_blocks = sum(g.num_blocks or num_blocks for g in self.groups)
        self.content = [{} for _ in self.groups]
        self.host = [{} for _ in self.groups]
        self.preempted = {}
        self.tokens = {}
        self.salts = {}
        self.committed = {}
        self.next_id = 0
        self.published = set()

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def per_group(self, value):
        return value if len(self.groups) > 1 else [value]

    def identity(self, request, position):
        return (self.salts[request], tuple(self.tokens[request][: position + 1]))

    def where(self, group, block, offset):
        return (block, 0) if isinstance(self.groups[group], pc.Recurrent) else (block, offset)

    def move(self, source, target, pairs):
        """Copies blocks, in order."""
        for a, b in pairs:
            for offset in range(BLOCK):
                target[b, offset] = source.get((a, offset))

    def carry_out(self, request, allocation):
        """The loads, copies, reads and writes an engine would do for an allocation."""
        for group, content in enumerate(self.content):
            self.move(self.host[group], content, self.per_group(allocation.loads)[group])
            self.move(content, content, self.per_group(allocation.copies)[group])
        positions = [p for span in allocation.compute_spans for p in range(*span)]
        for group, mapping in enumerate(self.per_group(allocation.slot_mapping)):
            slots = mapping.tolist()
            assert len(slots) == len(positions)
            for position, slot in zip(positions, slots, strict=True):
                self.assert_readable(request, group, read_by(self.groups[group], position))
                if slot >= 0:
                    block, offset = divmod(slot, BLOCK)
                    assert not self.manager.pools[group].complete[block], "a findable block is written"
                    self.content[group][self.where(group, block, offset)] = self.identity(request, position)

    def assert_readable(self, request, group, positions):
        table = self.manager.block_table(request, group)
        for position in positions:
            where = self.where(group, int(table[position // BLOCK]), position % BLOCK)
            assert self.content[group].get(where) == self.identity(request, position), "a wrong block was returned"

    def spans_readable(self, request, spans):
        for group, spec in enumerate(self.groups):
            if isinstance(spec, pc.FullAttention | pc.Tensors):
                self.assert_readable(request, group, [p for span in spans for p in range(*span)])

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
        self.spans_readable(request, a.cached_spans)
        if tokens:  # the last token's KV too, when it is not to be written
            for slots in self.per_group(a.slot_mapping):
                assert slots.size >= 1
                if slots[-1] < 0:
                    self.spans_readable(request, [(len(tokens) - 1, len(tokens))])
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
        before = self.manager.stats(), self.tables_of(request)
        try:
            a = self.manager.append(request, tokens)
        except pc.OutOfBlocks:
            assert (self.manager.stats(), self.tables_of(request)) == before
            return
        self.tokens[request] += tokens
        self.carry_out(request, a)

    def tables_of(self, request):
        return [self.manager.block_table(request, group).tolist() for group in range(len(self.groups))]

    @rule(request=requests, share=st.floats(0, 1))
    def commit(self, request, share):
        if request not in self.tokens:
            return
        upto = round(share * len(self.tokens[request]))
        for group, pairs in enumerate(self.per_group(self.manager.commit(request, upto))):
            for old, new in pairs:
                for offset in range(BLOCK):
                    assert self.content[group].get((old, offset)) == self.content[group].get((new, offset))
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
        length = len(self.tokens[request])
        count = round(share * length)
        before = self.manager.stats(), self.tables_of(request)
        state = any(isinstance(g, pc.Recurrent) for g in self.groups)
        if count and state and self.committed[request] <= length - count:
            return  # a state that was written and not committed is the engine's to restore
        try:
            self.manager.rollback(request, count)
        except ValueError:
            assert any(isinstance(g, pc.SlidingWindow | pc.Recurrent) for g in self.groups)
            assert (self.manager.stats(), self.tables_of(request)) == before
            return
        del self.tokens[request][length - count :]
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

    @rule(request=requests, mode=st.sampled_from(["recompute", "swap"]), ahead=st.lists(st.integers(0, 1), max_size=2))
    def preempt(self, request, mode, ahead):
        """Also before the step that computes tokens appended last, and with a state only then."""
        if request not in self.tokens:
            return
        if any(isinstance(g, pc.Recurrent) for g in self.groups):
            self.commit(request, 1.0)
        with contextlib.suppress(pc.OutOfBlocks):
            a = self.manager.append(request, ahead)
            for content, pairs in zip(self.content, self.per_group(a.copies), strict=True):
                self.move(content, content, pairs)
            self.tokens[request] += ahead
        committed, length = self.committed[request], len(self.tokens[request])
        room = self.host_blocks * len(self.groups) - self.manager.stats().host_blocks >= 10 * len(self.groups)
        pairs = self.per_group(self.manager.preempt(request, mode))
        for group, (content, host) in enumerate(zip(self.content, self.host, strict=True)):
            self.move(content, host, pairs[group])
        full = all(isinstance(g, pc.FullAttention) for g in self.groups)
        if mode == "recompute":
            assert not any(pairs)
            committed = 0
        elif not (room and -(-committed // BLOCK) <= 10 and (committed < length or full)):
            committed = 0  # how much comes back depends on what stays cached
        self.preempted[request] = (self.tokens.pop(request), self.salts[request], committed)

    @rule(request=requests)
    def resume(self, request):
        if request not in self.preempted:
            return
        before = self.manager.stats()
        try:
            a = self.manager.resume(request)
        except pc.OutOfBlocks:
            assert self.manager.stats() == before
            return
        self.tokens[request], self.salts[request], least = self.preempted.pop(request)
        length = len(self.tokens[request])
        assert a.num_cached_tokens >= min(least, length - 1), "something that was swapped out is computed again"
        covered = sorted(p for s, e in [*a.cached_spans, *a.compute_spans] for p in range(s, e))
        assert covered == list(range(length))
        self.carry_out(request, a)
        self.spans_readable(request, a.cached_spans)
        self.committed[request] = length - sum(e - s for s, e in a.compute_spans)

    @rule(tokens=tokens_of, others=st.lists(tokens_of, max_size=3), extra=st.lists(st.integers(0, 1), max_size=3))
    def swapped_meanwhile(self, tokens, others, extra):
        """A request that has decoded a little gives way to others and comes back."""
        request = self.allocate(tokens, None, "prefix", 0, None)
        if not isinstance(request, int):
            return
        self.commit(request, 1.0)
        self.preempt(request, "swap", extra)
        for prompt in others:
            self.serve(prompt, [], "prefix")
        self.resume(request)
        if request in self.tokens:
            self.commit(request, 1.0)
        self.free(request)

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
        for request, tokens in self.tokens.items():
            for group, spec in enumerate(self.groups):
                self.assert_readable(request, group, read_by(spec, len(tokens)))

    @invariant()
    def findable_was_committed(self):
        if not hasattr(self, "manager"):
            return
        known = set(map(self.hash_of, self.published))
        for pool in self.manager.pools:
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
