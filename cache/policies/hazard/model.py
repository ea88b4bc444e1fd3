"""The hazard model, which estimates how likely the next request uses a block that has been idle for some requests.

It is survival analysis with proportional hazards. A block's idle time is the number of requests since its last use. The
block's hazard rate is piecewise constant in the idle time:
`rate[stratum][idle time] * factor[new blocks] * factor[output] * factor[tail]`.

The factors describe the request that used the block last. New blocks are the number of its blocks that no earlier
request had used, and output is the number of tokens that it generated. Tail is whether the block is its last block.

Strata are the uses of a block, the output length of the request that used it last, and the caller's hint. Rates are
occurrences over exposure: the number of reuses, divided by the idle time during which blocks were at risk of reuse.
Evicted blocks (ghosts) are included, because otherwise evictions would bias the rates. Rates and factors are shrunk
towards a prior.

The rates give a Gittins index for each stratum and idle time. Suppose that a block is kept until its next hit, but at
most until a given later time. Divide the expected number of hits (at most one) by the expected time until the block is
hit or dropped. The index is the maximum of this quotient over all later times. Eviction compares these indices.

To save time, factors are rounded to levels, so that indices are computed once for each fit and looked up. `score` is
a faster `scores` for one block. Occurrences and exposure are counted for whole requests, not block by block.
"""

from __future__ import annotations

from bisect import bisect
from typing import Any

import numpy as np
import numpy.typing as npt

from ...table import view
from .runs import COVARIATES, USE_BOUNDS, USES, Numbers, RunTable

AGES = 32  # buckets of idle time (age), in requests since the last use
EDGES = 2 * (2 ** (np.arange(AGES + 1) / 2) - 1)  # start of each bucket, in requests
WIDTHS = np.append(np.diff(EDGES)[:-1], 2000.0)
EDGE_LIST, WIDTH_LIST = EDGES.tolist(), WIDTHS.tolist()
SPANS = np.append(np.diff(EDGES)[:-1], np.inf)  # widths; the last bucket has no end

OUTPUTS, HINTS = 3, 5
GROUPS = OUTPUTS * HINTS  # a stratum is `4 * group + uses`, a group `3 * hint + output`
OUTPUT_BOUNDS = (30, 100)
FINE_OUTPUT_BOUNDS = (10, 30, 100, 200, 300, 500, 800)
NEW_BOUNDS = np.array([1, 2, 4, 8, 16, 32, 64])
HINT_BOUNDS = (0.1, 0.35, 0.65)  # hint 0: none was given; hints 1 to 4: rising probability of a return
NEW, OUTPUT, TAIL = 0, 8, 16  # index of the first factor for new blocks, for output, and for the tail
FACTORS = 18
LEVELS = 24  # the product of factors is rounded to steps of a third of an octave, for lookups
FADING = 1e-7  # of two equal blocks, the older one has a slightly lower score

CELLS = 2 * USES  # a cell of a request's blocks is 2 * uses + tail
SUM = np.ones(CELLS, np.float32)
MOST_COUNTED = (1 << 15) - 1  # maximum number of blocks of a request that are counted
YOUNG = 512  # number of latest requests whose idle time is counted in every call

DECAY = 0.97  # factor of all sums every 50 requests, so about 1,600 requests count
# Weights of the priors. Halving or doubling them changes hits by about 1 %.
PRIOR, FACTOR_PRIOR, AGE_PRIOR = 50.0, 50.0, 200.0


