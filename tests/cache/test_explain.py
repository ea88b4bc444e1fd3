"""Explanations why a prompt is not cached further, for known causes, and the memory that they need."""

from __future__ import annotations

import contextlib
import random
from array import array

import numpy as np
import pytest
from cache_cases import run

import pc
from pc.cache.hashing import BlockHasher, encode_tokens
from pc.cache.keys import NO_KEYS, encode_keys
from pc.cache.observe.history import ENTRY_BYTES, LEAST_BYTES, TOKEN_BYTES, History
from pc.cache.policies.lru import LRU

OPTIONS = ({}, {"salt": "one"}, {"extra_keys": "lora"}, {"salt": 3, "extra_keys": ["a", "b"]})


class Named(LRU):
    """A policy that evicts the blocks in `named` first, if there are any."""

    named = ()

    def victims(self, count):
        if not len(self.named):
            return super().victims(count)
        ids, self.named = np.array(self.named, np.int32), ()
        self.removed(ids)
        return ids


LAYOUTS = {
    "one group": lambda size: [pc.FullAttention()],
    "a window alone": lambda size: [pc.SlidingWindow(2 * size, num_sink_tokens=1)],
    "a window": lambda size: [pc.FullAttention(), pc.SlidingWindow(2 * size)],
    "states": lambda size: [pc.FullAttention(), pc.Recurrent(num_blocks=16)],
    "a window and states": lambda size: [pc.SlidingWindow(2 * size), pc.Recurrent(num_blocks=16), pc.FullAttention()],
}


