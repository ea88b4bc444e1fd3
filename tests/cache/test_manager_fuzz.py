"""Random operations on CacheManager, compared with a model of every slot's content; planted bugs must be found."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from cache_model import BLOCK, GROUPS, Model

import pc
from pc.cache import allocate, append, commit, lookup, swap
from pc.cache.hashing import Chain
from pc.cache.keys import NO_KEYS
from pc.cache.pool import BlockPool
from pc.cache.request import Request
from pc.cache.reuse import content
from pc.cache.reuse.content import ContentIndex
from pc.cache.reuse.moved import MovedText
from pc.cache.reuse.partial import PartialBlocks
from pc.cache.state import ManagerState

LENGTH = 250


@pytest.fixture(autouse=True)
def _quiet():
    """Hide the tracebacks of hooks that fail on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.quick
@pytest.mark.parametrize("case", GROUPS)
def test_random_operations(case):
    for seed in range(4):
        model = Model(seed, case)
        try:
            model.run(LENGTH)
        except Exception as error:
            raise AssertionError(f"Model({seed}, {case!r}).run({LENGTH})") from error


def window_released_too_early(patch):
    """Release blocks that the last token reads, although it may be computed again."""
    honest = ManagerState.behind_window
    patch.setattr(
        ManagerState,
        "behind_window",
        lambda self, request, group, position: honest(
            self, request, group, min(request.committed, max(position + 1, len(request.tokens)))
        ),
    )


def partly_filled_blocks_are_never_copied(patch):
    patch.setattr(append, "_seen_tail", lambda state, request, group: -1)


def fork_goes_on_in_place(patch):
    patch.setattr(append, "_replace_shared", lambda state, request, group, block: (0, 0))


def shared_blocks_are_not_counted(patch):
    patch.setattr(BlockPool, "share", lambda self, ids: None)


def salt_is_forgotten(patch):
    patch.setattr(pc.cache.manager, "encode_keys", lambda extra_keys, salt: NO_KEYS)


def fork_shares_its_hasher(patch):
    def copy(self):
        other = honest(self)
        other.hasher = self.hasher
        return other

    honest = Chain.copy
    patch.setattr(Chain, "copy", copy)


def rollback_keeps_hashes(patch):
    class Kept(pc.cache.request.Request):
        """A request that keeps the hashes of tokens that were rolled back."""

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


def partial_copy_is_a_token_too_long(patch):
    honest = PartialBlocks.longest

    def longest(self, parent, tokens):
        block_hash, common = honest(self, parent, tokens)
        return block_hash, common + (0 < common < len(tokens))

    patch.setattr(PartialBlocks, "longest", longest)


def a_host_slot_in_use_is_given_again(patch):
    patch.setattr(swap, "sorted", lambda free: [0, *sorted(set(free) - {0})] if free else [], raising=False)


def state_is_published_under_another_hash(patch):
    honest = commit._publish

    def publish(state, request, group, first, last):
        digests = request.digests
        if state.groups[group].holds_states:
            request.digests = np.concatenate((digests[:1], digests[:-1]))
        pairs = honest(state, request, group, first, last)
        request.digests = digests
        return pairs

    patch.setattr(commit, "_publish", publish)


def a_hit_ends_a_block_early(patch):
    patch.setattr(allocate, "find_prefix", lambda held, *rest: lookup.find_prefix(held[: held.size - 1], *rest))


def resume_takes_the_wrong_host_slot(patch):
    class Wrong(lookup.GroupHit):
        def __new__(cls, table, held, fresh, slots=()):
            return super().__new__(cls, table, held, fresh, [max(slots, default=0)] * len(slots))

    patch.setattr(lookup, "GroupHit", Wrong)


def hits_are_not_protected_from_eviction(patch):
    patch.setattr(BlockPool, "hold", lambda self, ids: None)


def moved_text_keeps_the_identity_of_exact_text(patch):
    patch.setattr(MovedText, "_set_identity", lambda *args: None)


def text_is_found_across_salts(patch):
    add, find = ContentIndex.add, ContentIndex.find
    one = bytes(32)
    patch.setattr(ContentIndex, "__init__", _wide(ContentIndex.__init__))
    patch.setattr(ContentIndex, "add", lambda self, a, b, c, namespace, exact: add(self, a, b, c, one, exact))
    patch.setattr(ContentIndex, "find", lambda self, a, b, c, namespace: find(self, a, b, c, one))


