"""Our manager in place of vLLM-Omni's: the outputs are the same in each step, and unsupported cases raise."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import omni
import pytest
import torch
from vllm_traffic import scheduled

omni.use_omni()

from vllm_omni.core.prefix_cache.interface import (  # noqa: E402
    ModelCachePolicy,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
    PrefixCacheConfig,
)
from vllm_omni.core.prefix_cache.manager import OmniPrefixCacheManager as Theirs  # noqa: E402

from pc.integrations.vllm.omni import GroupView  # noqa: E402
from pc.integrations.vllm.omni import OmniPrefixCacheManager as Ours  # noqa: E402

SIZE, BLOCKS, WIDTH = 4, 40, 6


def make(kind=Ours, policy=None, **options):
    batch = omni.Batch(SIZE)
    config = PrefixCacheConfig(num_blocks=BLOCKS, block_size=SIZE, **options)
    manager = kind(config, GroupView(batch, 0, SIZE) if kind is Ours else batch, eager=True)
    if policy is not None:
        manager.register_policy(policy)
    return manager, batch


def row(token, position):
    """Return a token's row, which differs for every content."""
    return torch.full((WIDTH,), float(token * 1000 + position))


def run(manager, batch, parts, new=(), finished=(), resumed=(), mm=None, padded=0):
    """Run and save a step of `(name, all its tokens, first position, count, blocks)`."""
    batch.order = [name for name, *_ in parts]
    for name, _, first, _, blocks in parts:
        batch.tables[name], batch.computed[name] = blocks, first
    counts = {name: n for name, _, _, n, _ in parts}
    manager.new_step_starts(scheduled(counts, new, resumed, [name for name, *_ in resumed], finished))
    rows = [row(tokens[at], at) for _, tokens, first, n, _ in parts for at in range(first, first + n)]
    count = len(rows)
    hidden = torch.stack([*rows, *[torch.full((WIDTH,), -1.0)] * padded]) if rows else torch.empty(0, WIDTH)
    step = manager.save_outputs(hidden, mm or {}, num_tokens_unpadded=count, num_tokens_padded=count + padded)
    hidden.fill_(float("nan"))  # the next step reuses the buffer
    return step


def expected(tokens, begin, end):
    return torch.stack([row(tokens[at], at) for at in range(begin, end)])


