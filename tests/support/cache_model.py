"""A small engine that drives a CacheManager at random and knows what every slot must hold.

The KV in a slot is represented by a number that depends on the salt, the keys and every token up to the slot's. Slots
are written only where a slot mapping says so. Copies and loads are made as the manager lists them. Every query must
find what it reads. A step collects several allocations: all their copies come before all their writes, as the manager's
contract says. Sometimes the lower tier, a listener or the policy fails.
"""

from __future__ import annotations

import math
import random

import pc
from pc.cache.hashing import encode_tokens
from pc.cache.keys import encode_keys
from pc.cache.policies import POLICIES
from pc.cache.policies.lru import LRU

BLOCK = 4

GROUPS = {
    "full": lambda: None,
    "partial": lambda: None,
    "anywhere": lambda: None,
    "window": lambda: [pc.SlidingWindow(window=6)],
    "window and sinks": lambda: [pc.SlidingWindow(window=9, num_sink_tokens=5)],
    "state": lambda: [pc.Recurrent(num_blocks=6)],
    "full and window": lambda: [pc.FullAttention(), pc.SlidingWindow(window=5)],
    "full and state": lambda: [pc.FullAttention(), pc.Recurrent(num_blocks=7)],
    "all": lambda: [
        pc.Tensors(),
        pc.SlidingWindow(window=7, num_sink_tokens=2),
        pc.Recurrent(num_blocks=9),
        pc.SlidingWindow(window=1),
    ],
}


class Unreliable(LRU):
    """A policy whose hooks sometimes raise, and which sometimes names invalid victims."""

    def __init__(self):
        self.random = random.Random(0)

    def accessed(self, ids, hit):
        super().accessed(ids, hit)
        self.fail()

    def completed(self, ids):
        self.fail()

    def released(self, ids):
        super().released(ids)
        self.fail()

    def hinted(self, ids, priority, ttl):
        self.fail()

    def victims(self, count):
        wrong = self.random.randrange(8)
        if not wrong:
            return self.random.choice([[], [0] * count])
        ids = super().victims(count)
        self.fail()
        if wrong == 1:
            ids = ids.copy()
            ids[0] = self.random.randrange(self.pool.num_blocks)
        return ids

    def fail(self):
        if self.random.random() < 0.1:
            raise ZeroDivisionError("a policy that fails")


class TierError(Exception):
    """The error that the lower tier raises."""


