"""A small engine that drives a CacheManager at random and knows what every slot must hold.

The KV in a slot is represented by a number that depends on the salt, the keys and every token up to the slot's. Slots
are written only where a slot mapping says so. Copies and loads are made as the manager lists them. Every query must
find what it reads. Sometimes the lower tier, a listener or the policy fails.

With one thread and no interrupts, a model is exact: what a verb changes is known, and a step collects several
allocations, with all their copies before all their writes, as the manager's contract says. With several threads or
interrupts, each allocation is a step, and a request is given up if an interrupt leaves open what it got. A model with
one thread is the same for the same seed.

An exact model of one group of full attention also has a TensorCache. A token's rows are made of the value of its slot.
In half of these models, rows of some steps are not stored. From then on rows may be missing, but never be of other
tokens.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import math
import os
import random
import sys
import threading
import time
import traceback

import pytest
import torch

import pc
from pc.cache.hashing import encode_tokens
from pc.cache.keys import encode_keys
from pc.cache.policies import POLICIES
from pc.cache.policies.lru import LRU

BLOCK = 4
FOLDER = os.path.realpath(os.path.dirname(pc.cache.__file__))
DONE, REFUSED, INTERRUPTED = "done", "refused", "interrupted"

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


@functools.cache
def _interruptible(code):
    """Return offsets of instructions before which CPython checks for signals: after a call, under the same handlers."""
    if sys.version_info < (3, 11):
        return frozenset()
    table = [(e.start, e.end, e.target) for e in dis._parse_exception_table(code)]

    def handler(offset):
        return next((target for start, end, target in table if start <= offset < end), None)

    found, before = set(), None
    for instruction in dis.get_instructions(code):
        called = before is not None and before.opname in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME")
        if called and handler(before.offset) == handler(instruction.offset):
            found.add(instruction.offset)
        before = instruction
    return frozenset(found)


@functools.cache
def _is_of_manager(file):
    """Return whether a file is of the manager's code; called with the file of each function that is entered."""
    return os.path.realpath(file).startswith(FOLDER)


