"""Random requests in several threads with one manager, an unreliable tier, and interrupts at any place.

Each request writes its slots' expected content: a number for the salt and all tokens up to there, the token, and its
position. It makes the copies that the manager lists, and reads what its next query needs. A tier must get blocks with
the content of their hashes. It takes or refuses them, raises, and calls the manager. A world with one thread is the
same for the same seed. One with several threads depends on the machine, so a failure is tried again. Only public
methods are used.

`make fuzz` runs worlds for an hour, and `make fuzz-quick` for two minutes, alternating with the exact model of one
thread (`cache_model`). Both print their seed. `make fuzz-quick SEED=...` begins with the same worlds.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import functools
import logging
import math
import os
import random
import sys
import threading
import time
import traceback

import numpy as np
import pytest
from cache_model import GROUPS, Model

import pc
from pc.cache.pool import BlockPool
from pc.cache.request import Request as Request_
from pc.cache.state import ManagerState

FOLDER = os.path.realpath(os.path.dirname(pc.cache.__file__))
KINDS = ("full", "partial", "anywhere", "window", "full and window", "full and state", "all")


class TierError(Exception):
    """An error of a tier."""


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
        called = before is not None and before.opname in ("CALL", "CALL_FUNCTION_EX", "RESUME")
        if called and handler(before.offset) == handler(instruction.offset):
            found.add(instruction.offset)
        before = instruction
    return frozenset(found)


@contextlib.contextmanager
def interrupted(after):
    """Raise KeyboardInterrupt in this thread after `after` places of the manager's code. None: never.

    Yields a function that returns how many places were passed.
    """
    left = after

    def local(frame, event, argument):
        nonlocal left
        if event == "line" or (event == "opcode" and frame.f_lasti in _interruptible(frame.f_code)):
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def start(frame, event, argument):
        if not os.path.realpath(frame.f_code.co_filename).startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        return local

    if after is not None:
        sys.settrace(start)
    try:
        yield lambda: after - left
    finally:
        sys.settrace(None)


def same(got, value):
    """Return whether a slot holds what it must.

    For approximate KV, only the token, its place and the salt are known.
    """
    return got == value or (value[0] is None and got is not None and got[1:] == value[1:])


class Request:
    """A request's tokens, and the expected content of its slots."""

    def __init__(self, name, salt, tokens):
        self.name, self.salt, self.prompt, self.tokens, self.values = name, salt, tokens, [], []
        self.approximate = math.inf
        self.loaded = False  # whether tokens are committed whose blocks were not published since they were loaded
        self.grow(tokens)

    def grow(self, tokens):
        for token in tokens:
            last = hash((self.values[-1][0] if self.values else self.salt, token))
            self.values.append((last, token, len(self.tokens), self.salt))
            self.tokens.append(token)

    def cut(self, length):
        del self.tokens[length:], self.values[length:]

    def value(self, position):
        value = self.values[position]
        return value if position < self.approximate else (None, *value[1:])

    def fork(self, name):
        other = Request(name, self.salt, [])
        other.prompt, other.tokens, other.values = self.prompt, self.tokens[:], self.values[:]
        other.approximate = self.approximate
        return other