def _wide(make):
    def init(self, pool, size):
        make(self, pool, size)
        self._namespaces = content.np.zeros((pool.num_blocks, 4), "u8")

    return init


def neighbours_are_taken_for_equal(patch):
    patch.setattr(content, "common_length", lambda one, other: min(one.size, other.size))


def neighbours_are_taken_for_unchanged(patch):
    patch.setattr(ContentIndex, "_neighbour", lambda self, links, block, step: links.item(block))


def entries_outlive_their_blocks(patch):
    patch.setattr(ContentIndex, "_live", lambda self, ids: ids >= 0)


def entries_outlive_the_content_of_their_blocks(patch):
    def some(self, request, first, last):
        if not last % 2:
            enter(self, request, first, last)

    enter = MovedText.published
    patch.setattr(ContentIndex, "_live", lambda self, ids: self._pool.table.contains(ids))
    patch.setattr(MovedText, "published", some)


def sources_of_moved_text_are_not_held(patch):
    def admit(state, name, request, hit):
        return honest(state, name, request, hit._replace(borrowed=hit.borrowed[: hit.copied > 0]))

    honest = allocate.admit
    patch.setattr(allocate, "admit", admit)


def _change_spans(patch, change):
    def extend(*args):
        hit = honest(*args)
        return hit._replace(moved=[change(span) for span in hit.moved])

    honest = MovedText.extend
    patch.setattr(MovedText, "extend", extend)


def keys_are_turned_a_position_too_far(patch):
    _change_spans(patch, lambda span: span._replace(delta=span.delta + 1))


def moved_text_begins_a_slot_early(patch):
    _change_spans(patch, lambda span: span._replace(slots=span.slots - 1))


def moved_text_overlaps_the_prefix(patch):
    find = ContentIndex.find
    patch.setattr(
        ContentIndex, "find", lambda self, tokens, begin, end, namespace: find(self, tokens, 0, end, namespace)
    )


def a_fork_of_moved_text_is_exact(patch):
    def copy(self):
        other = honest(self)
        other.keys, other.chain = other.keys._replace(placed=()), None
        return other

    honest = Request.copy
    patch.setattr(Request, "copy", copy)


def a_preempted_request_is_exact_again(patch):
    def resume(state, request_id):
        request = state.preempted[request_id]
        request.keys = request.keys._replace(placed=())
        return honest(state, request_id)

    honest = swap.resume
    patch.setattr(swap, "resume", resume)


def a_chain_built_again_is_exact(patch):
    honest = commit.Chain
    patch.setattr(commit, "Chain", lambda hasher, keys: honest(hasher, keys._replace(placed=())))


def blocks_with_moved_text_are_copied_in_part(patch):
    patch.setattr(Chain, "namespace", property(lambda self: self.start.digest()))


MOVED_BUGS = (
    *(moved_text_keeps_the_identity_of_exact_text, text_is_found_across_salts, neighbours_are_taken_for_equal),
    *(neighbours_are_taken_for_unchanged, entries_outlive_their_blocks, entries_outlive_the_content_of_their_blocks),
    *(sources_of_moved_text_are_not_held, keys_are_turned_a_position_too_far, moved_text_begins_a_slot_early),
    *(moved_text_overlaps_the_prefix, a_fork_of_moved_text_is_exact, a_preempted_request_is_exact_again),
    *(a_chain_built_again_is_exact, blocks_with_moved_text_are_copied_in_part),
)

BUGS = (
    *(
        window_released_too_early,
        partly_filled_blocks_are_never_copied,
        fork_goes_on_in_place,
    ),
    *(shared_blocks_are_not_counted, salt_is_forgotten, fork_shares_its_hasher),
    *(rollback_keeps_hashes, replaced_block_is_free_at_once),
    *(partial_copy_is_a_token_too_long, a_host_slot_in_use_is_given_again, state_is_published_under_another_hash),
    *(a_hit_ends_a_block_early, resume_takes_the_wrong_host_slot, hits_are_not_protected_from_eviction),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    assert BLOCK == 4
    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  any check may find it
        _run_all()


@pytest.mark.parametrize("bug", MOVED_BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_moved_text_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011  any check may find it
        _run_moved()


def _run_moved():
    for seed in range(40):
        Model(seed, "anywhere").run(200)


def _run_all():
    for seed in range(12):
        for case in GROUPS:
            Model(seed, case).run(120)


@pytest.mark.slow
def test_without_a_planted_bug_the_same_runs_pass():
    _run_all()
