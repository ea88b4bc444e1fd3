"""How much credit for earlier uses pays in the traffic seen; none is lru.

Every amount is simulated while one is in force. A cache of C blocks that keeps what has the greatest `last use +
credit * level` holds just the blocks above the value that C blocks exceed, so it is enough to count blocks by level
and last use, those evicted lately included: when a block comes back, its own value tells whether it would still have
been there. For no credit this is exact while it is in force. The others are given a request less of room than they
have, since newcomers of little worth always get in.

A cache that holds many requests begins with full credit, on trial: most traffic rewards it, and it is given up once it
has lost a small stake. From then on, and in a small cache from the beginning, a credit comes into force when its wins
over no credit are more than luck explains, and goes when they are used up, or at once when what is really hit falls
behind. Constants were chosen on the first half of the conversation trace, the agentic trace and 95 generated ones (19
kinds of traffic, 6 capacities), and held against the bars set for the whole conversation trace and its second half;
Mooncake's synthetic trace and 95 fresh generated ones only judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..table import count_nonzero

SHARES = np.array([0.5, 1.0])  # credits tried beside none, as shares of the learned interval
HALF_LIFE = 2000  # requests after which a win counts half; 1000 to 4000 do as well
ODDS = 1.5
"""Standard deviations of its wins over no credit that a credit must win to come into force, and in truth lose from
its best to go at once. Odds of 1.25 end more than 1 % below lru more often."""
DOUBT = 4.0  # deviation assumed before any is seen, in requests of mean length, so that a few lucky ones decide nothing
LARGE = 1.25
"""Requests of mean length that one request counts as at most: a few long ones are no evidence. 2 loses more than 1 %
against lru more often; 1 waits longer, and takes the conversation trace at 10 % capacity from 1.042 to 1.039 of lru."""
TRIAL = 150
"""Requests that the cache holds once it is full, from which on full credit is tried; 100 to 200 do the same, with 50 a
trace of 200 requests may end 3 % below lru before the stake is lost."""
STAKE = 3.0
"""Requests of mean length that lru may be ahead by before the trial ends. 2 ends it too early for the conversation
trace at 10 % capacity (1.040 instead of 1.054 times lru), 4 loses more than 1 % against lru more often."""
EVERY = 16  # requests between looks at the counts
BINS = 2048  # bins of last use
FINE = 128  # bins at least that the time lru would keep a block is divided into before bins get wider

STEPS = np.linspace(0.0, 1.0, 65)
ONE = np.int32(1)  # `subtract.at` takes thrice as long with a Python int

Numbers = npt.NDArray[Any]


class CreditChooser:
    """Counts the wins of each credit over none, and chooses; `worth` has the credits that each level of use gives."""

    def __init__(self, capacity: int, worth: Sequence[float]) -> None:
        self._capacity = capacity
        self._worth = np.array(worth)
        self._counts = np.zeros((len(worth), BINS), np.int32)
        self._flat = self._counts.reshape(-1)
        self._origin = 0
        self._width = 1
        self._limits: npt.NDArray[np.float64] | None = None  # of each share, the last use that a level must exceed
        self._looked = self._now = 0
        self._mean = 0.0
        # lru: how many blocks of each request it would still have, and the oldest request that has any.
        self._kept = np.zeros(max(BINS, 1 << (capacity + 1).bit_length()), np.int32)
        self._edge = self._inside = 0
        self._room = capacity
        # Of the request at hand: simulated hits and real ones.
        self._lru = self._real = 0
        self._paper = [0] * SHARES.size
        self._wins = [0.0] * SHARES.size
        self._squares = [0.0] * SHARES.size
        self._truth = self._truth_squares = 0.0
        self._caution = 1.0
        self._trial: bool | None = None  # to be decided once the cache is full
        self._balance = 0.0
        self._chosen = -1

    @property
    def share(self) -> float:
        """The credit to give, as a share of the interval."""
        return float(SHARES[self._chosen]) if self._chosen >= 0 else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._counts.nbytes + self._kept.nbytes

    def left(self, last_use: Numbers, level: Numbers) -> None:
        """Blocks of these values are in use again, or gone."""
        self.forgotten(last_use, level)
        self._lose(last_use[last_use >= self._edge])

    def forgotten(self, last_use: Numbers, level: Numbers) -> None:
        """Evicted blocks of these values are not remembered any more; lru might still have them."""
        if last_use.size:
            self._uncount(last_use, level.astype(np.intp) - 1)

    def _uncount(self, last_use: Numbers, row: Numbers) -> None:
        places = (last_use - self._origin) // self._width + row * BINS
        if self._origin:
            places = places[last_use >= self._origin]
        np.subtract.at(self._flat, places, ONE)

    def _lose(self, kept: Numbers) -> None:
        """Takes blocks of these last uses out of what lru would still have."""
        if kept.size:
            np.subtract.at(self._kept, kept & (self._kept.size - 1), ONE)
            self._inside -= kept.size

    def came_back(self, last_use: Numbers, level: Numbers, hit: bool) -> None:
        """Blocks of these values were asked for, and were there (`hit`) or not."""
        if not last_use.size:
            return
        if hit:
            self._real += last_use.size
        kept = last_use[last_use >= self._edge]
        if kept.size:
            newer = int(count_nonzero(kept > self._edge))
            at_edge = min(kept.size - newer, self._room)
            self._room -= at_edge
            self._lru += newer + at_edge
            self._lose(kept)
        row = level.astype(np.intp) - 1
        if self._limits is None:
            for n in range(SHARES.size):
                self._paper[n] += last_use.size
        else:
            needed = self._limits.take(row, axis=1)
            above = last_use - (self._now - self._looked) > needed
            for n in range(SHARES.size):
                self._paper[n] += int(count_nonzero(above[n]))
        self._uncount(last_use, row)

    def released(self, now: int, ends: list[int], held: int, interval: float) -> None:
        """Blocks were used until now, the number of the request, from 1.

        `ends` says how many of them have each level at most, `held` how many blocks others hold; a credit is worth
        `interval` from now on.
        """
        self._now = now
        self._mean += (ends[-1] - self._mean) / min(now, HALF_LIFE)
        self._judge()
        if (now - self._origin) // self._width >= BINS:
            self._make_room()
        starts = [0, *ends[:-1]]
        each = [end - start for start, end in zip(starts, ends, strict=True)]
        self._counts[:, (now - self._origin) // self._width] += each
        self._keep(now, ends[-1], self._capacity - held)
        if now % EVERY == 0:
            self._look(interval, self._capacity - held - self._mean)

    def _keep(self, now: int, count: int, capacity: int) -> None:
        """Moves the edge behind which lru would have nothing left."""
        mask = self._kept.size - 1
        if now - self._edge > mask:
            self._inside -= int(self._kept[self._edge & mask])
            self._edge += 1
        self._kept[now & mask] = count
        self._inside += count
        oldest = int(self._kept[self._edge & mask])
        while self._inside - oldest >= capacity and self._edge < now:
            self._inside -= oldest
            self._edge += 1
            oldest = int(self._kept[self._edge & mask])
        self._room = max(0, capacity - self._inside + oldest)

    def _judge(self) -> None:
        """Adds the request at hand to the evidence, and lets it decide."""
        fade = 0.5 ** (1 / HALF_LIFE)
        doubt, large = (DOUBT * self._mean) ** 2, LARGE * self._mean
        best, most = -1, 0.0
        for n in range(SHARES.size):
            win = max(-large, min(large, self._paper[n] - self._lru))
            self._wins[n] = wins = fade * self._wins[n] + win
            self._squares[n] = squares = fade * fade * self._squares[n] + win * win
            needed = 0.0 if n == self._chosen else ODDS * self._caution * (squares + doubt) ** 0.5
            if wins > max(needed, most):
                best, most = n, wins
        self._caution = 1 + (self._caution - 1) * fade
        if self._trial is None and self._edge > 1:
            self._trial = self._now - self._edge >= TRIAL
        if self._trial:
            self._balance = fade * self._balance + self._real - self._lru
            self._trial = self._balance >= -STAKE * self._mean
            best = SHARES.size - 1 if self._trial else -1
            if best < 0:
                self._wins = [min(wins, 0.0) for wins in self._wins]
        elif self._chosen >= 0:
            win = self._real - self._lru
            self._truth_squares = fade * fade * self._truth_squares + win * win
            deviation = (self._truth_squares + doubt) ** 0.5
            self._truth = min(fade * self._truth + win, deviation)
            if self._truth < -ODDS * deviation:
                self._caution *= 2
                self._wins = [min(wins, 0.0) for wins in self._wins]
                best = -1
        if best < 0:
            self._truth = self._truth_squares = 0.0
        self._chosen = best
        self._lru = self._real = 0
        self._paper = [0] * SHARES.size

    def _make_room(self) -> None:
        """Forgets the older half of the bins where they are fine enough, else makes them twice as wide."""
        half = BINS // 2
        if (self._now - self._edge) < FINE * self._width:
            self._counts[:, :half] = self._counts[:, half:]
            self._origin += half * self._width
        else:
            self._counts[:, :half] = self._counts[:, ::2] + self._counts[:, 1::2]
            self._width *= 2
        self._counts[:, half:] = 0

    def _look(self, interval: float, room: float) -> None:
        """Finds for each credit the value that as many blocks exceed as there is room for."""
        self._looked = self._now
        credits = interval * SHARES[:, None] * self._worth
        bins = (self._now - self._origin) // self._width + 1
        newer = np.zeros((self._worth.size, bins + 1))  # blocks of the newest bin, of the newest two, ...
        newer[:, 1:] = self._counts[:, bins - 1 :: -1].cumsum(axis=1)
        if newer[:, -1].sum() <= room:
            self._limits = None
            return
        rows, each = np.arange(self._worth.size), np.arange(SHARES.size)
        end = self._origin + bins * self._width
        low = np.full(SHARES.size, float(self._origin))
        high = end + credits.max(axis=1)
        for _ in range(3):  # 64 ** 3 steps from end to end
            tried = low[:, None] + (high - low)[:, None] * STEPS
            age = ((end - tried[:, :, None] + credits[:, None, :]) / self._width).clip(0, bins)
            whole = np.minimum(age.astype(np.intp), bins - 1)
            part = newer[rows, whole]
            part += (age - whole) * (newer[rows, whole + 1] - part)
            last = (np.count_nonzero(part.sum(axis=2) > room, axis=1) - 1).clip(0, STEPS.size - 2)
            low, high = tried[each, last], tried[each, last + 1]
        self._limits = high[:, None] - credits