class PlantedMiss:
    """A prompt that misses for one known cause, in a manager whose pools a filler and one text have just filled.

    All texts start with the same token, as those of a model do.

    Attributes:
        options: The salt and keys of every request, unless a request has others.
        reason, position, there: What an explanation must say.
        groups: For each of several groups, the reason and the position of what it lacks.
    """

    def __init__(self, kind, layout, seed):
        self.rng = rng = random.Random(f"{kind} {layout} {seed}")
        self.size, self.blocks, self.options = rng.choice([4, 8, 16]), rng.randrange(6, 10), rng.choice(OPTIONS)
        self.specs = LAYOUTS[layout](self.size)
        self.states = [g for g, spec in enumerate(self.specs) if isinstance(spec, pc.Recurrent)]
        if kind == "evicted_state":
            self.specs = [pc.Recurrent(num_blocks=1) if g in self.states else spec for g, spec in enumerate(self.specs)]
        self.algorithm = rng.choice(["sha256", "blake2b"])
        self.manager = pc.CacheManager(20, self.size, Named, self.algorithm, groups=self.specs)
        self.text, self.asked, self.there = self.words(self.blocks), dict(self.options), None
        self.prompt, self.below, self.found = [*self.text, 1], None, None
        self.serve("filler", self.words(20 - self.blocks - (kind in ("block", "tail"))))
        getattr(self, kind)()

    def words(self, blocks):
        return [1, *(self.rng.randrange(2, 50_000) for _ in range(blocks * self.size - 1))] if blocks else []

    def hashes(self):
        keys = encode_keys(self.options.get("extra_keys"), self.options.get("salt"))
        return BlockHasher(self.algorithm, self.size).hash_blocks(encode_tokens(self.text), keys)

    def serve(self, name, tokens, states=None, **options):
        """Compute a prompt whole. `states`: the blocks after which a state is kept, by default all of the text's."""
        if name == "text" and not self.states and self.rng.random() < 0.5:
            self.serve("an earlier turn", tokens[: self.rng.randrange(1, len(tokens))], **options)
        self.manager.allocate(name, tokens, **self.options | options)
        kept = range(1, len(tokens) // self.size + 1) if states is None and name != "filler" else states or ()
        for group in self.states:
            for block in kept:
                self.manager.checkpoint(name, block * self.size, group)
        self.manager.commit(name, len(tokens))
        self.manager.free(name)

    def evict(self, blocks, groups):
        """Evict logical blocks of the text from groups of attention."""
        words = self.hashes()
        for group in groups:
            pool = self.manager.pools[group]
            pool.policy.named = pool.table.find(words[list(blocks)]).tolist()
        self.manager.allocate("other", self.words(len(blocks)))

    def expect(self, reason, position, attention, state=None):
        """Set what the explanation must say: of the prompt, of groups of attention, and of groups of states."""
        self.reason, self.position = reason, position
        self.groups = [state if g in self.states else attention for g in range(len(self.specs))]

    def missing(self, reason, block, group_reason="never"):
        start = block * self.size
        self.expect(reason, start, (group_reason, start), (group_reason, start + self.size))

    def never(self):
        self.serve("text", self.text)
        self.prompt = [*self.words(self.rng.randrange(1, 4)), 1]
        self.missing("never", 0)

    def never_behind_a_hit(self):
        self.serve("text", self.text)
        self.prompt = [*self.text, *self.words(self.rng.randrange(2, 5)), 1]
        self.missing("never", self.blocks)

    def token(self):
        self.serve("text", self.text)
        at = self.rng.randrange(2, len(self.text))
        self.there = self.text[at]
        self.prompt = [*self.text[:at], 1, *self.text[at + 1 :], 1]
        self.missing("token", at // self.size)
        self.position = at

    def salt(self):
        self.serve("text", self.text, salt=self.rng.choice([None, "one"]))
        self.asked["salt"] = "another"
        self.missing("salt", 0)

    def keys(self):
        self.serve("text", self.text, extra_keys="adapter")
        self.asked["extra_keys"] = self.rng.choice([None, "another"])
        self.missing("keys", 0)
        self.there = "adapter"

    def image(self):
        at = self.rng.randrange(len(self.text))
        self.serve("text", self.text, extra_keys=pc.KeyAt(at, "a cat"))
        self.asked["extra_keys"], self.there = pc.KeyAt(at, "a dog"), "a cat"
        self.missing("keys", at // self.size)
        self.position = at

    def block(self):
        """Cut the prompt off inside a block that is cached."""
        more, self.there = self.words(1), self.rng.randrange(2, self.size)
        self.serve("text", [*self.text, *more])
        self.prompt = [*self.text, *more[: self.there]]
        self.expect("block", len(self.text), (None, None), (None, None))

    def tail(self):
        """Continue a text whose last block was not filled."""
        self.there = self.rng.randrange(1, self.size)
        self.text += self.words(1)[: self.there]
        self.serve("text", self.text)
        self.prompt = [*self.text, *self.words(2)]
        self.missing("block", self.blocks)

    def uncommitted(self):
        done = self.rng.randrange(self.blocks - 1)
        self.serve("before", self.text[: done * self.size])
        self.manager.allocate("running", self.text, **self.options)
        self.there = "running"
        self.missing("uncommitted", done, "uncommitted")

    def evicted(self):
        """Evict a block from every group that has blocks of KV. A window misses only its last two blocks."""
        self.serve("text", self.text)
        block = self.evicted_block(self.specs)
        self.evict([block], [g for g in range(len(self.specs)) if g not in self.states])
        self.missing("evicted", block, "evicted")
        self.lacking(block, self.specs)

    def evicted_block(self, specs):
        """Choose a block of the text without which the groups cannot hit more: a window reads only the last two."""
        return self.rng.randrange(0 if pc.FullAttention() in specs else self.blocks - 2, self.blocks)

    def lacking(self, block, specs):
        """Set that only groups with these specs lack a block, and windows only if it is one of the last two."""
        for group, spec in enumerate(self.specs):
            near = isinstance(spec, pc.FullAttention) or block >= self.blocks - 2
            if group in self.states or spec not in specs or not near:
                self.groups[group] = (None, None)

    def lost(self):
        """Evict a block from one group only, the last one that is not a group of states."""
        self.serve("text", self.text)
        spec = [spec for spec in self.specs if isinstance(spec, pc.FullAttention | pc.SlidingWindow)][-1]
        block, group = self.evicted_block([spec]), self.specs.index(spec)
        self.evict([block], [group])
        behind = isinstance(spec, pc.SlidingWindow) and len(self.specs) > 1
        self.missing("window" if behind else "evicted", block, "evicted")
        self.there = group if behind else None
        self.lacking(block, [spec])

    def without_state(self):
        kept = self.rng.randrange(self.blocks - 1)
        self.serve("text", self.text, range(1, kept + 1))
        self.expect("window", kept * self.size, (None, None), ("state", len(self.text)))
        self.there = self.states[0]

    def evicted_state(self):
        self.serve("text", self.text, [self.blocks])
        self.manager.allocate("other", self.words(1))
        self.manager.checkpoint("other", self.size, self.states[0])
        self.expect("window", 0, (None, None), ("evicted", len(self.text)))
        self.there = self.states[0]

    def tier(self):
        """Let a lower tier take all evicted blocks but one."""
        taken, refused = set(), self.rng.randrange(2, self.blocks)
        lost = self.hashes()[refused].tobytes()
        self.serve("text", self.text)
        self.manager.on_evict = lambda group, blocks, hashes: taken.update(h for h in hashes if h != lost)
        self.evict(range(1, self.blocks), [0])
        self.below = taken.__contains__
        self.missing("evicted", refused)

    def waiting_for_a_tier(self):
        """Ask while the tier stores the blocks that have just been evicted."""
        self.serve("text", self.text)
        found, block = [], self.evicted_block(self.specs)
        asked = self.options | {"below": lambda h: False}
        self.manager.on_evict = lambda *_: found.append(self.manager.explain(self.prompt, **asked))
        self.evict([block], range(len(self.specs)))
        self.missing("evicted", block, "evicted")
        self.lacking(block, self.specs)
        self.found = found[0]


EVERYWHERE = ("never", "never_behind_a_hit", "token", "salt", "keys", "image", "block", "tail", "uncommitted")
EVERYWHERE += ("evicted", "lost")
CASES = [(kind, layout) for layout in LAYOUTS for kind in EVERYWHERE]
CASES += [(kind, layout) for layout in ("states", "a window and states") for kind in ("without_state", "evicted_state")]
CASES += [("tier", "one group"), *[("waiting_for_a_tier", layout) for layout in ("one group", "a window")]]


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_misses_of_every_cause_are_explained_for_each_group_by_kind_and_place(kind, layout):
    for seed in range(6):
        planted = PlantedMiss(kind, layout, seed)
        asked = planted.asked | ({} if planted.below is None else {"below": planted.below})
        before = planted.manager.stats(), planted.manager.nbytes
        found = planted.found or planted.manager.explain(planted.prompt, **asked)
        assert before == (planted.manager.stats(), planted.manager.nbytes)
        assert str(found).startswith(f"{found.matched} of {len(planted.prompt)} tokens are cached: ")
        there = found.there[0] if found.reason == "token" else None if found.reason == "evicted" else found.there
        assert (found.reason, found.position, there) == (planted.reason, planted.position, planted.there), seed
        if found.reason == "evicted":
            assert 0 <= found.there < 60
        if kind == "without_state":
            lacks = f"group {there} (Recurrent) lacks the state at token {len(planted.text)}: none was cached there"
            assert lacks in str(found)
            assert max(miss.matched for miss in found.groups) == len(planted.text)
        if kind == "evicted_state":
            assert found.groups[there].there > 0
        if len(planted.specs) > 1:
            assert [(miss.reason, miss.position) for miss in found.groups] == planted.groups, seed
            assert [miss.kind for miss in found.groups] == [type(spec).__name__ for spec in planted.specs]
        else:
            assert found.groups == ()
        if planted.below is None and planted.found is None:
            matched = planted.manager.allocate("asked", planted.prompt, num_tokens=0, **planted.asked).num_cached_tokens
            assert found.matched == matched


@pytest.mark.parametrize("partial_reuse", [False, True])
@pytest.mark.parametrize("anywhere", [False, True])
def test_moved_text_is_counted_with_and_without_the_index_that_finds_it(anywhere, partial_reuse):
    asked, manager = (pc.CacheManager(64, block_size=4, partial_reuse=partial_reuse) for _ in range(2))
    for each in (asked, manager) if anywhere else (manager,):  # from then on text is recorded
        each.allocate("first", [1], reuse="anywhere")
        each.free("first")
    text, rng = list(range(100, 164)), np.random.default_rng(0)
    for each in (asked, manager):
        run(each, "text", text)
    for prompt in (text[7:], [*text[:18], 9, *text[20:]], [*text[30:50], *text[:30]], rng.permutation(text).tolist()):
        found = asked.explain(prompt)
        exact = manager.allocate("exact", prompt).num_cached_tokens
        manager.free("exact")
        moved = manager.allocate("moved", prompt, reuse="anywhere").moved
        manager.free("moved")
        assert (found.matched, found.moved_tokens) == (exact, sum(span.end - span.start for span in moved))


def test_a_text_that_continues_an_earlier_turn_shows_its_next_token_and_nothing_more_is_remembered():
    manager, text = pc.CacheManager(400, block_size=4), list(range(100, 300))
    for end in (150, 200):
        run(manager, end, text[:end])
    before = manager.nbytes
    found = manager.explain([*text[:150], 1, *range(500, 700)])
    assert (found.reason, found.position, found.there[0]) == ("token", 150, 250)
    assert manager.nbytes == before


def test_blocks_behind_a_gap_are_counted():
    class Middle(pc.EvictionPolicy):
        def victims(self, count):
            return np.arange(4, 4 + count, dtype=np.int32)

    manager = pc.CacheManager(16, block_size=4, policy=Middle)
    run(manager, "text", range(64))
    run(manager, "other", range(500, 512))
    found = manager.explain(range(64))
    assert (found.matched, found.reason, found.position, found.gap_tokens) == (16, "evicted", 16, 35)
    assert manager.allocate("gap", range(64), reuse="gap").num_cached_tokens == 16 + 35


def test_nothing_is_shown_of_another_salt():
    manager, secret = pc.CacheManager(64, block_size=4), list(range(70, 100))
    run(manager, "theirs", secret, salt="their salt")
    for prompt in (secret, [*secret[:9], 5, *secret[10:]]):
        found = manager.explain(prompt, salt="mine")
        assert (found.reason, found.position, found.here, found.there) == ("salt", 0, None, None)
        assert found.moved_tokens == found.gap_tokens == 0
    assert manager.explain(secret[1:], salt="mine").reason == "never"


@pytest.mark.parametrize("tokens", [[], [5], range(4), range(16)])
def test_a_prompt_with_nothing_more_to_find(tokens):
    manager = pc.CacheManager(8, block_size=4)
    if len(tokens):
        run(manager, "a", tokens)
    found = manager.explain(tokens)
    assert (found.reason, found.matched) == (None, max(len(tokens) - 1, 0))
    assert str(found).endswith("which is the most possible")


def test_text_of_requests_that_go_on_is_remembered_once():
    manager, text = pc.CacheManager(2000, block_size=4), []
    for turn in range(20):
        text += range(100 * turn, 100 * turn + 80)
        run(manager, turn, text)
    assert manager._state.history.nbytes < 4 * len(text) + 20 * (ENTRY_BYTES + 4 * 8)
    assert manager.explain([*text[:1001], 7, *text[1002:]]).position == 1001


def test_what_was_rolled_back_is_remembered_as_it_ended():
    manager = pc.CacheManager(64, block_size=4)
    run(manager, "a", range(32))
    manager.allocate("b", range(40))
    manager.rollback("b", 22)
    manager.append("b", range(700, 720))
    manager.commit("b", 38)
    manager.free("b")
    found = manager.explain([*range(18), *range(700, 710), 3, 4, 5, 6])
    assert (found.reason, found.position, found.there[0]) == ("token", 28, 710)


def test_groups_of_states_alone_are_explained():
    manager = pc.CacheManager(16, block_size=4, groups=[pc.Recurrent(), pc.Recurrent()])
    manager.allocate("a", list(range(12)))
    manager.checkpoint("a", 8, group=0)
    manager.commit("a", 12)
    found = manager.explain(list(range(13)))
    assert (found.matched, found.position) == (0, 0)
    assert [(miss.kind, miss.matched, miss.position) for miss in found.groups] == [
        ("Recurrent", 8, None),
        ("Recurrent", 0, 4),
    ]
    assert str(found).startswith("0 of 13 tokens are cached")
    manager.checkpoint("a", 8, group=1)
    manager.commit("a", 12)
    assert manager.explain(list(range(13))).matched == 8


def test_a_reset_forgets():
    manager = pc.CacheManager(8, block_size=4)
    for name in range(4):
        run(manager, name, range(32 * name, 32 * name + 32))
    assert manager.explain(range(33)).reason == "evicted"
    manager.reset()
    assert manager.explain(range(33)).reason == "never"


def test_remembered_entries_are_bounded_by_their_bytes():
    history, most = History(4, [100, LEAST_BYTES // TOKEN_BYTES + 10]), [0, 0]
    for number in range(1000):
        history.add_text((NO_KEYS, None, array("I", [number] * 150 * (number % 3)), 0))
        history.blocks_evicted(np.full((20 * (number % 3), 4), number, np.uint64), 0)
        sizes = [sum(size for _, size in entries) for entries in (history.ended, history.evicted)]
        assert history.nbytes == sum(sizes)
        most = [*map(max, most, sizes)]
    limits = (LEAST_BYTES + 10 * TOKEN_BYTES, LEAST_BYTES)
    assert all(limit - ENTRY_BYTES - 1200 < size <= limit for size, limit in zip(most, limits, strict=True))
    assert all(size == ENTRY_BYTES + 4 * len(text[2]) for text, size in history.ended)
    assert all(size == ENTRY_BYTES + words.nbytes for (_, words, _), size in history.evicted)
    history.add_text((NO_KEYS, None, array("I", bytes(2 * limits[0])), 0))
    assert (len(history.ended), history.nbytes) == (0, sizes[1])


@pytest.mark.parametrize(("tokens", "error"), [("text", TypeError), ([-1], ValueError), ([0.5], TypeError)])
def test_bad_prompts_are_refused(tokens, error):
    with pytest.raises(error, match="token_ids"):
        pc.CacheManager(8).explain(tokens)
    with pytest.raises(TypeError, match="below: got 3, needs a function of a hash, or None"):
        pc.CacheManager(8).explain(range(9), below=3)


class Walk:
    """Random requests and all texts that they wrote, so that each statement of an explanation can be checked."""

    KEYS = ({}, {"salt": "one"}, {"extra_keys": "lora"})

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.size, self.vocabulary = rng.choice([1, 2, 4, 8]), rng.choice([2, 3, 30])
        self.manager = pc.CacheManager(rng.choice([6, 10, 20, 60]), self.size, rng.choice(["default", "lru"]))
        self.running, self.ended, self.published = {}, [], set()
        self.texts = [self.words(rng.randrange(1, 6 * self.size + 2)) for _ in range(3)]

    def words(self, count):
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    def text(self):
        rng, text = self.rng, list(self.rng.choice(self.texts))
        text = text[: rng.randrange(1, len(text) + 1)] + self.words(rng.choice([0, rng.randrange(3 * self.size)]))
        if rng.random() < 0.3:
            text[rng.randrange(len(text))] = rng.randrange(self.vocabulary)
        if len(text) < 60:
            self.texts.append(text)
        return text

    def is_cached(self, key, tokens):
        given = encode_keys(self.KEYS[key].get("extra_keys"), self.KEYS[key].get("salt"))
        hashes = BlockHasher("sha256", self.size).hash_blocks(encode_tokens(tokens), given)
        return bool(self.manager.pools[0].table.find(hashes[-1:])[0] >= 0)

    def step(self, number):
        rng, manager, key = self.rng, self.manager, self.rng.randrange(3)
        if rng.random() < 0.4 or not self.running:
            text = self.text()
            manager.allocate(number, text, **self.KEYS[key])
            self.running[number] = [key, text, manager._state.running[number].committed]
            return
        name = rng.choice(list(self.running))
        key, text, written = self.running[name]
        verb = rng.choice(["commit", "commit", "rollback", "append", "free", "free"])
        if verb == "commit":
            written = max(written, rng.choice([len(text), rng.randrange(written, len(text) + 1)]))
            manager.commit(name, written)
            self.published |= {(key, tuple(text[:end])) for end in range(self.size, written + 1, self.size)}
        elif verb == "rollback":
            kept = rng.randrange(len(text) + 1)
            manager.rollback(name, len(text) - kept)
            self.ended.append((key, text, written))
            text, written = text[:kept], min(written, kept)
        elif verb == "append":
            new = self.words(rng.randrange(1, 2 * self.size + 1))
            manager.append(name, new)
            text = text + new
        else:
            manager.free(name)
            self.ended.append((key, text, written))
            del self.running[name]
            return
        self.running[name] = [key, text, written]

    def check(self):
        key, prompt, size = self.rng.randrange(3), self.text(), self.size
        found = self.manager.explain(prompt, **self.KEYS[key])
        blocks = next(n for n in range(len(prompt) + 1) if not self._has(key, prompt, n))
        start = blocks * size
        block, whole = prompt[: start + size], len(prompt) >= start + size
        other = whole and any(self.is_cached(k, block) for k in range(3) if k != key)
        evicted = whole and (key, tuple(block)) in self.published
        ended = [e for e in self.ended if e[2] >= size]
        ended = [(k, t if len(t) < (w // size + 1) * size else t[:w]) for k, t, w in ended]
        running = [(k, t) for k, t, _ in self.running.values()]
        agree = [(common(t, prompt), t) for k, t in (*ended, *running) if k == key]
        writing = whole and any(k == key and t[: start + size] == block for k, t in running)
        if found.reason is None:
            return found.matched == len(prompt) - 1
        true = {
            "salt": other,
            "keys": other,
            "evicted": evicted,
            "uncommitted": writing,
            "block": found.there in range(size) and (not whole or start + found.there in [n for n, _ in agree]),
            "token": any((n, tuple(t[n : n + 16])) == (found.position, found.there) for n, t in agree),
            "never": not (other or evicted or writing or max([n for n, _ in agree], default=0) > max(start, 1)),
        }[found.reason]
        place = found.position >= start if found.reason == "token" else found.position == start
        return true and place and found.matched == start

    def _has(self, key, prompt, blocks):
        """Return whether the prompt has `blocks` blocks, and one more that is cached."""
        end = (blocks + 1) * self.size
        return end <= len(prompt) and self.is_cached(key, prompt[:end])


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 40), marks=pytest.mark.slow)])
def test_every_claim_of_an_explanation_is_true(seeds):
    for seed in seeds:
        walk = Walk(seed)
        for number in range(60):
            with contextlib.suppress(pc.OutOfBlocks):
                walk.step(number)
            assert walk.check(), seed
        walk.manager.check()