class World:
    """A manager, its memory and its tier."""

    def __init__(self, seed):
        self.seed, r = seed, random.Random(seed)
        self.kind, self.threads = r.choice(KINDS), r.choice([1, 1, 2, 4])
        self.size, self.alphabet = r.choice([2, 3, 4]), r.choice([2, 2, 3])
        self.hazard = r.choice([0, 0, 0.1, 0.4])  # probability that a verb is interrupted
        self.manager = pc.CacheManager(
            r.randrange(8, 40),
            self.size,
            policy=r.choice(["lru", "default", "s3fifo"]),
            groups=GROUPS[self.kind](),
            host_blocks=r.choice([0, 4, 16]),
            partial_reuse=self.kind == "partial" or (self.kind == "anywhere" and r.random() < 0.5),
        )
        self.groups = self.manager.groups
        self.states = [g for g, spec in enumerate(self.groups) if isinstance(spec, pc.Recurrent)]
        whole = (g for g, spec in enumerate(self.groups) if isinstance(spec, pc.FullAttention | pc.Tensors))
        self.whole = next(whole, None)  # a group in which a request holds all its blocks
        self.content = [{} for _ in self.groups]
        self.host = [{} for _ in self.groups]
        self.meaning, self.published = {}, set()
        self.device = threading.Lock()  # writes follow the copies of a preemption, as on a stream
        self.inside, self.raised, self.errors = threading.local(), 0, []
        self.manager.listeners.append(self)
        if r.random() < 0.75:
            self.manager.on_evict = self.on_evict

    # Callbacks of the manager.

    def stored(self, group, hashes, parent, token_ids, extra_keys):
        self.published |= {(group, block_hash) for block_hash in hashes}

    def removed(self, group, hashes):
        self.published -= {(group, block_hash) for block_hash in hashes}

    def cleared(self):
        self.published.clear()

    def assert_kept(self, group, blocks, hashes):
        for block, block_hash in zip(blocks.tolist(), hashes, strict=True):
            got, value = self.content[group].get((block, self.size - 1)), self.meaning[block_hash]
            if not same(got, value):
                self.errors.append(f"a tier got {got} for {value}: block {block} of group {group}")

    def on_evict(self, group, blocks, hashes):
        self.assert_kept(group, blocks, hashes)
        worker = getattr(self.inside, "worker", None)
        if worker is None or getattr(self.inside, "deep", False):
            return None
        r = worker.random
        chance = r.random()
        if chance < 0.1:
            self.raised += 1
            raise TierError
        if chance < 0.12 and self.hazard:
            raise KeyboardInterrupt
        if chance < 0.4:
            self.call_back(worker)
        elif chance < 0.5:
            time.sleep(0.0002)
        self.assert_kept(group, blocks, hashes)
        return None if chance > 0.9 else hashes[: r.randrange(len(hashes) + 1)]

    def call_back(self, worker):
        """Call the manager as a tier may while it receives blocks."""
        self.inside.deep, name = True, ("inner", worker.next_name())
        r = worker.random
        try:
            if r.random() < 0.5:
                self.manager.check()
            self.manager.allocate(name, [r.randrange(self.alphabet) for _ in range(r.randrange(1, 9))])
        except pc.OutOfBlocks:
            pass
        finally:
            sys.settrace(None)
            self.inside.deep = False
            worker.forget(name)

    def run(self, operations):
        """Run all threads, and check the state that they leave."""
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
        failed = getattr(stats, "failed_offloads", None)
        assert failed is None or (failed > 0) == (self.raised > 0)
        there = {(g, h) for g, p in enumerate(manager.pools) for h in p.digests_of(p.complete.nonzero()[0])}
        assert self.published == there, "listeners were told something else"
        manager.on_evict = None
        if not self.states:
            count = min(pool.num_blocks for pool in manager.pools) * self.size
            manager.allocate("all", range(100, 100 + count))
            manager.free("all")
            manager.check()


DONE, REFUSED, INTERRUPTED = "done", "refused", "interrupted"


