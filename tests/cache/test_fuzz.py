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
from cache_cases import plant
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


SEEDS = [*range(0, 60, 20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 120, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_worlds_of_threads_a_tier_and_interrupts(seed):
    with quickly():
        for number in range(seed, seed + 20):
            world(number).run(40)


def restored_without(*names):
    """Restore all values of a request that an undone verb has changed, but not these."""

    def restore(honest, request, length, values):
        kept = {name: getattr(request, name) for name in names}
        honest(request, length, values)
        for name, value in kept.items():
            setattr(request, name, value)

    return [(Request, "restore", restore)]


def writers_stay(honest, state):
    writers = dict(state.writers)
    honest(state)
    state.writers.update(writers)


def around_undo(before, after=lambda state, kept: None):
    """Call a function before each undo of changes, and another one with its result after it."""

    def undo(honest, state, nested):
        changed = state.snapshot is not None
        kept = before(state) if changed else None
        honest(state, nested)
        if changed:
            after(state, kept)

    return [(ManagerState, "undo", undo)]


def change_snapshot(change):
    """Change the snapshot of an undo: requests, fields, the numbers of running and of preempted requests."""
    return around_undo(lambda state: setattr(state, "snapshot", change(state, *state.snapshot)))


BUGS = {
    "committed is not restored": restored_without("committed"),
    "tables are not restored": restored_without("tables"),
    "a fed hasher is kept": restored_without("chain"),
    "tokens are not taken back": [
        (Request, "restore", lambda honest, request, length, values: honest(request, len(request.tokens), values))
    ],
    "nothing is rebuilt": [(ManagerState, "_rebuild", lambda *_: None)],
    "writers are not rebuilt": [(ManagerState, "_rebuild", writers_stay)],
    "a reference too many is rebuilt": [
        (BlockPool, "rebuild", lambda honest, pool, held: honest(pool, np.append(held, held[:1])))
    ],
    "evicted blocks of an undone verb stay lost": around_undo(lambda state: state.log.evicted.clear()),
    "published blocks of an undone verb stay published": around_undo(lambda state: state.log.published.clear()),
    "listeners are told of evictions that are undone": around_undo(
        lambda state: state.log.evicted[:], lambda state, evicted: state.log.evicted.extend(evicted)
    ),
    "tasks of an undone verb run": around_undo(
        lambda state: state.log.later[:], lambda state, later: state.log.later.extend(later)
    ),
    "tokens of append_each are not taken back": change_snapshot(
        lambda state, requests, *rest: ([each for each in requests if each[2]], *rest)
    ),
    "a request of an undone verb runs on": change_snapshot(
        lambda state, requests, fields, _, others: (requests, fields, len(state.running), others)
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_undo_is_found(bug, monkeypatch):
    """In a part of what `make fuzz-quick` runs in two minutes."""
    plant(monkeypatch, *BUGS[bug])
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