class Traffic:
    """Requests that share prefixes, run in chunks and decode, with a pool whose blocks are reused."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.free = list(range(BLOCKS))
        self.rng.shuffle(self.free)
        self.cached, self.live, self.ended, self.made = {}, {}, [], 0
        self.roots = [[self.rng.randrange(90) for _ in range(24)] for _ in range(3)]

    def begin(self):
        tokens = self.rng.choice(self.roots)[: self.rng.randrange(1, 24)]
        tokens = tokens + [self.rng.randrange(90) for _ in range(self.rng.randrange(1, 6))]
        hits = []
        while (len(hits) + 1) * SIZE < len(tokens) and tuple(tokens[: (len(hits) + 1) * SIZE]) in self.cached:
            hits.append(self.cached[tuple(tokens[: (len(hits) + 1) * SIZE])])
        held = {block for request in self.live.values() for block in request.blocks}
        need = -(-(len(tokens) + 8) // SIZE) - len(hits)
        spare = [block for block in self.free if block not in held and block not in hits]
        if len(spare) < need:
            return None
        taken = spare[:need]
        self.free = [block for block in self.free if block not in taken] + taken
        self.cached = {key: block for key, block in self.cached.items() if block not in taken}
        self.made += 1
        name = f"r{self.made}"
        self.live[name] = SimpleNamespace(tokens=tokens, done=len(hits) * SIZE, blocks=hits + taken, hit=len(hits))
        return name

    def step(self):
        """Return the parts of a step, its new requests, and the requests that have ended."""
        finished, self.ended = self.ended, []
        fresh = [self.begin() for _ in range(self.rng.randrange(3)) if len(self.live) < 4]
        parts, new = [], []
        for name, request in self.live.items():
            left = len(request.tokens) - request.done
            if left == 0:
                request.tokens.append(self.rng.randrange(90))
                left = 1
            count = min(left, self.rng.choice([1, 3, 8, 30]))
            parts.append((name, list(request.tokens), request.done, count, list(request.blocks)))
            if name in fresh:
                new.append((name, request.done, request.blocks))
            request.done += count
        for name, tokens, first, count, blocks in parts:
            for block in range(first // SIZE, (first + count) // SIZE):
                self.cached.setdefault(tuple(tokens[: (block + 1) * SIZE]), blocks[block])
            request = self.live[name]
            if request.done == len(request.tokens) and (
                self.rng.random() < 0.3 or len(request.tokens) + SIZE > SIZE * len(request.blocks)
            ):
                del self.live[name]
                self.ended.append(name)
        return parts, new, finished


def outputs(step, seed):
    """Return other outputs of a step: rows of tokens, of which one is deferred, and others."""
    count = sum(n for *_, n, _ in step)
    generator = torch.Generator().manual_seed(seed)
    found = {
        "codes": torch.randint(0, 99, (count, 2), generator=generator),
        "late": torch.randn(count, 3, generator=generator),
        "meta": [torch.randn(5, generator=generator), "text"],
        "once": torch.randn(500, 2, generator=generator),
        "flat": torch.arange(count),
    }
    return found


def same(mine, theirs):
    if isinstance(theirs, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return mine == theirs


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gives_what_vllm_omnis_manager_gives(seed):
    """Blocks of this and of earlier steps are hit and reused; outputs are taken at once, late, or never."""
    policy = ModelCachePolicy(needs_full_hidden_states=seed != 5, deferred_keys=frozenset({"late"}))
    ours, batch = make(policy=policy)
    theirs, other = make(Theirs, policy=policy)
    traffic, waiting, hits, taken = Traffic(seed), [], 0, 0
    rng = random.Random(seed)
    for number in range(150):
        parts, new, finished = traffic.step()
        hits += sum(hit > 0 for _, hit, _ in new)
        padded = rng.choice([0, 0, 5])
        ids = [
            run(manager, view, parts, new, finished, mm=outputs(parts, number), padded=padded)
            for manager, view in ((ours, batch), (theirs, other))
        ]
        waiting.append((ids, parts))
        while waiting and (len(waiting) == 4 or rng.random() < 0.7):
            (mine, their), saved = waiting.pop(rng.randrange(len(waiting)))
            if rng.random() < 0.15:
                ours.discard_step(mine)
                theirs.discard_step(their)
                continue
            names = [name for name, *_ in saved if rng.random() < 0.9]
            got, wanted = ours.materialize(mine, names), theirs.materialize(their, names)
            assert same(got.mm_outputs.get("late"), wanted.mm_outputs.get("late"))
            assert same(got.hidden_states, wanted.hidden_states)
            assert same(got.mm_outputs, wanted.mm_outputs)
            taken += 1
    theirs.shutdown()
    assert hits > 30
    assert taken > 80


def test_a_name_that_steps_lack_leaves_zeros_not_what_was_there():
    """VLLM-Omni's manager would give the rows of the prompt that had the blocks before."""
    rows = {}
    for kind in (Ours, Theirs):
        manager, batch = make(kind)
        tokens = list(range(12))
        parts = (
            [("a", tokens, 0, 8, [0, 1])],
            [("b", tokens[::-1], 0, 8, [0, 1])],
            [("c", tokens[::-1], 8, 2, [0, 1, 2])],
        )
        for part, hit, mm in zip(parts, (0, 0, 8), (torch.ones(8, 3), None, torch.ones(2, 3)), strict=True):
            extra = {} if mm is None else {"x": mm}
            step = run(manager, batch, part, new=[(part[0][0], hit, part[0][4])], mm=extra)
            found = manager.materialize(step, [part[0][0]])
        rows[kind] = found.mm_outputs["x"]["c"]
    assert torch.equal(rows[Theirs], torch.ones(10, 3))
    assert torch.equal(rows[Ours], torch.cat([torch.zeros(8, 3), torch.ones(2, 3)]))


def test_a_name_may_be_used_again_once_its_request_has_ended():
    ours, batch = make()
    tokens = list(range(10))
    run(ours, batch, [("a", tokens, 0, 8, [0, 1])], new=[("a", 0, [0, 1])])
    step = run(ours, batch, [("a", tokens, 8, 2, [0, 1, 2])], new=[("a", 8, [0, 1, 2])], finished=["a"])
    assert torch.equal(ours.materialize(step, ["a"]).hidden_states["a"], expected(tokens, 0, 10))


def test_rows_are_those_of_the_tokens():
    """Each row has its token and position, so the rows are right, not only equal to the other manager's."""
    ours, batch = make()
    tokens = list(range(11))
    step = run(ours, batch, [("a", tokens, 0, 11, [3, 1, 2])], new=[("a", 0, [3, 1, 2])], padded=5)
    assert torch.equal(ours.materialize(step, ["a"]).hidden_states["a"], expected(tokens, 0, 11))
    longer = [*tokens[:8], 50, 51]
    parts = [("b", longer, 8, 2, [3, 1, 7]), ("c", longer, 4, 3, [3, 5, 6])]
    step = run(ours, batch, parts, new=[("b", 8, [3, 1, 7]), ("c", 4, [3, 5, 6])], finished=["a"])
    found = ours.materialize(step, ["b", "c"]).hidden_states
    assert torch.equal(found["b"], expected(longer, 0, 10))
    assert torch.equal(found["c"], expected(longer, 0, 7))


