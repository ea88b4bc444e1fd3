"""Random operations on CacheManager and TensorCache, compared with a model of each slot; planted bugs must be found."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from cache_cases import plant
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
from pc.cache.tensors import rows, step, tensor_cache

WAYS = {
    "runs": (),
    "runs, by several threads": ((rows, "_ALONE_BYTES", -1), (torch, "get_num_threads", lambda: 2)),
    "slots": ((step, "_FEW_RUNS", 0), (step, "_SHORT", 1 << 30), (rows, "worth_copies", lambda *_: False)),
    "operators": ((tensor_cache, "PLAIN", frozenset()),),
}
"""The methods that move rows of a TensorCache. Tensors as small as these would only use runs."""


@pytest.fixture(autouse=True)
def _quiet():
    """Hide the tracebacks of hooks that fail on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("length", [175, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", GROUPS)
def test_random_operations(case, length, monkeypatch):
    for seed, way in enumerate(WAYS):
        model = Model(seed, case)
        with monkeypatch.context() as patch:
            for place in WAYS[way]:
                patch.setattr(*place)
            try:
                model.run(length)
            except Exception as error:
                raise AssertionError(f"Model({seed}, {case!r}).run({length}), {way}") from error


class KeptHashes(Request):
    """A request that keeps the hashes of tokens that were rolled back."""

    @property
    def digests(self):
        return self._kept

    @digests.setter
    def digests(self, value):
        if not hasattr(self, "_kept") or len(value) > len(self._kept):
            self._kept = value


def release_early(honest, state, request, group, position):
    return honest(state, request, group, min(request.committed, max(position + 1, len(request.tokens))))


def share_the_hasher(honest, chain):
    other = honest(chain)
    other.hasher = chain.hasher
    return other


def publish_states_elsewhere(honest, state, request, group, first, last):
    digests = request.digests
    if state.groups[group].holds_states:
        request.digests = np.concatenate((digests[:1], digests[:-1]))
    pairs = honest(state, request, group, first, last)
    request.digests = digests
    return pairs


def copy_a_token_more(honest, blocks, parent, tokens):
    block_hash, common = honest(blocks, parent, tokens)
    return block_hash, common + (0 < common < len(tokens))


def one_slot_for_all(honest, table, held, fresh, slots=()):
    return honest(table, held, fresh, [max(slots, default=0)] * len(slots))


def without_salt(honest, *args):
    return honest(*(bytes(len(each)) if isinstance(each, bytes) else each for each in args))


def hold_no_sources(honest, state, name, request, hit):
    return honest(state, name, request, hit._replace(borrowed=hit.borrowed[: hit.copied > 0]))


def each_span(change):
    return lambda honest, *args: (hit := honest(*args))._replace(moved=[change(span) for span in hit.moved])


def copy_as_exact(honest, request):
    other = honest(request)
    other.keys, other.chain = other.keys._replace(placed=()), None
    return other


def resume_as_exact(honest, state, request_id):
    request = state.preempted[request_id]
    request.keys = request.keys._replace(placed=())
    return honest(state, request_id)


BUGS = {
    "a window is released too early": [(ManagerState, "behind_window", release_early)],
    "partly filled blocks are never copied": [(append, "_partial_block", lambda *_: -1)],
    "a fork goes on in place": [(append, "_replace_shared", lambda *_: (0, 0))],
    "shared blocks are not counted": [(BlockPool, "share", lambda *_: None)],
    "a salt is forgotten": [(pc.cache.manager, "encode_keys", lambda *_: NO_KEYS)],
    "a fork shares its hasher": [(Chain, "copy", share_the_hasher)],
    "a rollback keeps hashes": [(allocate, "Request", lambda _, *args: KeptHashes(*args))],
    "a replaced block is free at once": [(Request, "keep_replaced", lambda *_: None)],
    "a partial copy is a token too long": [(PartialBlocks, "longest", copy_a_token_more)],
    "a host slot in use is given again": [
        (swap, "sorted", lambda honest, free: [0, *honest(free - {0})] if free else [])
    ],
    "a state is published under another hash": [(commit, "_publish", publish_states_elsewhere)],
    "a hit ends a block early": [(allocate, "find_prefix", lambda honest, held, *rest: honest(held[:-1], *rest))],
    "resume takes the wrong host slot": [(lookup, "GroupHit", one_slot_for_all)],
    "hits are not protected from eviction": [(BlockPool, "hold", lambda *_: None)],
}
MOVED_BUGS = {
    "moved text keeps the identity of exact text": [(MovedText, "_set_identity", lambda *_: None)],
    "text is found across salts": [(ContentIndex, "add", without_salt), (ContentIndex, "find", without_salt)],
    "neighbours are taken for equal": [(content, "common_length", lambda _, one, two: min(one.size, two.size))],
    "neighbours are taken for unchanged": [(ContentIndex, "_neighbour", lambda _, i, links, at, by: links.item(at))],
    "entries outlive their blocks": [(ContentIndex, "_live", lambda _, index, ids: ids >= 0)],
    "entries outlive the content of their blocks": [
        (ContentIndex, "_live", lambda _, index, ids: index._stamps_now(ids) >= 0),
        (MovedText, "published", lambda honest, *args: args[-1] % 2 or honest(*args)),
    ],
    "sources of moved text are not held": [(allocate, "admit", hold_no_sources)],
    "keys are turned a position too far": [
        (MovedText, "extend", each_span(lambda span: span._replace(delta=span.delta + 1)))
    ],
    "moved text begins a slot early": [
        (MovedText, "extend", each_span(lambda span: span._replace(slots=span.slots - 1)))
    ],
    "moved text overlaps the prefix": [
        (ContentIndex, "find", lambda honest, index, tokens, begin, *rest: honest(index, tokens, 0, *rest))
    ],
    "a fork of moved text is exact": [(Request, "copy", copy_as_exact)],
    "a preempted request is exact again": [(swap, "resume", resume_as_exact)],
    "a chain built again is exact": [
        (commit, "Chain", lambda honest, hasher, keys: honest(hasher, keys._replace(placed=())))
    ],
    "blocks with moved text are copied in part": [(Chain, "namespace", property(lambda chain: chain.start.digest()))],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    assert BLOCK == 4
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises(Exception):  # noqa: B017, PT011  any check may find it
        _run_all()


@pytest.mark.parametrize("bug", MOVED_BUGS)
def test_a_planted_bug_of_moved_text_is_found(bug, monkeypatch):
    plant(monkeypatch, *MOVED_BUGS[bug])
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
