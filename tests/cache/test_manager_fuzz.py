"""Random operations on CacheManager against a model of what every slot holds, and against bugs planted on purpose."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
from cache_model import BLOCK, GROUPS, Model

import pc
from pc.cache import allocate, append, commit, lookup, partial_reuse, state, swap
from pc.cache.hashing import Chain
from pc.cache.keys import NO_KEYS
from pc.cache.pool import BlockPool
from pc.cache.request import Request
from pc.cache.state import ManagerState

OPERATIONS = int(os.environ.get("PC_FUZZ_OPERATIONS", "100000"))
LENGTH = 250


@pytest.fixture(autouse=True)
def _quiet():
    """Hooks that fail on purpose log their tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("case", GROUPS)
def test_random_operations(case):
    for seed in range(max(1, OPERATIONS // len(GROUPS) // LENGTH)):
        model = Model(seed, case)
        try:
            model.run(LENGTH)
        except Exception as error:
            raise AssertionError(f"Model({seed}, {case!r}).run({LENGTH})") from error


def window_released_too_early(patch):
    """What the last token reads is given up though it may be computed again."""

    def passed(self, request, group, end=0):
        length = request.pending
        request.pending = [0] * (len(request.tokens) + 9)
        try:
            return honest(self, request, group, end)
        finally:
            request.pending = length

    honest = ManagerState.passed
    patch.setattr(ManagerState, "passed", passed)


def copy_before_its_source_is_written(patch):
    plan = append._plan
    patch.setattr(append, "_plan", lambda state, ends, decoding: plan(state, ends, True))


def fork_goes_on_in_place(patch):
    patch.setattr(append, "_replace_shared", lambda pool, request, group, block: (0, 0))


def shared_blocks_are_not_counted(patch):
    patch.setattr(BlockPool, "share", lambda self, ids: None)


def stale_guess_is_believed(patch):
    patch.setattr(BlockPool, "_unlist", lambda self, ids: (self.table.remove(ids), self.index_of(ids))[1])


def salt_is_forgotten(patch):
    patch.setattr(pc.cache.manager, "encode_keys", lambda extra_keys, salt: NO_KEYS)


def fork_shares_its_hasher(patch):
    def copy(self):
        other = honest(self)
        other._hasher = self._hasher
        return other

    honest = Chain.copy
    patch.setattr(Chain, "copy", copy)


def rollback_keeps_hashes(patch):
    class Kept(pc.cache.request.Request):
        """Hashes of tokens that were taken back stay."""

        @property
        def digests(self):
            return self._kept

        @digests.setter
        def digests(self, value):
            if not hasattr(self, "_kept") or len(value) > len(self._kept):
                self._kept = value

    patch.setattr(allocate, "Request", Kept)


def replaced_block_is_free_at_once(patch):
    def publish(self, *arguments):
        pairs = honest(self, *arguments)
        return pairs

    honest = commit._publish
    patch.setattr(commit, "_publish", publish)
    patch.setattr(Request, "keep_replaced", lambda self, group, ids: None)


def failed_tier_loses_blocks(patch):
    patch.setattr(BlockPool, "restore", lambda self, victims, hashes: self.give_up(victims))


def partial_copy_is_a_token_too_long(patch):
    honest = partial_reuse.PartialIndex.longest

    def longest(self, parent, tokens):
        block_hash, common = honest(self, parent, tokens)
        return block_hash, common + (0 < common < len(tokens))

    patch.setattr(partial_reuse.PartialIndex, "longest", longest)


def host_slots_are_given_back_early(patch):
    def end_step(self, request):
        honest(self, request)
        for host in self.host:
            host._free = list(range(host.count))

    honest = ManagerState.end_step
    patch.setattr(ManagerState, "end_step", end_step)


def state_is_published_under_another_hash(patch):
    honest = commit._digest_of

    def digest_of(state, request, group, block):
        return honest(state, request, group, max(block - state.groups[group].holds_states, 0))

    patch.setattr(commit, "_digest_of", digest_of)


def a_hit_ends_a_block_early(patch):
    patch.setattr(allocate, "find_prefix", lambda held, *rest: lookup.find_prefix(held[: held.size - 1], *rest))


def resume_takes_the_wrong_host_slot(patch):
    honest = swap._host_tables

    def tables(saved, groups, num_blocks):
        found = honest(saved, groups, num_blocks)
        return [np.where(t >= 0, t[::-1].max(initial=0), t).astype(np.int32) for t in found]

    patch.setattr(swap, "_host_tables", tables)


def hits_are_not_protected_from_eviction(patch):
    patch.setattr(state.ManagerState, "hold", lambda self, group, ids: None)
    patch.setattr(BlockPool, "hold", lambda self, ids: None)


BUGS = (
    *(window_released_too_early, copy_before_its_source_is_written, fork_goes_on_in_place),
    *(shared_blocks_are_not_counted, stale_guess_is_believed, salt_is_forgotten, fork_shares_its_hasher),
    *(rollback_keeps_hashes, replaced_block_is_free_at_once, failed_tier_loses_blocks),
    *(partial_copy_is_a_token_too_long, host_slots_are_given_back_early, state_is_published_under_another_hash),
    *(a_hit_ends_a_block_early, resume_takes_the_wrong_host_slot, hits_are_not_protected_from_eviction),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    assert BLOCK == 4
    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  any check may find it
        _run_all()


def _run_all():
    for seed in range(12):
        for case in GROUPS:
            Model(seed, case).run(120)


def test_without_a_planted_bug_the_same_runs_pass():
    _run_all()
