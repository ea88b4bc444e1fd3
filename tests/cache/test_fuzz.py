"""Random requests in several threads with one manager, an unreliable tier, and interrupts at any place.

A world is a `cache_model.Model` with threads or interrupts. One with several threads depends on the machine, so a
failure is tried again.

`make fuzz` runs worlds for an hour, and `make fuzz-quick` for two minutes, alternating with the exact model of one
thread. Both print their seed. `make fuzz-quick SEED=...` begins with the same worlds.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import random
import sys
import time

import numpy as np
import pytest
from cache_model import Model

from pc.cache.pool import BlockPool
from pc.cache.request import Request
from pc.cache.state import ManagerState


def world(seed):
    """Return a model with random threads, interrupts and size of blocks."""
    r = random.Random(seed)
    threads, hazard = r.choice([1, 1, 2, 4]), r.choice([0, 0, 0.1, 0.4])
    return Model(seed, threads=threads, hazard=hazard, size=r.choice([2, 3, 4]))


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
            world(number).run(40)


def _restored_without(patch, *names):
    """Restore all values of a request that an undone verb has changed, but not these."""
    honest = Request.restore

    def restore(self, length, values):
        kept = {name: getattr(self, name) for name in names}
        honest(self, length, values)
        for name, value in kept.items():
            setattr(self, name, value)

    patch.setattr(Request, "restore", restore)


def committed_is_not_restored(patch):
    _restored_without(patch, "committed")


def tables_are_not_restored(patch):
    _restored_without(patch, "tables")


def a_fed_hasher_is_kept(patch):
    _restored_without(patch, "chain")


def tokens_are_not_taken_back(patch):
    honest = Request.restore
    patch.setattr(Request, "restore", lambda self, length, values: honest(self, len(self.tokens), values))


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
            model = world(number)
            if model.hazard and model.threads == 1:  # the others take longer to find it
                model.run(120)


def main():
    """Run worlds and models in turn until the time is over, or one fails."""
    seconds = float(os.environ.get("FUZZ_SECONDS", "120"))
    seed = int(os.environ.get("SEED") or datetime.date.today().strftime("%Y%m%d"))
    print(f"SEED={seed}, {seconds:g} seconds", flush=True)
    end, number = time.monotonic() + seconds, 0
    with quickly():
        while time.monotonic() < end:
            one = seed * 100_000 + number
            name, run = f"world({one})", functools.partial(world(one).run, 120)
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