class Worker:
    """A thread and the requests that only it uses."""

    def __init__(self, world, number):
        self.world, self.number, self.count = world, number, 0
        self.random = random.Random(world.seed * 10 + number)
        self.running, self.preempted = {}, {}
        self.places = {}  # by verb: places of its last call that was traced to its end

    def next_name(self):
        self.count += 1
        return self.number, self.count

    def run(self, operations):
        world = self.world
        world.inside.worker = self
        try:
            verbs = random.Random(world.seed * 10 + self.number + 5).choices(
                *zip(*self.WEIGHTS, strict=True), k=operations
            )
            for verb in verbs:
                if world.errors:
                    break
                getattr(self, "free" if len(self.running) > 3 else verb)()
                for request in self.running.values():
                    self.assert_readable(request)
                if self.random.random() < 0.2:
                    world.manager.check()
            for name in [*self.running, *self.preempted]:
                world.manager.free(name)
        except BaseException:
            world.errors.append(traceback.format_exc())

    def call(self, verb, *args, **options):
        """Run a verb, sometimes with an interrupt in it; return its outcome and its result."""
        world, after, r = self.world, None, self.random
        if r.random() < world.hazard:
            after = int(math.exp(r.uniform(0, 8)))
            if r.random() < 0.5 and verb.__name__ in self.places:  # behind its last changes
                after = max(self.places[verb.__name__] - r.randrange(12), 1)
        try:
            with interrupted(after) as passed:
                result = verb(*args, **options)
            if after is not None:
                self.places[verb.__name__] = passed()
            return DONE, result
        except (pc.OutOfBlocks, TierError):  # a tier's error may reach the caller; then nothing has changed
            return REFUSED, None
        except KeyboardInterrupt:
            world.manager.check()
            return INTERRUPTED, None

    def length(self, name):
        """Return the number of tokens of a running request, None if it does not run."""
        try:
            return self.world.manager.num_tokens(name)
        except KeyError:
            return None

    def forget(self, name):
        with contextlib.suppress(KeyError):
            self.world.manager.free(name)
        self.running.pop(name, None)
        self.preempted.pop(name, None)

    def tables(self, name):
        return [self.world.manager.block_table(name, group).tolist() for group in range(len(self.world.groups))]

    # Memory.

    def carry_out(self, request, allocation):
        """Copy and write what an allocation lists."""
        world, size = self.world, self.world.size
        with world.device:
            for group, content in enumerate(world.content):
                pairs = [(world.host[group], *pair) for pair in allocation.group_loads(group)]
                for source, a, b in pairs + [(content, *pair) for pair in allocation.group_copies(group)]:
                    content.update({(b, offset): source.get((a, offset)) for offset in range(size)})
            for span in allocation.moved:
                slots, targets = span.slots.tolist(), span.targets.tolist()
                for p, slot, target in zip(range(span.start, span.end), slots, targets, strict=True):
                    got = world.content[0][divmod(slot, size)]
                    wanted = (request.tokens[p], p - span.delta, request.salt)
                    assert got[1:] == wanted, f"moved {got} for {wanted}"
                    world.content[0][divmod(target, size)] = request.value(p)
            start = allocation.cached_spans[0][1] if allocation.cached_spans else 0
            if start and allocation.compute_spans:
                for group in world.states:
                    block = int(world.manager.block_table(request.name, group)[start // size - 1])
                    assert world.content[group].get((block, size - 1)) == request.value(start - 1), "no state to go on"
            mappings = allocation.slot_mapping
            positions = [p for begin, end in allocation.compute_spans for p in range(begin, end)]
            for group, mapping in enumerate([mappings] if len(world.groups) == 1 else mappings):
                for p, slot in zip(positions, mapping.tolist(), strict=True):
                    if slot >= 0:
                        world.content[group][divmod(slot, size)] = request.value(p)
        request.start = start
        self.assert_readable(request)

    def assert_readable(self, request):
        """Check that what the query after the last token reads is present."""
        length, size = len(request.tokens), self.world.size
        for group, (spec, table) in enumerate(zip(self.world.groups, self.tables(request.name), strict=True)):
            if group in self.world.states:
                continue
            window = isinstance(spec, pc.SlidingWindow)
            for p in range(length):
                if window and p <= length - spec.window and p >= spec.num_sink_tokens:
                    continue
                got = self.world.content[group].get((table[p // size], p % size))
                assert same(got, request.value(p)), f"{got} at {p} of {request.name}, group {group}: {request.value(p)}"

    # Random operations.

    def allocate(self):
        r, world = self.random, self.world
        tokens = [r.randrange(world.alphabet)] * r.randrange(12) + [
            r.randrange(world.alphabet) for _ in range(r.randrange(1, 14))
        ]
        reuse = r.choice(["prefix", "prefix", "gap"] + ["anywhere"] * (4 * (world.kind == "anywhere")))
        request = Request(self.next_name(), r.choice([None, None, "salt"]), tokens)
        part = r.choice([None, None, None, r.randrange(1, 12)])
        options = {"salt": request.salt, "reuse": reuse, "priority": r.choice([0, 0, 2]), "num_tokens": part}
        outcome, allocation = self.call(world.manager.allocate, request.name, tokens, **options)
        length = self.length(request.name)
        if outcome != DONE:
            assert outcome == INTERRUPTED or length is None, "a refused request runs"
            self.forget(request.name)
            return
        request.cut(length)
        self.begin(request, allocation)
        if world.states and length >= world.size and r.random() < 0.7:
            self.checkpoint(request)
        if r.random() < 0.8 and request.name in self.running:
            self.publish(request)

    def begin(self, request, allocation):
        self.running[request.name] = request
        if allocation.approximate_from is not None:
            request.approximate = allocation.approximate_from
        self.carry_out(request, allocation)

    def checkpoint(self, request):
        world, size = self.world, self.world.size
        bounds = [b for b in range(size, len(request.tokens) + 1, size) if b > request.start]
        for group in world.states if bounds else ():
            bound = self.random.choice(bounds)
            outcome, block = self.call(world.manager.checkpoint, request.name, bound, group)
            if outcome == INTERRUPTED:  # it may hold a block that was never written
                self.forget(request.name)
                return
            if outcome == DONE:
                with world.device:
                    world.content[group][block, size - 1] = request.value(bound - 1)

    def commit(self):
        if request := self.pick():
            self.publish(request, self.random.choice([1, 1, 1, self.random.random()]))

    def publish(self, request, share=1):
        """Commit a share of the tokens, which are all written; return the outcome."""
        world, name, length = self.world, request.name, len(request.tokens)
        hashes = world.manager.block_hashes(name)[: length // world.size]
        for block, block_hash in enumerate(hashes):
            world.meaning[block_hash] = request.value(block * world.size + world.size - 1)
        outcome = self.call(world.manager.commit, name, int(length * share))[0]
        if outcome == DONE and share == 1:
            request.loaded = False
        if outcome == INTERRUPTED and world.whole is not None and hashes and not request.loaded:
            world.manager.explain([])  # after this listeners know what was published
            if (world.whole, hashes[-1]) not in world.published:
                with pytest.raises(ValueError, match="committed, needs all"):
                    world.manager.fork(name, self.next_name())
        return outcome

    def pick(self):
        return self.random.choice(list(self.running.values())) if self.running else None

    def append(self):
        r, request = self.random, self.pick()
        if request is None:
            return
        length = len(request.tokens)
        new = [r.randrange(self.world.alphabet) for _ in range(r.choice([1, 1, 2, 5]))]
        if length < len(request.prompt):
            new = request.prompt[length : length + r.randrange(1, 9)]
        before = self.tables(request.name)
        outcome, allocation = self.call(self.world.manager.append, request.name, new)
        now = self.length(request.name)
        if outcome == DONE:
            assert now == length + len(new)
            request.grow(new)
            self.carry_out(request, allocation)
        elif now != length:  # done, but its copies are not known
            assert outcome == INTERRUPTED
            assert now == length + len(new)
            self.forget(request.name)
        else:
            assert self.tables(request.name) == before, f"{outcome}, and the table is another"

    def append_each(self):
        r, world = self.random, self.world
        requests = [request for request in self.running.values() if r.random() < 0.7]
        names, lengths = [q.name for q in requests], [len(q.tokens) for q in requests]
        new = [
            q.prompt[at] if at < len(q.prompt) else r.randrange(world.alphabet)
            for q, at in zip(requests, lengths, strict=True)
        ]
        before = [self.tables(name) for name in names]
        outcome, got = self.call(world.manager.append_each, names, new)
        now = [self.length(name) for name in names]
        if outcome != DONE:
            if now == lengths:
                assert [self.tables(name) for name in names] == before, f"{outcome}, and a table is another"
                return
            assert outcome == INTERRUPTED
            assert now == [at + 1 for at in lengths], "some have got their token"
            for name in names:  # done, but its copies are not known
                self.forget(name)
            return
        assert now == [at + 1 for at in lengths]
        slots, copies = got if len(world.groups) > 1 else ([got[0]], [got[1]])
        with world.device:
            for content, pairs in zip(world.content, copies, strict=True):
                for a, b in pairs:
                    content.update({(b, offset): content.get((a, offset)) for offset in range(world.size)})
            for i, (request, token) in enumerate(zip(requests, new, strict=True)):
                request.grow([token])
                for content, mapping in zip(world.content, slots, strict=True):
                    if mapping[i] >= 0:
                        content[divmod(int(mapping[i]), world.size)] = request.value(lengths[i])

    def fork(self):
        request = self.pick()
        if request is None:
            return
        if self.publish(request) != DONE:
            return
        child = request.fork(self.next_name())
        if self.call(self.world.manager.fork, request.name, child.name)[0] == DONE:
            self.running[child.name] = child
            child.start = len(child.tokens)
        else:
            self.forget(child.name)

    def rollback(self):
        request = self.pick()
        if request is None:
            return
        length = len(request.tokens)
        count = min(length, self.random.choice([1, 1, 2, 5]))
        try:
            self.call(self.world.manager.rollback, request.name, count)
        except ValueError:
            assert len(self.world.groups) > 1 or self.world.kind == "window", "refused without need"
        left = self.length(request.name)
        assert left in (length, length - count)
        request.cut(left)
        if left < length:
            request.prompt, request.start = request.tokens[:], left

    def free(self):
        names = [*self.running, *self.preempted]
        if names:
            name = self.random.choice(names)
            self.call(self.world.manager.free, name, self.random.choice([None, 0, 0.5]))
            self.forget(name)

    def preempt(self):
        world, request = self.world, self.pick()
        if request is None:
            return
        with world.device:
            outcome, pairs = self.call(world.manager.preempt, request.name, self.random.choice(["swap", "recompute"]))
            if outcome == DONE:
                for group, moved in enumerate([pairs] if len(world.groups) == 1 else pairs):
                    for block, slot in moved:
                        for offset in range(world.size):
                            world.host[group][slot, offset] = world.content[group].get((block, offset))
        if outcome == DONE:
            self.preempted[request.name] = self.running.pop(request.name)
        elif self.length(request.name) is None:
            self.forget(request.name)

    def resume(self):
        if not self.preempted:
            return
        name = self.random.choice(list(self.preempted))
        outcome, allocation = self.call(self.world.manager.resume, name)
        if outcome == DONE:
            self.preempted[name].loaded = True
            self.begin(self.preempted.pop(name), allocation)
        elif self.length(name) is not None:
            assert outcome == INTERRUPTED, "a request that was refused runs"
            self.forget(name)

    WEIGHTS = (
        *[("allocate", 9), ("append", 6), ("append_each", 3), ("commit", 5), ("fork", 2), ("rollback", 2)],
        *[("free", 6), ("preempt", 2), ("resume", 3)],
    )


@contextlib.contextmanager
def quickly():
    """Switch threads often, and hide the errors that hooks raise on purpose."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    logging.getLogger("pc.cache").setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        logging.getLogger("pc.cache").setLevel(logging.NOTSET)


@pytest.mark.parametrize("seed", range(0, 120, 20))
@pytest.mark.quick
def test_worlds_of_threads_a_tier_and_interrupts(seed):
    with quickly():
        for number in range(seed, seed + 20):
            World(number).run(40)


def _restored_without(patch, *names):
    """Restore all values of a request that an undone verb has changed, but not these."""
    honest = Request_.restore

    def restore(self, length, values):
        kept = {name: getattr(self, name) for name in names}
        honest(self, length, values)
        for name, value in kept.items():
            setattr(self, name, value)

    patch.setattr(Request_, "restore", restore)


def committed_is_not_restored(patch):
    _restored_without(patch, "committed")


def tables_are_not_restored(patch):
    _restored_without(patch, "tables")


def a_fed_hasher_is_kept(patch):
    _restored_without(patch, "chain")


def tokens_are_not_taken_back(patch):
    honest = Request_.restore
    patch.setattr(Request_, "restore", lambda self, length, values: honest(self, len(self.tokens), values))


def nothing_is_rebuilt(patch):
    patch.setattr(ManagerState, "_rebuild", lambda self: None)


def writers_are_not_rebuilt(patch):
    honest = ManagerState._rebuild

    def rebuild(self):
        writers = dict(self.writers)
        honest(self)
        self.writers.update(writers)

    patch.setattr(ManagerState, "_rebuild", rebuild)


def a_reference_too_many_is_rebuilt(patch):
    honest = BlockPool.rebuild
    patch.setattr(BlockPool, "rebuild", lambda self, held: honest(self, np.append(held, held[:1])))


def _around_undo(patch, before=lambda state: None, after=lambda state, kept: None):
    """Call a function before each undo of changes, and another one with its result after it."""
    honest = ManagerState.undo

    def undo(self, nested):
        kept = before(self) if self.snapshot is not None else None
        changed = self.snapshot is not None
        honest(self, nested)
        if changed:
            after(self, kept)

    patch.setattr(ManagerState, "undo", undo)


def evicted_blocks_of_an_undone_verb_stay_lost(patch):
    _around_undo(patch, lambda state: state.log.evicted.clear())


def published_blocks_of_an_undone_verb_stay_published(patch):
    _around_undo(patch, lambda state: state.log.published.clear())


def listeners_are_told_of_evictions_that_are_undone(patch):
    _around_undo(patch, lambda state: state.log.evicted[:], lambda state, evicted: state.log.evicted.extend(evicted))


def tasks_of_an_undone_verb_run(patch):
    _around_undo(patch, lambda state: state.log.later[:], lambda state, later: state.log.later.extend(later))


def a_request_of_an_undone_verb_runs_on(patch):
    def before(state):
        requests, growing, fields, _, preempted = state.snapshot
        state.snapshot = requests, growing, fields, len(state.running), preempted

    _around_undo(patch, before)


def tokens_of_append_each_are_not_taken_back(patch):
    def before(state):
        requests, _, *rest = state.snapshot
        state.snapshot = requests, ((), ()), *rest

    _around_undo(patch, before)


UNDO_BUGS = (
    *(committed_is_not_restored, tables_are_not_restored, a_fed_hasher_is_kept, tokens_are_not_taken_back),
    *(nothing_is_rebuilt, writers_are_not_rebuilt, a_reference_too_many_is_rebuilt),
    *(evicted_blocks_of_an_undone_verb_stay_lost, published_blocks_of_an_undone_verb_stay_published),
    *(listeners_are_told_of_evictions_that_are_undone, tasks_of_an_undone_verb_run),
    *(a_request_of_an_undone_verb_runs_on, tokens_of_append_each_are_not_taken_back),
)


@pytest.mark.parametrize("bug", UNDO_BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_undo_is_found(bug, monkeypatch):
    """In a part of what `make fuzz-quick` runs in two minutes."""
    bug(monkeypatch)
    with pytest.raises(Exception), quickly():  # noqa: B017, PT011, PT012  any check may find it
        for number in range(2000):
            world = World(number)
            if world.hazard and world.threads == 1:  # the others take longer to find it
                world.run(120)


def main():
    """Run worlds and models in turn until the time is over, or one fails."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "120"))
    seed = int(os.environ.get("SEED") or datetime.date.today().strftime("%Y%m%d"))
    print(f"SEED={seed}, {seconds:g} seconds", flush=True)
    end, number = time.monotonic() + seconds, 0
    with quickly():
        while time.monotonic() < end:
            one = seed * 100_000 + number
            name, run = f"World({one})", functools.partial(World(one).run, 120)
            if number % 4 == 3:
                model = Model(one)
                name, run = f"Model({one}, {model.case!r})", functools.partial(model.run, 250)
            try:
                run()
            except BaseException:
                print(f"{name} failed, number {number} of SEED={seed}", flush=True)
                raise
            number += 1
    print(f"{number} worlds and models passed")


if __name__ == "__main__":
    main()
