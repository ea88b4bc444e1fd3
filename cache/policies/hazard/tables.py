"""What is learned of reuse: how likely a block is asked for again in the next request, by its class and its age.

`rate[class][age] * factor[new blocks] * factor[tail] * factor[output]`, estimated as reuses over the time that blocks
waited, evicted ones included. Classes are the uses of a block, the output of the request that used it last, and the
caller's hint; ages are counted in requests, in buckets that get wider. From the rates follows an index for each age:
the most hits for the room a block takes until some later age (Gittins), which is what eviction compares.
"""

from __future__ import annotations

from bisect import bisect
from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import view

Numbers = npt.NDArray[Any]

AGES = 32
"""Buckets of age."""
EDGES = 2 * (2 ** (np.arange(AGES + 1) / 2) - 1)
"""Where each begins, in requests."""
WIDTHS = np.append(np.diff(EDGES)[:-1], 2000.0)
EDGE_LIST, WIDTH_LIST = EDGES.tolist(), WIDTHS.tolist()
SPANS = np.append(np.diff(EDGES)[:-1], np.inf)
"""Widths, the last bucket without an end."""

USES, OUTPUTS, HINTS = 4, 3, 5
GROUPS = OUTPUTS * HINTS
"""A class is `4 * group + uses`, a group `3 * hint + output`."""
USE_BOUNDS = np.array([2, 3, 5])
OUTPUT_BOUNDS = (30, 100)
FINE_OUTPUT_BOUNDS = (10, 30, 100, 200, 300, 500, 800)
NEW_BOUNDS = np.array([1, 2, 4, 8, 16, 32, 64])
HINT_BOUNDS = (0.1, 0.35, 0.65)
"""Hint 0 is none; the others are of rising probability."""
TRAITS = 64
"""Traits are the bucket of new blocks + 8 * that of output."""
NEW, OUTPUT, TAIL = 0, 8, 16
FACTORS = 18
"""Places of the three factors: 8 for new blocks, 8 for output, 2 for whether it is the request's last block."""
LEVELS = 24
"""Steps of a third of an octave that the product of the factors is rounded to."""
KNOWN = 1 << 14
"""Ages whose place among the buckets is looked up."""
PLACES = np.interp(np.arange(KNOWN), EDGES[:AGES], np.arange(float(AGES)))
BUCKETS = PLACES.astype(np.intp)
PARTS = PLACES - BUCKETS
FADING = 1 - 1e-7 * np.arange(KNOWN)
"""Among equals the older one is worth a little less."""

DECAY = 0.97
"""Of all sums in each 50 requests: about 1,600 count."""
PRIOR, FACTOR_PRIOR, AGE_PRIOR = 50.0, 50.0, 200.0
"""Weights of what is assumed before much was seen: halving or doubling them changes hits by about 1 %."""