class Interrupts:
    """Raises KeyboardInterrupt in this thread at places of the manager's code, while it is entered.

    Places are before each line, and after each call within a line, where an interpreter checks for signals. A lock's
    acquisition is no such place, because tracing does not show it.

    Args:
        numbers: The numbers of places. Each counts from the place before, and from where this is entered again.

    Attributes:
        passed: How many places were passed since the last interrupt.
        places: The places of the interrupts.
    """

    def __init__(self, *numbers):
        self.left, self.passed, self.places = list(numbers), 0, []

    def __enter__(self):
        if self.left:
            sys.settrace(self.start)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def start(self, frame, event, argument):
        """Trace the manager's code, instructions included."""
        if not _is_of_manager(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        return self.trace

    def trace(self, frame, event, argument):
        code = frame.f_code
        if self.left and (event == "line" or (event == "opcode" and frame.f_lasti in _interruptible(code))):
            self.passed += 1
            if self.passed == self.left[0]:
                self.passed = 0
                del self.left[0]
                self.places.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, {event}")
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


class Model:
    """A manager, its memory and its tier, and all that is known of them.

    Args:
        seed: The seed of every random choice.
        case: A key of GROUPS. None: a random one.
        threads: Number of threads, each with requests that only it uses.
        hazard: Probability that a verb is interrupted.
        size: Number of tokens in a block.
    """

    def __init__(self, seed, case=None, threads=1, hazard=0.0, size=BLOCK):
        self.random = r = random.Random(seed)
        self.seed, self.threads, self.hazard, self.size = seed, threads, hazard, size
        self.exact = threads == 1 and not hazard
        self.case = case or r.choice(list(GROUPS))
        groups = GROUPS[self.case]()
        policy = r.choice([*sorted(POLICIES), Unreliable])
        self.manager = pc.CacheManager(
            r.randrange(6, 26),
            size,
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
        self.alphabet = r.choice([2, 2, 3])
        self.tensors, self.chance = None, random.Random(seed)
        self.all_stored, self.forgetful = True, self.chance.random() < 0.5
        if self.exact and self.case in ("full", "partial"):
            self.tensors = pc.TensorCache(self.manager, self.manager.pools[0].num_blocks, size)
            for name, rows in self.rows_of([0]).items():  # a first step that decodes would not announce them
                self.tensors.register(name, rows.shape[1:], rows.dtype)
        self.device = threading.Lock()  # writes follow the copies of a preemption, as on a stream
        self.local, self.raised, self.raised_in_interrupted, self.errors = threading.local(), 0, 0, []
        if r.random() < 0.5:
            self.manager.on_evict = self.on_evict
        if r.random() < 0.6 or not self.exact:
            self.manager.listeners.append(self)

    def run(self, operations):
        """Run as many random operations in each thread, with every check, and check the state that they leave."""
        workers = [Worker(self, number) for number in range(self.threads)]
        if self.threads == 1:
            workers[0].run(operations)
        else:
            threads = [threading.Thread(target=w.run, args=(operations,), daemon=True) for w in workers]
            for thread in threads:
                thread.start()
            end = time.monotonic() + 120
            for thread in threads:
                thread.join(max(end - time.monotonic(), 0.1))
            assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        assert not self.errors, "\n".join(map(str, self.errors[:3]))
        manager = self.manager
        manager.check()
        stats = manager.stats()
        assert (stats.held_blocks, stats.num_requests, stats.host_blocks) == (0, 0, 0), "what no request has is held"
        assert self.raised or not stats.failed_offloads
        # An interrupt may come between an error of the tier and its count.
        assert stats.failed_offloads or self.raised == self.raised_in_interrupted
        self.check_listeners()
        manager.on_evict = None
        if not self.states:
            count = min(pool.num_blocks for pool in manager.pools) * self.size
            manager.allocate("all", range(100, 100 + count))
            manager.free("all")
            manager.check()

    def check_listeners(self):
        if self.manager.listeners:
            for group, pool in enumerate(self.manager.pools):
                there = dict.fromkeys(pool.digests_of(pool.complete.nonzero()[0]), 1)
                assert there == self.findable[group], "listeners were told something else"

    # Callbacks of the manager. It logs what they raise, so they collect what is wrong.

    def assert_kept(self, group, blocks, hashes):
        for block, block_hash in zip(blocks.tolist(), hashes, strict=True):
            value, meaning = self.held(group, block, self.size - 1), self.meaning.get(block_hash)
            if meaning is None or meaning not in (value, self.of.get(value)):
                self.errors.append(f"a tier got other content: block {block} of group {group}")

    def on_evict(self, group, blocks, hashes):
        self.assert_kept(group, blocks, hashes)
        worker = self.local.worker
        r = worker.random
        chance = r.random()
        if chance < 0.1:
            self.raised += 1
            worker.raised += 1
            raise TierError
        if chance > 0.98 and self.hazard and not worker.inside:
            raise KeyboardInterrupt
        if chance < (0.2 if self.exact else 0.4) and not worker.inside:
            worker.call_back()
        elif chance < 0.5 and self.threads > 1:
            time.sleep(0.0002)
        self.assert_kept(group, blocks, hashes)
        return hashes[: r.randrange(len(hashes) + 1)] if chance < 0.9 else None

    def stored(self, group, hashes, parent, token_ids, extra_keys):
        if self.exact and not {*hashes}.isdisjoint(self.findable[group]):
            self.errors.append("a listener was told of a block that it knows")
        if self.last_token(hashes[0]) - self.last_token(parent) != self.size:
            self.errors.append("a listener got another parent")
        for block_hash in hashes:
            # After an interrupt, listeners may be notified again.
            self.findable[group][block_hash] = 1 + (self.findable[group].get(block_hash, 0) if self.exact else 0)
        if len(token_ids) != self.size * len(hashes):
            self.errors.append("a listener got another number of tokens")
        if self.exact and self.random.random() < 0.05:
            self.manager.stats()
            raise ZeroDivisionError("a listener that fails")

    def removed(self, group, hashes):
        for block_hash in hashes:
            left = self.findable[group].pop(block_hash, 1) - 1
            if left:
                self.findable[group][block_hash] = left

    def cleared(self):
        self.findable = [{} for _ in self.specs]

    def last_token(self, block_hash):
        """Return the position of a block's last token, -1 for the parent of the first block."""
        value = self.meaning.get(block_hash, (math.nan,) * 4)
        return -1 if block_hash is None else self.of.get(value, value)[3]

    # Contents of slots.

    def held(self, group, block, offset):
        return self.content[group].get((block, 0 if group in self.states else offset))

    def write(self, group, block, offset, value):
        self.content[group][block, 0 if group in self.states else offset] = value

    def copy(self, group, source, pairs):
        """Copy blocks of `source`, a memory of the group, to blocks."""
        for a, b in pairs:
            moved = [source.get((a, offset)) for offset in range(self.size)]
            self.content[group].update({(b, offset): value for offset, value in enumerate(moved)})

    # Rows of tokens.

    def rows_of(self, values):
        """Return the per-token tensors of tokens with these values."""
        rows = torch.tensor(values, dtype=torch.int64)
        return {"value": rows, "parts": (rows[:, None] >> torch.tensor([0, 8, 16])).to(torch.int16)}

    def assert_rows(self, found, values):
        want = self.rows_of(values)
        assert all(torch.equal(found[name], want[name]) for name in want), "a row is of another token"

    def store(self, step):
        """Store the rows of a step, or forget to."""
        if self.forgetful and self.chance.random() < 0.2:
            self.all_stored = False
        else:
            self.tensors.store(step)

    def per_group(self, value):
        return value if len(self.specs) > 1 else [value]


class Worker:
    """A thread of a model, and the requests that only it uses."""

    def __init__(self, model, number):
        self.model, self.manager, self.number = model, model.manager, number
        self.size, self.specs, self.states, self.whole = model.size, model.specs, model.states, model.whole
        self.content, self.host = model.content, model.host
        self.random = model.random if model.exact else random.Random(model.seed * 10 + number)
        self.running, self.preempted, self.step = {}, {}, []
        self.count, self.raised, self.inside = 0, 0, False
        self.places = {}  # by verb: places of its last call that was traced to its end

    def next_name(self):
        self.count += 1
        return self.number, self.count

    def run(self, operations):
        self.model.local.worker = self
        try:
            for verb in self.random.choices(self.VERBS, self.CHANCES, k=operations):
                if self.model.errors:
                    break
                getattr(self, "free" if len(self.running) > (6 if self.model.exact else 3) else verb)()
                self.check()
            for name in [*self.running, *self.preempted]:
                self.manager.free(name)
        except BaseException:
            self.model.errors.append(traceback.format_exc())

    def check(self):
        if self.model.exact or self.random.random() < 0.2:
            self.manager.check()
        if self.model.exact:
            self.model.check_listeners()
        if not self.step:
            for name, request in self.running.items():
                length = len(request["tokens"])
                if not request["cut"] and length >= len(request["prompt"]):
                    self.assert_readable(name, max(length - 1, 0))
                self.assert_readable(name, length)
                if self.model.tensors is not None:
                    count = self.model.tensors.available(name)
                    assert count == length or not self.model.all_stored, "a row is missing"
                    found = self.model.tensors.load(name, self.model.tensors.names, num_tokens=count)
                    self.model.assert_rows(found, request["ids"][:count])

    # Calls of the manager.

    def snapshot(self):
        """Return what a verb must not change if it raises: of the other threads' requests nothing is known."""
        return self.manager.stats() if self.model.exact else None, [self.tables_of(name) for name in self.running]

    def call(self, verb, *arguments, **options):
        """Run a verb, sometimes with an interrupt in it; return its outcome and its result.

        If it raises OutOfBlocks, check that nothing has changed.
        """
        before, interrupts, r, raised = self.snapshot(), Interrupts(), self.random, self.raised
        if not self.model.exact and r.random() < self.model.hazard:
            interrupts.left = [int(math.exp(r.uniform(0, 8)))]
            if r.random() < 0.5 and verb.__name__ in self.places:  # after its last changes
                interrupts.left = [max(self.places[verb.__name__] - r.randrange(12), 1)]
        try:
            with interrupts:
                result = verb(*arguments, **options)
            if interrupts.left:
                self.places[verb.__name__] = interrupts.passed
            return DONE, result
        except pc.OutOfBlocks:
            assert self.snapshot() == before, "a verb that raised has changed something"
            return REFUSED, None
        except KeyboardInterrupt:
            self.model.raised_in_interrupted += self.raised - raised
            self.manager.check()
            return INTERRUPTED, None

    def call_back(self):
        """Call the manager as a tier may while it receives blocks."""
        self.inside, name = True, ("inner", *self.next_name())
        try:
            if self.random.random() < 0.5:
                self.manager.check()
            self.manager.allocate(name, [7] * self.random.randrange(1, 9))
        except pc.OutOfBlocks:
            pass
        finally:
            sys.settrace(None)
            self.inside = False
            self.forget(name)

    def length(self, name):
        """Return the number of tokens of a running request, None if it does not run."""
        try:
            return self.manager.num_tokens(name)
        except KeyError:
            return None

    def forget(self, name):
        """Give up a request."""
        with contextlib.suppress(KeyError):
            self.manager.free(name)
        self.running.pop(name, None)
        self.preempted.pop(name, None)
        self.step = [part for part in self.step if part[0] != name]

    def add_step(self, name, allocation):
        self.step.append((name, allocation, self.tables_of(name)))

    def end_verb(self):
        """Execute a step at once, unless the model is exact."""
        if not self.model.exact:
            self.flush()

    def ids_of(self, request, tokens, first=0):
        """Return the request's values for its tokens, which represent their KV."""
        known = request["ids"][:first]
        last = known[-1] if known else hash((request["salt"], request["keys"]))
        for token in tokens[first:]:
            last = hash((last, token))
            self.model.of[last] = (request["salt"], request["keys"], token, len(known))
            known.append(last)
        return known

    def means(self, request, block):
        """Return what a block's last slot must hold.

        If its KV is approximate, this is only the token and what it belongs to.
        """
        value = request["ids"][(block + 1) * self.size - 1]
        return self.model.of[value] if block * self.size >= request["approximate"] else value

    def take_approximate(self, name, allocation):
        """Record an allocation with approximate KV, whose slots hold what other requests left there."""
        request, (content,), size = self.running[name], self.content, self.size
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
                assert self.model.of[value] == known, "moved KV is of another token, position, salt or keys"
                moved[p] = hash(("moved", value, p))
        ids, count = request["ids"], len(request["tokens"])
        begin = min(begin, len(tokens))
        last = ids[begin - 1] if begin else hash((request["salt"], request["keys"]))
        for p in range(begin, len(tokens)):
            last = hash((last, tokens[p]))
            if p < count and p in cached:
                there, block = sources.get(table[p // size], (content, table[p // size]))
                last = there[block, p % size]
                assert self.model.of[last] == (request["salt"], request["keys"], tokens[p], p), "another text was found"
            last = moved.get(p, last)
            self.model.of[last] = (request["salt"], request["keys"], tokens[p], p)
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
                block = table[t // self.size]
                assert block >= 0, f"group {group}: what the query at {position} reads at {t} is gone"
                assert self.model.held(group, block, t % self.size) == ids[t], (
                    f"group {group}: wrong KV at {t} for {position}"
                )

    def assert_still_held(self, name):
        """Check that the current tables hold all that this step's queries read and that is not yet computed."""
        tables = self.tables_of(name)
        for of, allocation, _ in self.step:
            if of == name:
                for position in [p for start, end in allocation.compute_spans for p in range(start, end)]:
                    for group, table in enumerate(tables):
                        reads = self.must_read(group, position)
                        assert all(table[t // self.size] >= 0 for t in reads), (
                            "a query of this step reads a released block"
                        )

    # One step of the engine.

    def flush(self):
        """Execute what was allocated: all copies, then all writes."""
        step, self.step = self.step, []
        with self.model.device:
            for _, allocation, _ in step:
                for group, content in enumerate(self.content):
                    self.model.copy(group, self.host[group], allocation.group_loads(group))
                    self.model.copy(group, content, allocation.group_copies(group))
            for _, allocation, _ in step:
                for span in allocation.moved:
                    places = zip(range(span.start, span.end), span.slots.tolist(), span.targets.tolist(), strict=True)
                    for p, slot, target in places:
                        assert not self.manager.pools[0].complete[target // self.size], "a findable block is written"
                        value = hash(("moved", self.content[0][divmod(slot, self.size)], p))
                        self.model.write(0, *divmod(target, self.size), value)
            for name, allocation, tables in step:
                self.compute(name, allocation, tables)
            if self.model.tensors is not None:
                self.compute_rows(step)

    def compute(self, name, allocation, tables):
        """Read and write what the queries of an allocation read and write."""
        request = self.running[name]
        slots = [mapping.tolist() for mapping in self.model.per_group(allocation.slot_mapping)]
        at = 0
        for start, end in allocation.compute_spans:
            self.assert_readable(name, start, tables)
            if self.states:
                assert request["state"] == start or (request["state"] == end and end - start == 1), "no state"
            for position in range(start, end):
                for group in range(len(self.specs)):
                    slot = slots[group][at]
                    if slot >= 0:
                        block, offset = divmod(slot, self.size)
                        assert not self.manager.pools[group].complete[block], "a findable block is written"
                        assert group not in self.states
                        self.model.write(group, block, offset, request["ids"][position])
                at += 1
                for group in self.states:
                    block = request["marks"].pop((group, position + 1), None)
                    if block is not None:
                        self.model.write(group, block, 0, request["ids"][position])
            self.assert_readable(name, end - 1, tables)
            request["state"] = max(request["state"], end)
        assert all(len(mapping) == at for mapping in slots)

    def compute_rows(self, step):
        """Join and store the rows of a step, in several steps if a request has several parts."""
        model, batches = self.model, [{}]
        for name, allocation, _ in step:
            model.tensors.prepare(allocation)
            if name in batches[-1]:
                batches.append({})
            if allocation.compute_spans:
                batches[-1][name] = allocation
        for batch in filter(None, batches):
            ids = {name: self.running[name]["ids"] for name in batch}
            values = [ids[name][p] for name, part in batch.items() for span in part.compute_spans for p in range(*span)]
            rows = pc.Step.of(batch, model.rows_of(values))
            if model.all_stored:
                for name, found in model.tensors.join(rows).items():
                    model.assert_rows(found, ids[name][: batch[name].compute_spans[-1][1]])
            model.store(rows)

    # Random operations.

    def tokens(self, most=40):
        r = self.random
        root = [r.randrange(self.model.alphabet)] * r.randrange(0, most // 2)
        return root + [r.randrange(self.model.alphabet) for _ in range(r.randrange(0, most // 2))]

    def allocate(self):
        r, m = self.random, self.manager
        prompt, salt, keys = (
            self.tokens(),
            r.choice([None] * 6 + ["s", 1, "1"]),
            r.choice([None] * 6 + [("k",), ("k", 2)]),
        )
        reuse = r.choice(["prefix", "prefix", "gap"] + ["anywhere"] * (8 * (self.model.case == "anywhere")))
        part = r.choice([None, None, None, r.randrange(0, 20)])
        name = self.next_name()
        outcome, a = self.call(
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
        if outcome != DONE:
            assert outcome == INTERRUPTED or self.length(name) is None, "a refused request runs"
            self.forget(name)
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
            "loaded": False,  # whether tokens are committed whose blocks were not published since they were loaded
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
        if self.model.exact and self.whole == list(range(len(self.specs))) and reuse == "prefix":
            self.check_hits(a, request, prompt)
        self.add_step(name, a)
        if self.states and r.random() < 0.6:
            self.checkpoint(name, a.junction)
        self.end_verb()

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
                block = int(self.manager.block_table(name, group)[start // self.size - 1])
                loads = {b: s for s, b in allocation.group_loads(group)}
                held = self.host[group].get((loads[block], 0)) if block in loads else self.model.held(group, block, 0)
                assert start % self.size == 0
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
        least = min(hits * self.size, max(len(prompt) - 1, 0))
        most = least if self.model.case not in ("partial", "anywhere") else least + self.size - 1
        assert least <= allocation.num_cached_tokens <= most, "a cached block was not used"

    def checkpoint(self, name, junction):
        request, r = self.running[name], self.random
        length = len(request["tokens"])
        bounds = [b for b in range(self.size, length + 1, self.size) if b > request["state"]]
        if junction is not None:
            assert junction % self.size == 0
            bounds += [junction] * 2 if request["state"] < junction <= length else []
        if not bounds:
            return
        for group in self.states:
            bound = r.choice(bounds)
            outcome, block = self.call(self.manager.checkpoint, name, bound, group)
            if outcome == INTERRUPTED:  # it may hold a block that is never written
                self.forget(name)
                return
            if outcome == DONE:
                assert not self.manager.pools[group].complete[block]
                request["marks"][group, bound] = block

    def append(self):
        if not self.running:
            return
        r, name = self.random, self.random.choice(list(self.running))
        request = self.running[name]
        length, prompt = len(request["tokens"]), request["prompt"]
        new = [r.randrange(self.model.alphabet) for _ in range(r.choice([1, 1, 1, 2, 6]))]
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
        before = self.tables_of(name)
        outcome, a = self.call(self.manager.append, name, new)
        if outcome != DONE:
            if self.length(name) != length:  # it is complete, but its copies are not known
                assert (outcome, self.length(name)) == (INTERRUPTED, length + len(new))
                self.forget(name)
            else:
                assert self.tables_of(name) == before, f"{outcome}, and the table is another"
            return
        request["tokens"] += new
        request["cut"] = False
        request["ids"] = self.ids_of(request, request["tokens"], length) + request["ids"][length + len(new) :]
        assert self.manager.num_tokens(name) == length + len(new)
        (start, end) = a.compute_spans[0]
        assert start <= length < end == length + len(new)
        self.assert_still_held(name)
        self.add_step(name, a)
        if self.states and r.random() < 0.3:
            self.checkpoint(name, None)
        self.end_verb()

    def append_each(self):
        self.flush()
        r = self.random
        names = [n for n in self.running if r.random() < 0.7]
        requests = [self.running[n] for n in names]
        new = [
            q["prompt"][len(q["tokens"])] if len(q["tokens"]) < len(q["prompt"]) else r.randrange(self.model.alphabet)
            for q in requests
        ]
        before, lengths = [self.tables_of(name) for name in names], [len(q["tokens"]) for q in requests]
        outcome, got = self.call(self.manager.append_each, names, new)
        if outcome != DONE:
            now = [self.length(name) for name in names]
            if now == lengths:
                assert [self.tables_of(name) for name in names] == before, f"{outcome}, and a table is another"
                return
            assert (outcome, now) == (INTERRUPTED, [at + 1 for at in lengths]), "some have got their token"
            for name in names:  # it is complete, but its copies are not known
                self.forget(name)
            return
        slots, copies = got
        assert got.requests == tuple(names)
        assert got.query_start_loc.tolist() == list(range(len(names) + 1))
        with self.model.device:
            for group, pairs in enumerate(self.model.per_group(copies)):
                self.model.copy(group, self.content[group], pairs)
            for i, (request, token, at) in enumerate(zip(requests, new, lengths, strict=True)):
                assert got.positions[i] == at
                request["tokens"].append(token)
                request["cut"] = False
                request["ids"] = self.ids_of(request, request["tokens"], at) + request["ids"][at + 1 :]
                for group, mapping in enumerate(self.model.per_group(slots)):
                    slot = int(mapping[i])
                    if slot >= 0:
                        assert not self.manager.pools[group].complete[slot // self.size], "a findable block is written"
                        self.model.write(group, *divmod(slot, self.size), request["ids"][at])
        if self.model.tensors is not None and names:
            self.model.tensors.copy(copies)
            rows = self.model.rows_of([q["ids"][at] for q, at in zip(requests, lengths, strict=True)])
            self.model.store(pc.Step(rows, slots))
        for name, request, at in zip(names, requests, lengths, strict=True):
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
            assert self.model.meaning.setdefault(block_hash, meaning) == meaning, "two contents under one hash"
        outcome, replaced = self.call(self.manager.commit, name, upto)
        if outcome == INTERRUPTED:
            self.after_interrupted_commit(name, hashes[: length // self.size])
            return
        several = self.model.threads > 1  # the old block is free: another thread may have written to it meanwhile
        for group, pairs in enumerate(self.model.per_group(replaced)):
            for old, new in pairs:
                moved = request["approximate"] < math.inf
                at = self.tables_of(name)[group].index(new) * self.size if moved else 0
                for offset in range(self.size):
                    a, b = self.model.held(group, old, offset), self.model.held(group, new, offset)
                    if moved and at >= request["approximate"]:
                        assert several or self.model.of[a] == self.model.of[b], "merged with another"
                        request["ids"][at + offset] = b
                    else:
                        assert several or a == b, "merged with another"
        request["committed"] = max(request["committed"], upto)
        request["loaded"] &= upto < length
        for group, table in enumerate(self.tables_of(name)):
            pool, table = self.manager.pools[group], [block for block in table[: upto // self.size] if block >= 0]
            if group in self.whole:
                published = pool.digests_of([block for block in table if pool.complete[block]])
                assert set(published) <= set(hashes), "a block is published under another hash"
            if self.model.exact and group not in self.states and not request["loaded"]:
                assert pool.complete[table].all(), "a committed block cannot be found"

    def after_interrupted_commit(self, name, hashes):
        """Check that a commit that was undone has published nothing, and find out whether it was undone."""
        request = self.running[name]
        if self.whole and hashes and not request["loaded"]:
            self.manager.explain([])  # after this, listeners know what was published
            if hashes[-1] not in self.model.findable[self.whole[0]]:
                with pytest.raises(ValueError, match="committed, needs all"):
                    self.manager.fork(name, self.next_name())
        if request["approximate"] < math.inf:  # which blocks were merged is not known
            self.forget(name)
        else:
            request["committed"] = self.manager._state.running[name].committed

    def fork(self):
        if not self.running:
            return
        name = self.random.choice(list(self.running))
        parent = self.running[name]
        if self.random.random() < 0.7:
            self.commit(name)  # a fork needs committed tokens
            if name not in self.running:
                return
        child = self.next_name()
        try:
            outcome, _ = self.call(self.manager.fork, name, child)
        except ValueError:
            assert parent["committed"] < len(parent["tokens"])
            return
        if outcome == INTERRUPTED:
            self.forget(child)
            return
        assert self.manager._state.running[name].committed == len(parent["tokens"])
        self.running[child] = dict(parent, tokens=list(parent["tokens"]), ids=list(parent["ids"]), marks={})

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
            self.call(self.manager.rollback, name, count)
        except ValueError:
            assert self.snapshot() == before
            assert len(self.whole) < len(self.specs), "refused without need"
            return
        left = self.length(name)
        assert left in (length, length - count)
        if left < length:
            if self.states:
                tables = [self.manager.block_table(name, g) for g in self.states]
                kept = left == request["committed"] or not left
                assert kept or all(
                    left % self.size == 0
                    and self.model.held(g, int(t[left // self.size - 1]), 0) == request["ids"][left - 1]
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
            self.call(self.manager.free, name, None if self.model.exact else self.random.choice([None, 0, 0.5]))
            self.forget(name)

    def preempt(self):
        if not self.running:
            return
        self.flush()
        r = self.random
        name = self.manager.victim() if r.random() < 0.3 else r.choice(list(self.running))
        if name not in self.running:  # it is another thread's
            return
        request = self.running[name]
        state = self.manager._state
        free = [state.host_blocks - len(state.host_slots(group)) for group in range(len(self.specs))]
        mode = r.choice(["swap", "swap", "recompute"])
        with self.model.device:
            outcome, pairs = self.call(self.manager.preempt, name, mode)
            for group, moved in enumerate(self.model.per_group(pairs) if outcome == DONE else ()):
                for block, slot in moved:
                    for offset in range(self.size):
                        self.host[group][slot, offset] = self.content[group].get((block, offset))
        if outcome == INTERRUPTED:
            if self.length(name) is None:
                self.forget(name)
            return
        if self.model.tensors is not None:
            self.model.tensors.swap_out(pairs)
        del self.running[name]
        self.preempted[name] = request
        needed = -(-request["committed"] // self.size)
        roomy = self.model.exact and mode == "swap" and not self.states and all(f >= needed for f in free)
        # A rollback may have ended where the window of the last token that is left has gone.
        request["least"] = request["committed"] if roomy and self.model.case in ("full", "partial", "anywhere") else 0

    def resume(self):
        if not self.preempted:
            return
        self.flush()
        name = self.random.choice(list(self.preempted))
        outcome, a = self.call(self.manager.resume, name)
        if outcome != DONE:
            if self.length(name) is not None:
                assert outcome == INTERRUPTED, "a request that was refused runs"
                self.forget(name)
            return
        request = self.running[name] = self.preempted.pop(name)
        length = len(request["tokens"])
        self.covers(a, length)
        if a.approximate_from is not None:
            self.take_approximate(name, a)
        assert a.num_cached_tokens >= min(request["least"], length - 1), "what was swapped out is computed again"
        request["marks"], request["loaded"] = {}, True
        self.check_state(name, a)
        request["state"] = self.start_of(a)
        request["committed"] = self.manager._state.running[name].committed
        self.add_step(name, a)
        self.end_verb()

    def serve(self):
        """Run a request from start to end, which causes evictions."""
        before = set(self.running)
        self.allocate()
        self.flush()
        for name in set(self.running) - before:
            self.commit(name)
            if name in self.running:
                self.call(self.manager.free, name)
                self.forget(name)

    def restart(self):
        """With probability 0.1, end all requests and empty the cache."""
        if self.random.random() < 0.9 or self.model.threads > 1:
            return
        self.flush()
        for name in [*self.running, *self.preempted]:
            self.manager.free(name)
        self.running.clear()
        self.preempted.clear()
        self.call(self.manager.reset)
        self.model.all_stored = True
        self.model.raised, self.model.raised_in_interrupted = self.manager.stats().failed_offloads, 0

    WEIGHTS = (
        *[("serve", 5), ("allocate", 5), ("append", 7), ("append_each", 3), ("commit", 7), ("fork", 2)],
        *[("rollback", 3), ("free", 6), ("preempt", 2), ("resume", 3), ("restart", 1)],
    )
    VERBS, CHANCES = zip(*WEIGHTS, strict=True)
