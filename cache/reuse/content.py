"""An index of published blocks by their tokens alone, which finds text at any position and after any other text.

It works as rsync does for files. A block has a fingerprint, a polynomial of its tokens modulo 2**32:

    f(t) = t[0] + t[1] m + ... + t[B - 1] m**(B - 1)

The sums of t[i] m**i over B neighbours, times m**-i, give the fingerprint of the B tokens after every offset i of a
prompt. Before a match counts, the block's own tokens, keys and salt are compared. So fingerprints only affect speed,
never results. Neighbouring blocks of the sequence in which a block was computed extend a match to both sides, token by
token.

An entry says "block b, while its stamp is t, holds these tokens". The owner of the blocks changes a block's stamp with
its content. So evictions and undone verbs need not update the index.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ..hashing import BIG_ENDIAN
from ..runs import MovedSpan
from ..table import Ids

Tokens = npt.NDArray[np.uint32]
Stamps = npt.NDArray[np.int64]

FACTOR = 0x85EBCA6B
"""The factor m. It is odd, so it has an inverse modulo 2**32."""
INVERSE = pow(FACTOR, -1, 1 << 32)
CHUNK = 4096
"""Number of offsets of a prompt that are processed together, so that their data stays in a core's cache."""
PLACES = 4
"""Number of places in the table of fingerprints for each block.

One in nine blocks loses its place to another and is found only through a neighbour. A larger table does not fit in a
core's cache.
"""