class HazardTables:
    """Sums of reuses and of exposure, and what follows from them.

    Attributes:
        rate: Chance of reuse per request waited, `[classes, AGES]`.
        factor: Of each trait, `[FACTORS]`.
    """

    def __init__(self) -> None:
        self._events = np.zeros((GROUPS * USES, AGES))
        self._exposure = np.zeros((GROUPS * USES, AGES))
        self._factor_events = np.zeros(FACTORS)
        self._factor_exposure = np.zeros(FACTORS)
        self._index = np.zeros((GROUPS * USES, LEVELS, AGES + 1), np.float32)
        self._index_at: Any = view(self._index.reshape(-1))
        self._seen = np.zeros(GROUPS, np.bool_)
        self._seen[:OUTPUTS] = True
        self.fit(1.0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def expose(
        self, group: Numbers, traits: Numbers, since: Numbers, until: Numbers, lives: Numbers, stale: bool = False
    ) -> None:
        """Lives that lasted from one age to another.

        Args:
            group: Of each request, `[n]`.
            traits: Its bucket of new blocks + 8 * that of its output, `[n]`.
            since: Age at the beginning, `[n]`.
            until: Age at the end, `[n]`.
            lives: Weighted blocks by 2 * uses + tail, `[n, 8]`.
            stale: The rates are of long ago: factors are learned against new ones, or they would make up for it all.
        """
        new, output = traits % 8 + NEW, traits // 8 + OUTPUT
        ages = min(bisect(EDGE_LIST, float(until.max())), AGES)
        overlap = _within_buckets(until, ages)
        begun = since.nonzero()[0]
        overlap[begun] -= _within_buckets(since[begun], ages)
        own = self.factor[new] * self.factor[output]
        weighted = lives * (own[:, None] * np.tile(self.factor[TAIL:], USES).astype(np.float32))
        by_uses = weighted[:, 0::2] + weighted[:, 1::2]
        expected = weighted.reshape(-1, USES, 2)
        present = np.bincount(group).nonzero()[0].tolist()
        every: list[Any] = [slice(None)]
        groups = list(zip(present, every if len(present) == 1 else [group == g for g in present], strict=True))
        for g, mine in groups:
            self._exposure[g * USES : (g + 1) * USES, :ages] += by_uses[mine].T @ overlap[mine]
            self._seen[g] = True
        if stale:
            self._fit_rates()
        for g, mine in groups:
            chance = overlap[mine] @ self.rate[g * USES : (g + 1) * USES, :ages].T
            expected[mine] *= chance[:, :, None]
        each = weighted.sum(axis=1)
        hits = np.bincount(new, each, FACTORS) + np.bincount(output, each, FACTORS)
        hits[TAIL:] = expected.sum(axis=(0, 1))
        self._factor_exposure += hits / self.factor

    def reuse(self, group: Numbers, traits: Numbers, kind: Numbers, age: Numbers, weight: Numbers) -> None:
        """Blocks were asked for again; kind is 2 * uses + tail."""
        bucket = EDGES[:AGES].searchsorted(age, side="right") - 1
        places = (group * USES + kind // 2) * AGES + bucket
        self._events += np.bincount(places, weight, self._events.size).reshape(self._events.shape)
        for factor in (traits % 8 + NEW, traits // 8 + OUTPUT, kind % 2 + TAIL):
            self._factor_events += np.bincount(factor, weight, FACTORS)

    def _fit_rates(self) -> None:
        events, exposure = self._events.sum(axis=0), self._exposure.sum(axis=0)
        prior = AGE_PRIOR * WIDTHS  # falls with age: one never seen must not look good
        pooled = (events + prior * 0.05 / (EDGES[:AGES] + 300)) / (exposure + prior)
        self.rate = (self._events + PRIOR * WIDTHS * pooled) / (self._exposure + PRIOR * WIDTHS)

    def fit(self, decay: float) -> None:
        """Rates, factors and indices from the sums, which then lose weight."""
        self._fit_rates()
        self.factor = (self._factor_events + FACTOR_PRIOR) / (self._factor_exposure + FACTOR_PRIOR)
        self._indexed = False
        for sums in (self._events, self._exposure, self._factor_events, self._factor_exposure):
            sums *= decay

    def _find_index(self) -> None:
        """Indices from rates, once somebody asks for scores: where everything hits nobody does."""
        level = self._levels()
        used = np.flatnonzero(np.repeat(self._seen, USES))
        levels = np.bincount(level).nonzero()[0]  # `unique` imports 40 ms of numpy when it is first called
        self._row_of_level = (AGES + 1) * level
        self._index[used[:, None], levels] = _index(self.rate[used], levels)
        self._indexed = True

    def _levels(self) -> npt.NDArray[np.intp]:
        """The level of each product of factors, by traits + TRAITS * tail."""
        factor = self.factor
        product = factor[TAIL:, None, None] * factor[OUTPUT:TAIL, None] * factor[NEW:OUTPUT]
        levels = np.rint(3 * np.log2(product)).astype(np.intp) + LEVELS // 2
        clipped: npt.NDArray[np.intp] = levels.clip(0, LEVELS - 1).reshape(-1)
        return clipped

    def scores(self, kind: Numbers, trait: Numbers, age: Numbers) -> Numbers:
        """Hits to be had for each block and request of room.

        Args:
            kind: 4 * group + uses, `[n]`.
            trait: Traits + TRAITS * tail, `[n]`.
            age: Of the oldest first, `[n]`.
        """
        part: Numbers
        fading: Numbers
        if not self._indexed:
            self._find_index()
        if age.size and age.item(0) >= KNOWN:
            place = np.interp(age, EDGES[:AGES], np.arange(float(AGES)))
            bucket = place.astype(np.intp)
            part, fading = place - bucket, 1 - 1e-7 * age
        else:
            bucket, part, fading = BUCKETS.take(age), PARTS.take(age), FADING.take(age)
        bucket += ROWS.take(kind)
        bucket += self._row_of_level.take(trait)
        flat = self._index.reshape(-1)
        score = flat.take(bucket)
        bucket += 1
        score += part * (flat.take(bucket) - score)
        fading *= score
        return fading

    def score(self, kind: int, trait: int, age: int) -> float:
        """`scores` of one block."""
        if not self._indexed:
            self._find_index()
        bucket = min(bisect(EDGE_LIST, age) - 1, AGES - 1)
        part = min((age - EDGE_LIST[bucket]) / WIDTH_LIST[bucket], 1.0)
        at = LEVELS * (AGES + 1) * kind + self._row_of_level.item(trait) + bucket
        here = self._index_at[at]
        return float((here + part * (self._index_at[at + 1] - here)) * (1 - 1e-7 * age))


ROWS = LEVELS * (AGES + 1) * np.arange(GROUPS * USES)
"""Where the indices of each class begin."""


def _within_buckets(age: Numbers, ages: int) -> npt.NDArray[np.float64]:
    """How long lives of these ages, `[n]`, were in each of the first buckets, `[n, ages]`."""
    time = age[:, None] - EDGES[:ages]
    np.maximum(time, 0.0, out=time)
    np.minimum(time, SPANS[:ages], out=time)
    return time


def _index(rate: Numbers, levels: Numbers) -> Numbers:
    """For each class, level and age the greatest ratio, over all later ages, of expected hits to expected waiting."""
    rates = (rate.T[:, :, None] * 2.0 ** ((levels - LEVELS // 2) / 3)).reshape(AGES, -1)
    survive = np.exp(-rates * WIDTHS[:, None])
    hits = np.ones_like(rates)
    np.cumprod(survive[:-1], axis=0, out=hits[1:])
    hits *= 1 - survive
    waits = np.maximum(hits / np.maximum(rates, 1e-12), 1e-300)
    index = np.empty((AGES + 1, rates.shape[1]))
    best = np.divide(hits, waits, out=index[:AGES])
    hit, wait, ratio = hits.copy(), waits.copy(), np.empty_like(hits)
    for later in range(1, AGES):
        ages = slice(AGES - later)
        hit[ages] += hits[later:]
        wait[ages] += waits[later:]
        np.divide(hit[ages], wait[ages], out=ratio[ages])
        np.maximum(best[ages], ratio[ages], out=best[ages])
    index[AGES] = index[AGES - 1]
    by_class: Numbers = index.T.reshape(rate.shape[0], -1, AGES + 1)
    return by_class