class HazardModel:
    """The model of hazard rates: decaying sums of occurrences and exposure, and the rates and indices from them.

    Occurrences and exposure come from intervals during which blocks were at risk of reuse. A reuse ends an interval.
    Before each fit, `learn` counts all reuses, and the exposure of the latest requests and of a quarter of the older
    ones. Blocks that were not reused yet are censored: they add exposure and no occurrence. The model maintains the
    columns `at_risk` and `counted_to` of `runs`.

    Attributes:
        rate: Baseline hazard, in reuses for each request of idle time, `[strata, AGES]`.
        factor: Factors of covariates, `[FACTORS]`.
    """

    def __init__(self, runs: RunTable) -> None:
        self._runs = runs
        self._calls = 0  # of `learn`
        self._begun = 0  # `at_risk` is filled for rows before this one
        self._used: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []  # rows, first and last places, times
        self._recalled: list[tuple[Numbers, Numbers, Numbers]] = []  # rows, cells, times
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
        """Bytes held, of intervals that are not counted yet too."""
        arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        return sum(part.nbytes for parts in (arrays, *self._used, *self._recalled) for part in parts)

    def used(self, rows: Numbers, first: Numbers, last: Numbers, times: Numbers) -> None:
        """Record that blocks at places `first` to `last` of rows were used at these times."""
        self._used.append((rows, first, last, times))

    def recalled(self, rows: Numbers, uses: Numbers, tail: Numbers, times: Numbers) -> None:
        """Record that evicted blocks were used at these times."""
        self._recalled.append((rows, _cell_of(uses, tail), times))

    def forgotten(self, rows: Numbers, uses: Numbers, tail: Numbers) -> None:
        """Record that ghosts of evicted blocks were dropped, which ends their intervals without a reuse."""
        begun = rows < self._begun
        np.subtract.at(self._runs.at_risk, (rows[begun], _cell_of(uses, tail)[begun]), np.int16(1))

    def learn(self, now: int, stale: bool) -> None:
        """Count all reuses, and the exposure up to now.

        Old requests, whose hazard changes slowly, are counted in every fourth call.
        """
        runs = self._runs
        self._open_new_rows()
        self._calls += 1
        rows, times, number = self._reuses()
        groups, covariates, ages = runs.groups_of(rows), runs.covariates_of(rows), times - runs.serial[rows]
        ended = number * self._weights(rows)[:, None]
        each, cells = number.nonzero()
        self.reuse(groups[each], covariates[each], cells, ages[each], ended[each, cells])
        fewer = np.minimum(number[each, cells], MOST_COUNTED).astype(np.int16)
        np.subtract.at(runs.at_risk, (rows[each], cells), fewer)
        serial = runs.serial[: runs.count]
        due = np.flatnonzero((serial >= now - YOUNG) | (serial % 4 == self._calls % 4))
        at_risk = np.maximum(runs.at_risk[due], 0).astype(np.float32)
        waiting = at_risk @ SUM > 0
        due, at_risk = due[waiting], at_risk[waiting] * self._weights(due[waiting])[:, None]
        age = now - runs.serial[due]
        until = np.append(np.maximum(ages, runs.counted_to[rows]), age)
        if until.size:
            since = np.append(runs.counted_to[rows], runs.counted_to[due])
            groups, covariates = np.append(groups, runs.groups_of(due)), np.append(covariates, runs.covariates_of(due))
            self.expose(groups, covariates, since, until, np.concatenate((ended.astype(np.float32), at_risk)), stale)
        runs.counted_to[due] = age

    def _open_new_rows(self) -> None:
        """Open intervals for new rows, none of whose blocks was reused yet."""
        runs = self._runs
        rows = slice(self._begun, runs.count)
        self._begun = runs.count
        size, bounds = np.minimum(runs.size[rows], MOST_COUNTED), np.minimum(runs.bounds[rows].T, MOST_COUNTED)
        runs.at_risk[rows] = _count_cells(np.zeros_like(size), size, size, bounds)
        runs.counted_to[rows] = 0

    def _weights(self, rows: Numbers) -> npt.NDArray[np.float32]:
        """Return the weight of a block of each row. Blocks of long requests weigh less, so they do not dominate."""
        return (1 / np.sqrt(np.maximum(self._runs.size[rows], 1))).astype(np.float32)

    def _reuses(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return the reuses since the last call: rows `[n]`, times `[n]`, and numbers of blocks by cell, `[n, 8]`."""
        runs = self._runs
        parts: list[tuple[Numbers, Numbers, Numbers]] = []
        if self._recalled:
            rows, cells, times = (np.concatenate(part) for part in zip(*self._recalled, strict=True))
            starts = np.append(True, (rows[1:] != rows[:-1]) | (times[1:] != times[:-1]))  # one entry for each request
            number = np.bincount(CELLS * (starts.cumsum() - 1) + cells, minlength=CELLS * np.count_nonzero(starts))
            parts.append((rows[starts], times[starts], number.reshape(-1, CELLS)))
        if self._used:
            rows, first, last, times = (np.concatenate(part) for part in zip(*self._used, strict=True))
            number = _count_cells(first, last, runs.size.take(rows), runs.bounds.take(rows, axis=0).T)
            parts.append((rows, times, number))
        self._used, self._recalled = [], []
        if not parts:
            return np.empty(0, np.intp), np.empty(0, np.intp), np.empty((0, CELLS), np.intp)
        rows, times, number = (np.concatenate(part) for part in zip(*parts, strict=True))
        return rows, times, number

    def renumbered(self) -> None:
        """Record that rows were dropped. The caller must have called `learn` since it last added rows."""
        self._begun = self._runs.count

    def expose(
        self, group: Numbers, covariates: Numbers, since: Numbers, until: Numbers, at_risk: Numbers, stale: bool = False
    ) -> None:
        """Count intervals at risk: blocks that were idle from age `since` to `until`.

        Args:
            group: 3 * hint + output. All arrays but `at_risk` are `[n]`.
            covariates: Bucket of new blocks + 8 * bucket of output.
            since: Start of the interval.
            until: End of the interval.
            at_risk: Weighted number of blocks in each cell, 2 * uses + tail: `[n, 8]`.
            stale: Whether many requests have ended since the last fit. If so, the rates are updated before the expected
                hits are computed, so that the factors do not absorb the whole change of the rates.
        """
        new, output = covariates % 8 + NEW, covariates // 8 + OUTPUT
        ages = min(bisect(EDGE_LIST, float(until.max())), AGES)
        overlap = _within_buckets(until, ages)
        begun = since.nonzero()[0]
        overlap[begun] -= _within_buckets(since[begun], ages)
        own = self.factor[new] * self.factor[output]
        weighted = at_risk * (own[:, None] * np.tile(self.factor[TAIL:], USES).astype(np.float32))
        by_uses = weighted[:, 0::2] + weighted[:, 1::2]
        expected = weighted.reshape(-1, USES, 2)
        groups = [(g, group == g) for g in np.bincount(group).nonzero()[0].tolist()]
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

    def reuse(self, group: Numbers, covariates: Numbers, cell: Numbers, age: Numbers, weight: Numbers) -> None:
        """Count occurrences: blocks that were used again. A cell is 2 * uses + tail."""
        bucket = EDGES[:AGES].searchsorted(age, side="right") - 1
        places = (group * USES + cell // 2) * AGES + bucket
        self._events += np.bincount(places, weight, self._events.size).reshape(self._events.shape)
        for factor in (covariates % 8 + NEW, covariates // 8 + OUTPUT, cell % 2 + TAIL):
            self._factor_events += np.bincount(factor, weight, FACTORS)

    def _fit_rates(self) -> None:
        """Compute the rates of strata: occurrences over exposure, shrunk towards the rates of all strata together.

        The rates of all strata together are shrunk towards a prior.
        """
        events, exposure = self._events.sum(axis=0), self._exposure.sum(axis=0)
        prior = AGE_PRIOR * WIDTHS
        # The prior's rate falls with age, because an age that was never seen must not look good.
        pooled = (events + prior * 0.05 / (EDGES[:AGES] + 300)) / (exposure + prior)
        self.rate = (self._events + PRIOR * WIDTHS * pooled) / (self._exposure + PRIOR * WIDTHS)

    def fit(self, decay: float) -> None:
        """Compute rates and factors from the sums, then decay the sums. Indices are computed on demand."""
        self._fit_rates()
        self.factor = (self._factor_events + FACTOR_PRIOR) / (self._factor_exposure + FACTOR_PRIOR)
        self._indexed = False
        for sums in (self._events, self._exposure, self._factor_events, self._factor_exposure):
            sums *= decay

    def _find_index(self) -> None:
        """Compute indices from rates. Only `scores` and `score` call it, so it never runs without evictions."""
        level = self._levels()
        used = np.flatnonzero(np.repeat(self._seen, USES))
        levels = np.bincount(level).nonzero()[0]  # not `unique`, whose first call takes 40 ms for imports
        self._row_of_level = (AGES + 1) * level
        self._index[used[:, None], levels] = _index(self.rate[used], levels)
        self._indexed = True

    def _levels(self) -> npt.NDArray[np.intp]:
        """Return the level of each product of factors, by covariates + COVARIATES * tail."""
        factor = self.factor
        product = factor[TAIL:, None, None] * factor[OUTPUT:TAIL, None] * factor[NEW:OUTPUT]
        levels = np.rint(3 * np.log2(product)).astype(np.intp) + LEVELS // 2
        clipped: npt.NDArray[np.intp] = levels.clip(0, LEVELS - 1).reshape(-1)
        return clipped

    def scores(self, stratum: Numbers, covariates: Numbers, age: Numbers) -> Numbers:
        """Return the scores of blocks: their Gittins indices, in expected hits for each request that they stay.

        All arguments are `[n]`: stratum 4 * group + uses, covariates new + 8 * output + 64 * tail, and idle times.
        """
        if not self._indexed:
            self._find_index()
        place = np.interp(age, EDGES[:AGES], np.arange(float(AGES)))
        bucket = place.astype(np.intp)
        at = ROWS.take(stratum) + self._row_of_level.take(covariates) + bucket
        index = self._index.reshape(-1)
        here = index.take(at)
        scores: Numbers = (here + (place - bucket) * (index.take(at + 1) - here)) * (1 - FADING * age)
        return scores

    def score(self, stratum: int, covariates: int, age: int) -> float:
        """Return the score of one block, as `scores` does, without numpy's overhead."""
        if not self._indexed:
            self._find_index()
        bucket = min(bisect(EDGE_LIST, age) - 1, AGES - 1)
        part = min((age - EDGE_LIST[bucket]) / WIDTH_LIST[bucket], 1.0)
        at = LEVELS * (AGES + 1) * stratum + self._row_of_level.item(covariates) + bucket
        here = self._index_at[at]
        return float((here + part * (self._index_at[at + 1] - here)) * (1 - FADING * age))


ROWS = LEVELS * (AGES + 1) * np.arange(GROUPS * USES)  # start of each stratum's indices


def _within_buckets(age: Numbers, ages: int) -> npt.NDArray[np.float64]:
    """Return how much of each idle time from 0 to `age` `[n]` lies in each of the first buckets, `[n, ages]`."""
    time = age[:, None] - EDGES[:ages]
    np.maximum(time, 0.0, out=time)
    np.minimum(time, SPANS[:ages], out=time)
    return time


def _index(rate: Numbers, levels: Numbers) -> Numbers:
    """Return, for each stratum, level and age, the maximum over later ages of expected hits over expected waiting."""
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
    by_stratum: Numbers = index.T.reshape(rate.shape[0], -1, AGES + 1)
    return by_stratum


# Three facts known when a request ends: base stratum, base covariates, and whether the conversation is over. Adding the
# class of uses gives a block's stratum. Adding the bucket of new blocks gives the last block's covariates.
Ending = tuple[int, int, bool]
UNKNOWN_ENDING: Ending = (0, COVARIATES, False)  # for a request without a notification of its end


def ending_of(returns: float | None, output_tokens: int) -> Ending:
    """Return the `Ending` of a request, from the caller's hint and the number of generated tokens."""
    hint = 0 if returns is None else 1 + bisect(HINT_BOUNDS, returns)
    stratum = USES * (hint * OUTPUTS + bisect(OUTPUT_BOUNDS, output_tokens))
    return stratum, COVARIATES + 8 * bisect(FINE_OUTPUT_BOUNDS, output_tokens), returns == 0


def _count_cells(first: Numbers, last: Numbers, size: Numbers, bounds: Numbers) -> Numbers:
    """Return how many blocks at places `first` to `last` of each chain are in each cell, `[n, 8]`.

    `size` and `bounds` `[3, n]` are those of `RunTable`.
    """
    tail, rows = last == size, np.arange(size.size)
    number: Numbers = np.zeros((size.size, CELLS), np.intp)
    begin, last = first, last - tail
    for cell, bound in zip(range(CELLS - 2, -1, -2), (*bounds[::-1], size), strict=True):
        end = np.minimum(np.maximum(bound, first), last)  # by column: operations on rows of four take longer
        number[:, cell] = end - begin
        begin = end
    number[rows[tail], (2 * (bounds >= size).sum(axis=0) + 1)[tail]] = 1
    return number


def _cell_of(uses: Numbers, tail: Numbers) -> Numbers:
    """Return the cells of blocks, from their numbers of uses and whether each is its request's last block."""
    cells: Numbers = 2 * USE_BOUNDS.searchsorted(uses, side="right") + tail
    return cells