class ContentIndex:
    """An index that finds the tokens of published blocks in any text.

    Its memory, about 170 bytes for each block of 16 tokens, is allocated at once. So are the arrays for `CHUNK` offsets
    of a prompt: allocating them for every prompt would cost more than all other work.

    Args:
        num_blocks: Number of blocks.
        block_size: Tokens of a block.
        namespace_bytes: Length of a namespace, a multiple of 8.
        stamps: Returns a number for each of some blocks. It changes with the block's content, and is -1 while the
            content cannot be found.
    """

    def __init__(self, num_blocks: int, block_size: int, namespace_bytes: int, stamps: Callable[[Ids], Stamps]) -> None:
        count, self._size, self._stamps_now = num_blocks, block_size, stamps
        bits = min(max((PLACES * count - 1).bit_length(), 4), 30)
        self._shift = np.uint32(32 - bits)
        # Each place has sixteen bits of a fingerprint, so that a prompt is compared with data in the core's cache.
        self._marks = np.zeros(1 << bits, np.uint16)
        self._blocks = np.zeros(1 << bits, np.int32)
        self._prints = np.zeros(count, np.uint32)
        self._tokens = np.zeros((count, block_size), np.uint32)
        self._namespaces = np.zeros((count, namespace_bytes // 8), np.uint64)
        self._stamps = np.full(count, -1, np.int64)
        self._ordinals = np.zeros(count, np.int32)
        self._before, self._behind = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
        self._exact = np.zeros(count, np.bool_)
        self.approximate = False  # whether a block of a request with moved KV was ever added
        # Powers of m, of its inverse, and the latter times a factor (`_scale`).
        self._up, self._down = _powers(FACTOR, CHUNK + block_size), _powers(INVERSE, CHUNK)
        self._scaled, self._scaled_by = self._down.copy(), np.uint32(1)
        self._sums, self._other_sums = (np.empty(CHUNK + block_size, np.uint32) for _ in range(2))
        self._window_prints, self._equal = np.empty(CHUNK, np.uint32), np.empty(CHUNK, np.bool_)
        self._window_slots, self._window_marks = np.empty(CHUNK, np.intp), np.empty(CHUNK, np.uint16)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def add(
        self, ids: Ids, stamps: Stamps, first: int, before: int, tokens: array[int], namespace: bytes, exact: bool
    ) -> None:
        """Add published blocks of one sequence.

        Args:
            ids: The blocks.
            stamps: Their stamps when they got their content.
            first: The number of blocks of the sequence before them.
            before: The block before them; -1: none.
            tokens: Their tokens.
            namespace: An identity of keys and salt.
            exact: Whether no moved KV is in the blocks or before them. Exact text is found first.
        """
        rising = ids.item(-1) - ids.item(0) == ids.size - 1 and bool((ids[1:] > ids[:-1]).all())
        index = slice(ids.item(0), ids.item(0) + ids.size) if rising else ids  # writes to a slice cost a tenth
        self._stamps[index] = -1  # the entry is invalid until the last line
        rows, word = np.frombuffer(tokens, np.uint32).reshape(-1, self._size), np.frombuffer(namespace, np.uint64)
        self._tokens[index], self._namespaces[index], self._exact[index] = rows, word, exact
        self._ordinals[index] = np.arange(first, first + ids.size)
        self._before[index], self._behind[index] = np.append(before, ids[:-1]), np.append(ids[1:], -1)
        if before >= 0:
            self._behind[before] = ids[0]
        prints = rows @ self._up[: self._size] * _factor(word)
        self._prints[index] = prints
        at, new = prints >> self._shift, ids  # the high bits, because the low bits of a polynomial are weak
        if not exact:
            self.approximate = True
            there = self._blocks[at]
            kept = (self._prints[there] == prints) & self._exact[there] & self._live(there)
            at, prints, new = at[~kept], prints[~kept], ids[~kept]
        self._blocks[at], self._marks[at] = new, prints.astype(np.uint16)
        self._stamps[index] = stamps

    def leave_out(self, ids: Ids) -> None:
        """Exclude published blocks whose KV depends on more than tokens, keys and salt."""
        self._stamps[ids] = -1

    def _live(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return whether the entries of blocks are valid."""
        now = self._stamps_now(ids)
        live: npt.NDArray[np.bool_] = (self._stamps[ids] == now) & (now != -1)
        return live

    def find(self, tokens: Tokens, begin: int, end: int, namespace: bytes) -> Iterator[MovedSpan]:
        """Yield runs of cached text in `tokens[begin:end]`, ascending, without overlaps.

        Each run includes at least one whole block. Its `targets` are still empty.
        """
        size, text, word = self._size, tokens[begin:end], np.frombuffer(namespace, np.uint64)
        if text.size < size:
            return
        self._scale(_factor(word))
        hits, wanted = self._candidates(text)
        if not hits.size:
            return
        blocks = self._blocks[wanted >> self._shift]
        same = self._prints[blocks] == wanted
        hits, blocks = hits[same], blocks[same]
        good = self._live(blocks) & (self._namespaces[blocks] == word).all(1)
        hits, blocks = hits[good], blocks[good]
        windows = np.lib.stride_tricks.sliding_window_view(text, size)
        same = (windows[hits] == self._tokens[blocks]).all(1)
        hits, blocks = hits[same], blocks[same]
        known = np.full(text.size + size, -1, np.int32)
        known[hits] = blocks
        behind, ordinals = known[hits + size], self._ordinals
        linked = np.zeros(text.size + size, np.bool_)
        linked[hits] = (behind >= 0) & (self._before[behind] == blocks) & (ordinals[blocks] + 1 == ordinals[behind])
        goes_on, done, number = linked.tobytes(), 0, 0
        while number < hits.size:
            first = last = hits.item(number)
            while goes_on[last]:
                last += size
            found = self._extended(text, done, first, known[first : last + 1 : size].tolist())
            yield found._replace(start=found.start + begin, end=found.end + begin, delta=found.delta + begin)
            done = found.end
            number = int(hits.searchsorted(done))

    def agreed_before(self, match: MovedSpan, tokens: Tokens) -> int:
        """Return how many tokens before a match in the prompt equal those before it in the cached text.

        At most two blocks of the cached text are compared.
        """
        block, offset = divmod(match.slots.item(0), self._size)
        stood, before = self._tokens[block, :offset], self._neighbour(self._before, block, -1)
        if before >= 0:
            stood = np.concatenate((self._tokens[before], stood))
        return common_length(tokens[: match.start][::-1], stood[::-1])

    def _candidates(self, text: Tokens) -> tuple[npt.NDArray[np.intp], Tokens]:
        """Return offsets of `text` whose fingerprint may be in the table, and their fingerprints."""
        size, offsets, prints = self._size, [], []
        low = self._window_prints.view(np.uint16)[1 if BIG_ENDIAN else 0 :: 2]
        for begin in range(0, text.size - size + 1, CHUNK):
            part = text[begin : begin + CHUNK + size - 1]
            count = part.size - size + 1
            own, slots = self._window_prints[:count], self._window_slots[:count]
            np.multiply(self._windows(part), self._scaled[:count], out=own)
            np.right_shift(own, self._shift, out=slots)
            there = self._marks.take(slots, out=self._window_marks[:count], mode="clip")
            at = np.equal(there, low[:count], out=self._equal[:count]).nonzero()[0]
            if at.size:
                prints.append(own[at])
                offsets.append(at + begin)
        if not offsets:
            return np.empty(0, np.intp), np.empty(0, np.uint32)
        return np.concatenate(offsets), np.concatenate(prints)

    def _windows(self, part: Tokens) -> Tokens:
        """Return sums of t[i] m**i over B neighbours at every offset, by doubling: of two, of four, and so on.

        A running sum could not be vectorized, because each of its steps depends on the step before.
        """
        done, width, size = 0, 1, self._size
        sums, other = np.multiply(part, self._up[: part.size], out=self._sums[: part.size]), self._other_sums
        total: Tokens | None = None
        while True:
            if size & width:
                here = sums[done : done + part.size - size + 1]
                if total is None:  # its memory is overwritten two rounds later
                    total = here if width == size else here.copy()
                else:
                    total += here
                done += width
            if done == size:
                assert total is not None
                return total
            sums, other = np.add(sums[:-width], sums[width:], out=other[: sums.size - width]), sums
            width *= 2

    def _scale(self, factor: np.uint32) -> None:
        """Set `_scaled` to `_down` times a factor. Most prompts have the same factor."""
        if factor != self._scaled_by:
            self._scaled_by = np.uint32(0)  # until `_scaled` is complete
            np.multiply(self._down, factor, out=self._scaled)
            self._scaled_by = factor

    def _extended(self, text: Tokens, done: int, first: int, ids: list[int]) -> MovedSpan:
        """Return a run of whole blocks at `first`, extended by equal tokens before it, down to `done`, and after it."""
        size, end, lead, tail = self._size, first + len(ids) * self._size, 0, 0
        while (block := self._neighbour(self._before, ids[0], -1)) >= 0 and first > done and not lead:
            agreed = common_length(text[max(first - size, done) : first][::-1], self._tokens[block][::-1])
            if not agreed:
                break
            ids.insert(0, block)
            first, lead = first - agreed, (size - agreed) % size
        while (block := self._neighbour(self._behind, ids[-1], 1)) >= 0 and end < text.size and not tail:
            agreed = common_length(text[end : end + size], self._tokens[block])
            if not agreed:
                break
            ids.append(block)
            end, tail = end + agreed, agreed % size
        slots = (np.array(ids, np.int64)[:, None] * size + np.arange(size)).ravel()[lead : lead + end - first]
        stood = self._ordinals.item(ids[0]) * size + lead
        return MovedSpan(first, end, slots, first - stood, slots[:0])

    def _neighbour(self, links: Ids, block: int, step: int) -> int:
        """Return the block before or after a block, in the sequence in which it was computed; -1 if not cached."""
        other = links.item(block)
        if other < 0 or not self._live(links[block : block + 1])[0]:
            return -1
        follows = self._ordinals.item(other) == self._ordinals.item(block) + step
        return other if follows and (self._namespaces[other] == self._namespaces[block]).all() else -1


def _powers(base: int, count: int) -> Tokens:
    """Return powers of `base` modulo 2 ** 32, from power 0 on."""
    factors = np.full(count, base, np.uint32)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint32)


def _factor(namespace: npt.NDArray[np.uint64]) -> np.uint32:
    """Return the odd number by which keys and salt multiply a fingerprint."""
    return np.uint32(namespace.item(0) >> 32 | 1)


def common_length(one: Tokens, other: Tokens) -> int:
    """Return how many leading tokens two texts have in common."""
    count = min(one.size, other.size)
    differ = (one[:count] != other[:count]).nonzero()[0]
    return differ.item(0) if differ.size else count