class Model:
    """A manager and all that is known of it.

    Args:
        seed: The seed of every random choice.
        case: A key of GROUPS. None: a random one.
    """

    def __init__(self, seed, case=None):
        self.random = r = random.Random(seed)
        self.case = case or r.choice(list(GROUPS))
        groups = GROUPS[self.case]()
        policy = r.choice([*sorted(POLICIES), Unreliable])
        self.manager = pc.CacheManager(
            r.randrange(6, 26),
            BLOCK,
            policy=policy,
            hash_algorithm=r.choice(["sha256", "blake2b", "xxh3_128"]),
            groups=groups,
            host_blocks=r.choice([0, 3, 12]),
            partial_reuse=self.case == "partial" or (self.case == "anywhere" and r.random() < 0.5),
        )
        self.specs = self.manager.groups
        self.states = [g for g, spec in enumerate(self.specs) if isinstance(spec, pc.Recurrent)]
        self.whole = [g for g, s in enumerate(self.specs) if isinstance(s, pc.FullAttention | pc.Tensors)]
        self.content = [{} for _ in self.specs]
        self.host = [{} for _ in self.specs]
        self.findable = [{} for _ in self.specs]
        self.meaning = {}
        self.of = {}  # by value: salt, keys, token, position
        self.running = {}
        self.preempted = {}
        self.step = []
        self.count = 0
        self.inside = False
        self.alphabet = r.choice([2, 2, 3])
        if r.random() < 0.5:
            self.manager.on_evict = self.on_evict
        if r.random() < 0.6:
            self.manager.listeners.append(self)

    # Callbacks of the manager.

    def on_evict(self, group, blocks, hashes):
        assert len(blocks) == len(hashes)
        for block, block_hash in zip(blocks.tolist(), hashes, strict=True):
            value = self.held(group, block, BLOCK - 1)
            assert self.meaning[block_hash] in (value, self.of.get(value)), "a tier got other content"
        chance = self.random.random()
        if chance < 0.1:
            raise TierError
        if chance < 0.2 and not self.inside:
            self.inside = True
            try:
                self.manager.allocate("inner", [7] * self.random.randrange(1, 6))
                self.manager.free("inner")
            except pc.OutOfBlocks:
                pass
            finally:
                self.inside = False
        return hashes[: self.random.randrange(len(hashes) + 1)] if chance < 0.9 else None

    def stored(self, group, hashes, parent, token_ids, extra_keys):
        for block_hash in hashes:
            self.findable[group][block_hash] = self.findable[group].get(block_hash, 0) + 1
        assert len(token_ids) == BLOCK * len(hashes)
        if self.random.random() < 0.05:
            self.manager.stats()
            raise ZeroDivisionError("a listener that fails")

    def removed(self, group, hashes):
        for block_hash in hashes:
            self.findable[group][block_hash] -= 1
            if not self.findable[group][block_hash]:
                del self.findable[group][block_hash]

    def cleared(self):
        self.findable = [{} for _ in self.specs]

    # Contents of slots.

    def held(self, group, block, offset):
        return self.content[group].get((block, 0 if group in self.states else offset))

    def write(self, group, block, offset, value):
        self.content[group][block, 0 if group in self.states else offset] = value

    def per_group(self, value):
        return value if len(self.specs) > 1 else [value]

    def ids_of(self, request, tokens, first=0):
        """Return the request's values for its tokens, which represent their KV."""
        known = request["ids"][:first]
        last = known[-1] if known else hash((request["salt"], request["keys"]))
        for token in tokens[first:]:
            last = hash((last, token))
            self.of[last] = (request["salt"], request["keys"], token, len(known))
            known.append(last)
        return known

    def means(self, request, block):
        """Return what a block's last slot must hold.

        If its KV is approximate, this is only the token and what it belongs to.
        """
        value = request["ids"][(block + 1) * BLOCK - 1]
        return self.of[value] if block * BLOCK >= request["approximate"] else value

    def take_approximate(self, name, allocation):
        """Record an allocation with approximate KV, whose slots hold what other requests left there."""
        request, (content,), size = self.running[name], self.content, BLOCK
        begin = request["approximate"] = allocation.approximate_from
        tokens = request["tokens"] + request["prompt"][len(request["tokens"]) :]
        table = self.manager.block_table(name).tolist()
        sources = {b: (content, a) for a, b in allocation.copies}
        sources |= {b: (self.host[0], a) for a, b in allocation.loads}
        cached = {p for start, end in allocation.cached_spans for p in range(start, end)}
        if allocation.compute_spans and allocation.slot_mapping[-1] < 0:
            cached.add(len(request["tokens"]) - 1)
        moved = {}
        for start, end, slots, delta, targets in allocation.moved:
            assert len(slots) == len(targets) == end - start > 0
            assert start >= begin
            for p, slot, target in zip(range(start, end), slots.tolist(), targets.tolist(), strict=True):
                assert divmod(target, size) == (table[p // size], p % size), "another target"
                value = content[divmod(slot, size)]
                known = (request["salt"], request["keys"], tokens[p], p - delta)
                assert self.of[value] == known, "moved KV is of another token, position, salt or keys"
                moved[p] = hash(("moved", value, p))
        ids, count = request["ids"], len(request["tokens"])
        begin = min(begin, len(tokens))
        last = ids[begin - 1] if begin else hash((request["salt"], request["keys"]))
        for p in range(begin, len(tokens)):
            last = hash((last, tokens[p]))
            if p < count and p in cached:
                there, block = sources.get(table[p // size], (content, table[p // size]))
                last = there[block, p % size]
                assert self.of[last] == (request["salt"], request["keys"], tokens[p], p), "another text was found"
            last = moved.get(p, last)
            self.of[last] = (request["salt"], request["keys"], tokens[p], p)
            ids[p:] = [last]

    def must_read(self, group, position):
        spec = self.specs[group]
        if isinstance(spec, pc.SlidingWindow):
            return [t for t in range(position) if t > position - spec.window or t < spec.num_sink_tokens]
        return [] if group in self.states else range(position)

    def tables_of(self, name):
        return [self.manager.block_table(name, group).tolist() for group in range(len(self.specs))]

    def assert_readable(self, name, position, tables=None):
        """Check that what a query reads is present, in the block tables of its step."""
        ids = self.running[name]["ids"]
        for group, table in enumerate(tables or self.tables_of(name)):
            for t in self.must_read(group, position):
                block = table[t // BLOCK]
                assert block >= 0, f"group {group}: what the query at {position} reads at {t} is gone"
                assert self.held(group, block, t % BLOCK) == ids[t], f"group {group}: wrong KV at {t} for {position}"

    def assert_still_held(self, name):
        """Check that the current tables hold all that this step's queries read and that is not yet computed."""
        tables = self.tables_of(name)
        for of, allocation, _ in self.step:
            if of == name:
                for position in [p for start, end in allocation.compute_spans for p in range(start, end)]:
                    for group, table in enumerate(tables):
                        reads = self.must_read(group, position)
                        assert all(table[t // BLOCK] >= 0 for t in reads), "a query of this step reads a released block"

    # One step of the engine.

    def flush(self):
        """Execute what was allocated: all copies, then all writes."""
        step, self.step = self.step, []
        for _, allocation, _ in step:
            for group, content in enumerate(self.content):
                for pairs, source in (
                    (allocation.group_loads(group), self.host[group]),
                    (allocation.group_copies(group), content),
                ):
                    for a, b in pairs:
                        moved = [source.get((a, offset)) for offset in range(BLOCK)]
                        content.update({(b, offset): value for offset, value in enumerate(moved)})
        for _, allocation, _ in step:
            for span in allocation.moved:
                places = zip(range(span.start, span.end), span.slots.tolist(), span.targets.tolist(), strict=True)
                for p, slot, target in places:
                    assert not self.manager.pools[0].complete[target // BLOCK], "a findable block is written"
                    self.write(0, *divmod(target, BLOCK), hash(("moved", self.content[0][divmod(slot, BLOCK)], p)))
        for name, allocation, tables in step:
            request = self.running[name]
            slots = [mapping.tolist() for mapping in self.per_group(allocation.slot_mapping)]
            at = 0
            for start, end in allocation.compute_spans:
                self.assert_readable(name, start, tables)
                if self.states:
                    assert request["state"] == start or (request["state"] == end and end - start == 1), "no state"
                for position in range(start, end):
                    for group in range(len(self.specs)):
                        slot = slots[group][at]
                        if slot >= 0:
                            block, offset = divmod(slot, BLOCK)
                            assert not self.manager.pools[group].complete[block], "a findable block is written"
                            assert group not in self.states
                            self.write(group, block, offset, request["ids"][position])
                    at += 1
                    for group in self.states:
                        block = request["marks"].pop((group, position + 1), None)
                        if block is not None:
                            self.write(group, block, 0, request["ids"][position])
                self.assert_readable(name, end - 1, tables)
                request["state"] = max(request["state"], end)
            assert all(len(mapping) == at for mapping in slots)

    def unchanged(self, verb, *arguments, **options):
        """Run a verb. If it raises OutOfBlocks, check that nothing has changed, and return None."""
        before = self.snapshot()
        try:
            return verb(*arguments, **options)
        except pc.OutOfBlocks:
            after = self.snapshot()
            assert after == before, "a verb that raised has changed something"
            return None

    def snapshot(self):
        return self.manager.stats(), [self.tables_of(name) for name in self.running]

    # Random operations.

    def tokens(self, most=40):
        r = self.random
        root = [r.randrange(self.alphabet)] * r.randrange(0, most // 2)
        return root + [r.randrange(self.alphabet) for _ in range(r.randrange(0, most // 2))]

    def allocate(self):
        r, m = self.random, self.manager
        prompt, salt, keys = (
            self.tokens(),
            r.choice([None] * 6 + ["s", 1, "1"]),
            r.choice([None] * 6 + [("k",), ("k", 2)]),
        )
        reuse = r.choice(["prefix", "prefix", "gap"] + ["anywhere"] * (8 * (self.case == "anywhere")))
        part = r.choice([None, None, None, r.randrange(0, 20)])
        self.count += 1
        name = self.count
        a = self.unchanged(
            m.allocate,
            name,
            prompt,
            extra_keys=keys if keys is None else list(keys),
            salt=salt,
            reuse=reuse,
            priority=r.choice([0, 0, 3]),
            ttl=r.choice([None, 0.0, 50.0]),
            num_tokens=part,
        )
        if a is None:
            return
        request = {
            "prompt": prompt,
            "salt": salt,
            "keys": keys,
            "ids": [],
            "marks": {},
            "committed": 0,
            "state": 0,
            "cut": False,
            "approximate": math.inf,
        }
        request["ids"] = self.ids_of(request, prompt)
        length = m.num_tokens(name)
        assert length == len(prompt) or (part is not None and length >= min(part, len(prompt)))
        request["tokens"] = prompt[:length]
        request["state"] = self.start_of(a)
        self.running[name] = request
        self.covers(a, length)
        if a.approximate_from is not None:
            assert reuse == "anywhere", "an exact request has approximate KV"
            self.take_approximate(name, a)
        self.check_state(name, a)
        if self.whole == list(range(len(self.specs))) and reuse == "prefix":
            self.check_hits(a, request, prompt)
        self.step.append((name, a, self.tables_of(name)))
        if self.states and r.random() < 0.6:
            self.checkpoint(name, a.junction)

    def covers(self, allocation, length):
        moved = [(start, end) for start, end, *_ in allocation.moved]
        spans = sorted([*allocation.cached_spans, *allocation.compute_spans, *moved])
        assert [p for s, e in spans for p in range(s, e)] == list(range(length)), "spans do not cover the tokens"

    def start_of(self, allocation):
        return allocation.cached_spans[0][1] if allocation.cached_spans else 0

    def check_state(self, name, allocation):
        """Check that the state from which computing starts is present."""
        start, request = self.start_of(allocation), self.running[name]
        if start and allocation.compute_spans:
            for group in self.states:
                block = int(self.manager.block_table(name, group)[start // BLOCK - 1])
                loads = {b: s for s, b in allocation.group_loads(group)}
                held = self.host[group].get((loads[block], 0)) if block in loads else self.held(group, block, 0)
                assert start % BLOCK == 0
                assert block >= 0
                assert held == request["ids"][start - 1], "no state to go on from"

    def check_hits(self, allocation, request, prompt):
        """Check that the allocation used every cached block from the start on."""
        keys = encode_keys(request["keys"], request["salt"])
        digests = self.manager._state.hasher.hash_blocks(encode_tokens(prompt), keys)
        there = [pool.table.find(digests) >= 0 for pool in self.manager.pools]
        # The request's own blocks are not in the table yet, so these are blocks that it found.
        hits = 0
        while hits < len(digests) and all(t[hits] for t in there):
            hits += 1
        least = min(hits * BLOCK, max(len(prompt) - 1, 0))
        most = least if self.case not in ("partial", "anywhere") else least + BLOCK - 1
        assert least <= allocation.num_cached_tokens <= most, "a cached block was not used"

    def checkpoint(self, name, junction):
        request, r = self.running[name], self.random
        length = len(request["tokens"])
        bounds = [b for b in range(BLOCK, length + 1, BLOCK) if b > request["state"]]
        if junction is not None:
            assert junction % BLOCK == 0
            bounds += [junction] * 2 if request["state"] < junction <= length else []
        if not bounds:
            return
        for group in self.states:
            bound = r.choice(bounds)
            block = self.unchanged(self.manager.checkpoint, name, bound, group)
            if block is not None:
                assert not self.manager.pools[group].complete[block]
                request["marks"][group, bound] = block

    def append(self):
        if not self.running:
            return
        r, name = self.random, self.random.choice(list(self.running))
        request = self.running[name]
        length, prompt = len(request["tokens"]), request["prompt"]
        new = [r.randrange(self.alphabet) for _ in range(r.choice([1, 1, 1, 2, 6]))]
        if length < len(prompt):
            if r.random() < 0.2:
                wrong = [9]
                try:
                    self.manager.append(name, wrong)
                except ValueError:
                    pass
                else:
                    raise AssertionError("tokens that are not the prompt's were taken")
            new = prompt[length : length + r.randrange(1, 12)]
        a = self.unchanged(self.manager.append, name, new)
        if a is None:
            return
        request["tokens"] += new
        request["cut"] = False
        request["ids"] = self.ids_of(request, request["tokens"], length) + request["ids"][length + len(new) :]
        assert self.manager.num_tokens(name) == length + len(new)
        (start, end) = a.compute_spans[0]
        assert start <= length < end == length + len(new)
        self.assert_still_held(name)
        self.step.append((name, a, self.tables_of(name)))
        if self.states and r.random() < 0.3:
            self.checkpoint(name, None)

    def append_each(self):
        self.flush()
        r = self.random
        names = [n for n in self.running if r.random() < 0.7]
        requests = [self.running[n] for n in names]
        new = [
            q["prompt"][len(q["tokens"])] if len(q["tokens"]) < len(q["prompt"]) else r.randrange(self.alphabet)
            for q in requests
        ]
        got = self.unchanged(self.manager.append_each, names, new)
        if got is None:
            return
        slots, copies = got
        assert got.requests == tuple(names)
        assert got.query_start_loc.tolist() == list(range(len(names) + 1))
        for group, pairs in enumerate(self.per_group(copies)):
            for a, b in pairs:
                for offset in range(BLOCK):
                    self.content[group][b, offset] = self.content[group].get((a, offset))
        for i, (name, request, token) in enumerate(zip(names, requests, new, strict=True)):
            at = len(request["tokens"])
            assert got.positions[i] == at
            request["tokens"].append(token)
            request["cut"] = False
            request["ids"] = self.ids_of(request, request["tokens"], at) + request["ids"][at + 1 :]
            for group, mapping in enumerate(self.per_group(slots)):
                slot = int(mapping[i])
                if slot >= 0:
                    assert not self.manager.pools[group].complete[slot // BLOCK], "a findable block is written"
                    self.write(group, *divmod(slot, BLOCK), request["ids"][at])
            request["state"] = at + 1
            self.assert_readable(name, at)

    def commit(self, whole=None):
        """Commit tokens of some request, or all tokens of request `whole`."""
        if not self.running:
            return
        self.flush()
        r = self.random
        name = r.choice(list(self.running)) if whole is None else whole
        request = self.running[name]
        length = len(request["tokens"])
        upto = length if whole is not None or r.random() < 0.8 else r.randrange(length + 1)
        hashes = self.manager.block_hashes(name)
        for block, block_hash in enumerate(hashes):
            meaning = self.means(request, block)
            assert self.meaning.setdefault(block_hash, meaning) == meaning, "two contents under one hash"
        for group, pairs in enumerate(self.per_group(self.manager.commit(name, upto))):
            for old, new in pairs:
                moved = request["approximate"] < math.inf
                at = self.tables_of(name)[group].index(new) * BLOCK if moved else 0
                for offset in range(BLOCK):
                    a, b = self.held(group, old, offset), self.held(group, new, offset)
                    if moved and at >= request["approximate"]:
                        assert self.of[a] == self.of[b], "merged with another"
                        request["ids"][at + offset] = b
                    else:
                        assert a == b, "merged with another"
        for group in self.whole:
            table, pool = self.tables_of(name)[group][: upto // BLOCK], self.manager.pools[group]
            published = pool.digests_of([block for block in table if pool.complete[block]])
            assert set(published) <= set(hashes), "a block is published under another hash"
        request["committed"] = max(request["committed"], upto)
        request["kept"] = request["state"]

    def fork(self):
        if not self.running:
            return
        name = self.random.choice(list(self.running))
        parent = self.running[name]
        if self.random.random() < 0.7:
            self.commit(name)  # a fork needs committed tokens
        self.count += 1
        try:
            self.manager.fork(name, self.count)
        except ValueError:
            assert parent["committed"] < len(parent["tokens"])
            return
        assert self.manager._state.running[name].committed == len(parent["tokens"])
        child = dict(parent, tokens=list(parent["tokens"]), ids=list(parent["ids"]), marks={})
        self.running[self.count] = child

    def rollback(self):
        if not self.running:
            return
        self.flush()
        r, name = self.random, self.random.choice(list(self.running))
        request = self.running[name]
        length = len(request["tokens"])
        count = min(length, r.choice([0, 1, 1, 2, 3, 5, length]))
        before = self.snapshot()
        try:
            self.manager.rollback(name, count)
        except ValueError:
            assert self.snapshot() == before
            assert len(self.whole) < len(self.specs), "refused without need"
            return
        if count:
            left = length - count
            if self.states:
                tables = [self.manager.block_table(name, g) for g in self.states]
                kept = left == request["committed"] or not left
                assert kept or all(
                    left % BLOCK == 0 and self.held(g, int(t[left // BLOCK - 1]), 0) == request["ids"][left - 1]
                    for g, t in zip(self.states, tables, strict=True)
                ), "no state is there"
            request["marks"] = {}
            request["cut"] = True  # blocks that only the last token left reads may have been released
            del request["tokens"][left:], request["ids"][left:]
            request["prompt"] = request["tokens"][:]
            request["committed"] = min(request["committed"], left)
            request["state"] = left

    def free(self):
        self.flush()
        names = [*self.running, *self.preempted]
        if names:
            name = self.random.choice(names)
            self.manager.free(name)
            self.running.pop(name, None)
            self.preempted.pop(name, None)

    def preempt(self):
        if not self.running:
            return
        self.flush()
        r = self.random
        name = self.manager.victim() if r.random() < 0.3 else r.choice(list(self.running))
        request = self.running[name]
        state = self.manager._state
        free = [state.host_blocks - len(state.host_slots(group)) for group in range(len(self.specs))]
        mode = r.choice(["swap", "swap", "recompute"])
        pairs = self.per_group(self.manager.preempt(name, mode))
        for group, moved in enumerate(pairs):
            for block, slot in moved:
                for offset in range(BLOCK):
                    self.host[group][slot, offset] = self.content[group].get((block, offset))
        del self.running[name]
        self.preempted[name] = request
        needed = -(-request["committed"] // BLOCK)
        roomy = mode == "swap" and not self.states and all(f >= needed for f in free)
        # A rollback may have ended where the window of the last token that is left has gone.
        request["least"] = request["committed"] if roomy and self.case in ("full", "partial", "anywhere") else 0

    def resume(self):
        if not self.preempted:
            return
        self.flush()
        name = self.random.choice(list(self.preempted))
        a = self.unchanged(self.manager.resume, name)
        if a is None:
            return
        request = self.running[name] = self.preempted.pop(name)
        length = len(request["tokens"])
        self.covers(a, length)
        if a.approximate_from is not None:
            self.take_approximate(name, a)
        assert a.num_cached_tokens >= min(request["least"], length - 1), "what was swapped out is computed again"
        request["marks"] = {}
        self.check_state(name, a)
        request["state"] = self.start_of(a)
        request["committed"] = self.manager._state.running[name].committed
        self.step.append((name, a, self.tables_of(name)))

    def serve(self):
        """Run a request from start to end, which causes evictions."""
        before = set(self.running)
        self.allocate()
        new = set(self.running) - before
        self.flush()
        for name in new:
            request = self.running[name]
            for block, block_hash in enumerate(self.manager.block_hashes(name)):
                self.meaning.setdefault(block_hash, self.means(request, block))
            self.manager.commit(name, len(request["tokens"]))
            self.manager.free(name)
            del self.running[name]

    def restart(self):
        """With probability 0.1, end all requests and empty the cache."""
        if self.random.random() < 0.9:
            return
        self.flush()
        for name in [*self.running, *self.preempted]:
            self.manager.free(name)
        self.running.clear()
        self.preempted.clear()
        self.manager.reset()

    WEIGHTS = (
        *[("serve", 5), ("allocate", 5), ("append", 7), ("append_each", 3), ("commit", 7), ("fork", 2)],
        *[("rollback", 3), ("free", 6), ("preempt", 2), ("resume", 3), ("restart", 1)],
    )
    VERBS, CHANCES = zip(*WEIGHTS, strict=True)

    def run(self, operations):
        """Run `operations` random operations, and every check after each."""
        for verb in self.random.choices(self.VERBS, self.CHANCES, k=operations):
            if len(self.running) > 6:
                verb = "free"
            getattr(self, verb)()
            self.check()

    def check(self):
        m = self.manager
        m.check()
        if not self.step:
            for name, request in self.running.items():
                if not request["cut"] and len(request["tokens"]) >= len(request["prompt"]):
                    self.assert_readable(name, max(len(request["tokens"]) - 1, 0))
                self.assert_readable(name, len(request["tokens"]))
        if m.listeners:
            for group, pool in enumerate(m.pools):
                there = dict.fromkeys(pool.digests_of(pool.complete.nonzero()[0]), 1)
                assert there == self.findable[group], "listeners were told something else"