def test_a_hit_below_a_block():
    """VLLM-Omni raises for it."""
    tokens = list(range(9))
    for kind in (Ours, Theirs):
        manager, batch = make(kind)
        manager.materialize(run(manager, batch, [("a", tokens, 0, 9, [0, 1, 2])], new=[("a", 0, [0])]), ["a"])
        part = [("b", tokens, 6, 3, [0, 1, 5])]
        if kind is Theirs:
            with pytest.raises(OmniPrefixCacheUnmatchError, match="not block aligned"):
                run(manager, batch, part, new=[("b", 6, [0, 1, 5])])
        else:
            step = run(manager, batch, part, new=[("b", 6, [0, 1, 5])])
            assert torch.equal(manager.materialize(step, ["b"]).hidden_states["b"], expected(tokens, 0, 9))


@pytest.mark.parametrize("as_new", [False, True], ids=["cached", "new"])
def test_a_resumed_request_gets_the_rows_it_has_not_had(as_new):
    """It had 6 tokens when it was preempted; meanwhile another request has computed 12 of its tokens."""
    ours, batch = make()
    tokens = list(range(14))
    parts = [ours.materialize(run(ours, batch, [("a", tokens, 0, 6, [0, 1])], new=[("a", 0, [0, 1])]), ["a"])]
    peer = run(ours, batch, [("b", tokens, 4, 9, [0, 2, 3, 4])], new=[("b", 4, [0, 2, 3, 4])])
    assert torch.equal(ours.materialize(peer, ["b"]).hidden_states["b"], expected(tokens, 0, 13))
    entry = [("a", 12, [0, 2, 3, 5])]
    step = run(ours, batch, [("a", tokens, 12, 2, [0, 2, 3, 5])], **{"new" if as_new else "resumed": entry})
    parts.append(ours.materialize(step, ["a"]))
    assert torch.equal(torch.cat([part.hidden_states["a"] for part in parts]), expected(tokens, 0, 14))


def test_missing_rows_are_an_error_of_the_step_that_needs_them():
    ours, batch = make()
    tokens = list(range(12))
    step = run(ours, batch, [("a", tokens, 8, 4, [5, 6, 7])], new=[("a", 8, [5, 6, 7])])
    late = run(ours, batch, [("b", tokens, 8, 1, [5, 6, 9])], new=[("b", 8, [5, 6, 9])])
    fine = run(ours, batch, [("c", tokens, 0, 2, [1])], new=[("c", 0, [1])])
    for bad, name in ((step, "a"), (late, "b")):
        with pytest.raises(OmniPrefixCacheUnmatchError, match="rows from 0 on are absent"):
            ours.materialize(bad, [name])
    assert torch.equal(ours.materialize(fine, ["c"]).hidden_states["c"], expected(tokens, 0, 2))


def test_a_step_that_fails_leaves_no_rows_behind():
    """The KV of the step's tokens is in those slots, but the old rows belong to another prompt."""
    ours, batch = make()
    tokens = list(range(8))
    ours.materialize(
        run(ours, batch, [("a", tokens, 0, 8, [0, 1])], new=[("a", 0, [0, 1])], mm={"x": torch.ones(8, 3)}), []
    )
    with pytest.raises(OmniPrefixCacheUnmatchError, match=r"x: got rows \[4\]"):
        run(ours, batch, [("b", tokens, 0, 8, [0, 1])], new=[("b", 0, [0, 1])], mm={"x": torch.ones(8, 4)})
    step = run(ours, batch, [("c", tokens, 4, 4, [0, 2])], new=[("c", 4, [0, 2])])
    with pytest.raises(OmniPrefixCacheUnmatchError, match="absent"):
        ours.materialize(step, ["c"])


def test_steps_are_taken_once_and_by_those_in_them():
    ours, batch = make()
    step = run(ours, batch, [("a", [1, 2], 0, 2, [0])], new=[("a", 0, [0])])
    with pytest.raises(OmniPrefixCacheUnmatchError, match="outside the save snapshot"):
        ours.materialize(step, ["a", "z"])
    for take in (lambda: ours.materialize(step, ["a"]), lambda: ours.discard_step(step)):
        with pytest.raises(OmniPrefixCacheUnmatchError, match="already consumed or never saved"):
            take()


def test_a_step_waits_for_its_place():
    ours, batch = make(staging_depth=2, staging_claim_timeout_s=0.05)
    part = [("a", list(range(9)), 0, 1, [0, 1, 2])]
    first = run(ours, batch, part, new=[("a", 0, [0, 1, 2])])
    run(ours, batch, part)
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"ids=\[1, 2\]"):
        run(ours, batch, part)
    ours._config = PrefixCacheConfig(num_blocks=BLOCKS, block_size=SIZE, staging_depth=2)
    timer = threading.Timer(0.1, lambda: ours.discard_step(first))
    timer.start()
    assert run(ours, batch, part) == 3
    timer.join()


def test_a_hit_without_blocks_is_refused():
    ours, _ = make()
    with pytest.raises(OmniPrefixCacheUnmatchError, match="carries no block_ids"):
        ours.new_step_starts(scheduled({"a": 1}, new=[("a", 8, [])]))
