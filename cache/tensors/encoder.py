"""Outputs of a multimodal encoder, kept by the content they were made from.

A prefix hit may end inside an image: the KV of its first tokens is there, the embeddings of the rest are needed to
compute on. The encoder does not run again for them when its output is here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..runs import Span


@dataclass(frozen=True)
class EncoderItem:
    """One image, clip or sound in a prompt.

    Attributes:
        content_hash: Identifies the content: equal ones have equal encoder outputs.
        start: Position of its first token.
        length: Tokens it stands for, the rows of its encoder output.

    Examples:
        >>> image = pc.EncoderItem("sha256 of the pixels", start=4, length=3)
        >>> image.end, image.overlaps([(0, 4)]), image.overlaps([(6, 9)])
        (7, False, True)
    """

    content_hash: Hashable
    start: int
    length: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1:
            raise ValueError(f"start, length: got {self.start}, {self.length}, needs at least 0 and 1")

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + self.length

    def overlaps(self, spans: Iterable[Span]) -> bool:
        """Whether one of its tokens is in a span [start, end)."""
        return any(self.start < end and start < self.end for start, end in spans)


@dataclass
class EncoderEntry:
    """An output as policies see it; times are ticks, which count accesses of the whole cache."""

    output: torch.Tensor  # [length, *features]
    nbytes: int
    inserted_at: int
    last_access: int
    access_count: int = 1  # since it was put in
    holders: set[Hashable] = field(default_factory=set)  # requests
    released_at: int = 0  # when the last of them let go


EncoderPolicy = Callable[[EncoderEntry], Any]

POLICIES: dict[str, EncoderPolicy] = {
    "lru": lambda entry: entry.last_access,
    "fifo": lambda entry: entry.inserted_at,
    "lfu": lambda entry: (entry.access_count, entry.last_access),
    "largest": lambda entry: (-entry.nbytes, entry.last_access),
}


class EncoderCache:
    """Encoder outputs by content hash, within a budget of bytes.

    Outputs that requests hold stay; of the others the one goes first whose key under the policy is smallest. The key is
    asked for once after the last holder let go. Contents are the same when their hashes are equal and of one type. Not
    safe for use from several threads at once.

    Args:
        max_bytes: Budget of all outputs.
        policy: "lru", "fifo", "lfu", "largest", or a function from an `EncoderEntry` to its key.
        device: Where outputs are kept; None: where they were computed.

    Examples:
        >>> cache = pc.EncoderCache(max_bytes=1 << 20)
        >>> image = pc.EncoderItem("sha256 of the pixels", start=4, length=3)
        >>> for item in cache.missing("request", [image], compute_spans=[(0, 9)]):
        ...     cache.put("request", item, torch.ones(item.length, 8))  # what the encoder gives for it
        >>> embeddings = torch.zeros(9, 8)
        >>> cache.place(embeddings, np.arange(9), [image])
        >>> embeddings[:, 0].tolist()
        [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
        >>> cache.release("request")
        >>> cache.missing("another", [image], [(0, 9)])
        []
    """

    def __init__(
        self, max_bytes: int, policy: str | EncoderPolicy = "lru", device: str | torch.device | None = None
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes: got {max_bytes}, needs at least 0")
        if isinstance(policy, str) and policy not in POLICIES:
            raise ValueError(f"policy: got {policy!r}, needs one of {', '.join(POLICIES)} or a function")
        self.max_bytes = max_bytes
        self.device = None if device is None else torch.device(device)
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._key = POLICIES[policy] if isinstance(policy, str) else policy
        self._entries: dict[Hashable, EncoderEntry] = {}
        self._held: dict[Hashable, set[Hashable]] = {}
        self._held_bytes = 0
        self._tick = 0
        self._idle: list[tuple[Any, int, Hashable]] = []  # a heap of (key, released_at, content), some held again since
        self._released: list[tuple[int, Hashable]] = []  # what is to go into it

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, content_hash: Hashable) -> bool:
        return _identity(content_hash) in self._entries

    def missing(
        self, request_id: Hashable, items: Iterable[EncoderItem], compute_spans: Sequence[Span]
    ) -> list[EncoderItem]:
        """Takes hold of the outputs that a request needs and tells which the encoder has to compute.

        Args:
            request_id: Who holds the outputs until `release`.
            items: All items of its prompt.
            compute_spans: Token ranges that are about to be computed; items outside of them are not needed.

        Returns:
            Items to encode and then to `put`, one for each content.

        Raises:
            ValueError: Items of one content differ in length, or from the output that is there; nothing is held then.

        Examples:
            >>> clip = pc.EncoderItem("clip", start=20, length=5)
            >>> [item.content_hash for item in cache.missing("third", [image, clip], compute_spans=[(0, 30)])]
            ['clip']
        """
        needed = [item for item in items if item.overlaps(compute_spans)]
        lengths: dict[Hashable, int] = {}
        for item in needed:
            content = _identity(item.content_hash)
            if content in self._entries:
                self._check_length(item, self._entries[content].output)
            elif lengths.setdefault(content, item.length) != item.length:
                got = f"lengths {lengths[content]} and {item.length}"
                raise ValueError(f"{item.content_hash!r}: got {got}, needs one length for one content")
        lacking: dict[Hashable, EncoderItem] = {}
        for item in needed:
            content = _identity(item.content_hash)
            entry = self._entries.get(content)
            if entry is None:
                self.misses += 1
                lacking.setdefault(content, item)
            else:
                self.hits += 1
                self._access(request_id, content, entry)
        return list(lacking.values())

    def _access(self, request_id: Hashable, content: Hashable, entry: EncoderEntry) -> None:
        self._tick += 1
        entry.last_access = self._tick
        entry.access_count += 1
        self._hold(request_id, content, entry)

    def _hold(self, request_id: Hashable, content: Hashable, entry: EncoderEntry) -> None:
        if not entry.holders:
            self._held_bytes += entry.nbytes
        entry.holders.add(request_id)
        self._held.setdefault(request_id, set()).add(content)

    def put(self, request_id: Hashable, item: EncoderItem, output: torch.Tensor) -> None:
        """Keeps an output and takes hold of it; what is there already is kept instead.

        Args:
            request_id: Who holds it until `release`.
            item: What it is the output of.
            output: `[length, *features]`. It is not to be changed afterwards.

        Raises:
            ValueError: Another number of rows than the item has tokens.
            MemoryError: It does not fit beside what requests hold; nothing has changed.

        Examples:
            >>> cache.put("third", pc.EncoderItem("clip", start=20, length=5), torch.ones(5, 8))
            >>> "clip" in cache, cache.nbytes
            (True, 256)
        """
        self._check_length(item, output)
        content = _identity(item.content_hash)
        entry = self._entries.get(content)
        if entry is not None:
            self._access(request_id, content, entry)
            return
        output = output.detach()
        size = output.numel() * output.dtype.itemsize
        if self._held_bytes + size > self.max_bytes:
            held = f"{self._held_bytes} of {self.max_bytes} bytes are held by requests"
            raise MemoryError(f"{item.content_hash!r}: needs {size} bytes, {held}")
        if self.nbytes + size > self.max_bytes:
            self._rank_released()
        if self.device is not None and self.device != output.device:
            output = output.to(self.device)
        elif output.untyped_storage().nbytes() != size:
            output = output.clone(memory_format=torch.contiguous_format)  # or a view keeps a whole batch alive
        while self.nbytes + size > self.max_bytes:
            self._evict()
        self._tick += 1
        entry = EncoderEntry(output, size, self._tick, self._tick)
        self._entries[content] = entry
        self.nbytes += size
        self._hold(request_id, content, entry)

    def _rank_released(self) -> None:
        """Asks the policy for the keys of what was released since; where it raises, nothing has changed."""
        if len(self._idle) > 2 * len(self._entries):  # most were held again since
            self._idle = [row for row in self._idle if self._is_idle(row[2], row[1])]
            heapify(self._idle)
        ranked = [
            (self._key(self._entries[content]), tick, content)
            for tick, content in self._released
            if self._is_idle(content, tick)
        ]
        try:
            for row in ranked:
                heappush(self._idle, row)
        except BaseException:  # keys that do not compare: the heap is in no order
            self._idle, self._released = [], [(entry.released_at, key) for key, entry in self._entries.items()]
            raise
        self._released = []

    def _is_idle(self, content: Hashable, tick: int) -> bool:
        """Whether an output is here that was last released at a tick and is held by no request since."""
        entry = self._entries.get(content)
        return entry is not None and entry.released_at == tick and not entry.holders

    def _evict(self) -> None:
        while True:
            _, tick, content = heappop(self._idle)
            if self._is_idle(content, tick):
                self.nbytes -= self._entries.pop(content).nbytes
                self.evictions += 1
                return

    def _check_length(self, item: EncoderItem, output: torch.Tensor) -> None:
        if output.dim() < 1 or output.shape[0] != item.length:
            raise ValueError(f"{item.content_hash!r}: got {list(output.shape)} rows, needs {item.length}, its length")

    def output(self, item: EncoderItem) -> torch.Tensor:
        """The whole output of an item, `[length, *features]`, not to be changed.

        Raises:
            KeyError: It is not here.

        Examples:
            >>> cache.output(image).shape
            torch.Size([3, 8])
        """
        try:
            return self._entries[_identity(item.content_hash)].output
        except KeyError:
            raise KeyError(f"item: got {item.content_hash!r}, needs one that was put and is still here") from None

    def place(
        self, embeddings: torch.Tensor, positions: npt.NDArray[np.integer[Any]], items: Iterable[EncoderItem]
    ) -> None:
        """Writes the rows of items over the embeddings of the tokens they stand for.

        Args:
            embeddings: `[num_tokens, *features]`, written to.
            positions: `[num_tokens]`, position of each token in its prompt.
            items: Of that prompt; only those that overlap the positions have to be here.

        Raises:
            KeyError: An output is not here; nothing has been written.
            ValueError: An output of another length than its item, or of other rows than embeddings; likewise.

        Examples:
            >>> embeddings = torch.zeros(4, 8)
            >>> cache.place(embeddings, np.arange(5, 9), [image])  # computing goes on inside of the image
            >>> embeddings[:, 0]
            tensor([1., 1., 0., 0.])
        """
        positions = np.asarray(positions)
        work = []
        for item in items:
            tokens = np.flatnonzero((positions >= item.start) & (positions < item.end))
            if tokens.size:
                output = self.output(item)
                self._check_length(item, output)
                if output.shape[1:] != embeddings.shape[1:]:
                    got, needs = list(output.shape[1:]), list(embeddings.shape[1:])
                    raise ValueError(f"{item.content_hash!r}: got rows {got}, needs {needs} as embeddings have")
                work.append((tokens, positions[tokens] - item.start, output))
        for tokens, rows, output in work:
            index = torch.from_numpy(rows.astype(np.int64)).to(output.device)
            where = torch.from_numpy(tokens).to(embeddings.device)
            embeddings[where] = output[index].to(embeddings.device, embeddings.dtype)

    def release(self, request_id: Hashable) -> None:
        """Lets go of everything a request holds; without effect for one that holds nothing.

        Examples:
            >>> cache, image = pc.EncoderCache(max_bytes=12), pc.EncoderItem("image", start=4, length=3)
            >>> cache.put("request", image, torch.ones(3, 1))
            >>> cache.release("request")
            >>> cache.put("request", pc.EncoderItem("another", start=4, length=3), torch.ones(3, 1))
            >>> "image" in cache
            False
        """
        for content in self._held.pop(request_id, ()):
            entry = self._entries[content]
            entry.holders.discard(request_id)
            if not entry.holders:
                self._held_bytes -= entry.nbytes
                self._tick += 1
                entry.released_at = self._tick
                self._released.append((self._tick, content))
        if len(self._released) > 2 * len(self._entries):  # most were held again since
            self._released = [row for row in self._released if self._is_idle(row[1], row[0])]

    def check(self) -> None:
        """Asserts that bytes and holders are consistent.

        Examples:
            >>> cache.check()
        """
        assert self.nbytes == sum(entry.nbytes for entry in self._entries.values()) <= self.max_bytes
        assert self._held_bytes == sum(entry.nbytes for entry in self._entries.values() if entry.holders)
        held = {(request, key) for request, keys in self._held.items() for key in keys}
        assert held == {(request, key) for key, entry in self._entries.items() for request in entry.holders}


def _identity(content_hash: Hashable) -> Hashable:
    """What tells contents apart: 1, True and 1.0 are equal and yet are not hashes of one content."""
    if isinstance(content_hash, tuple):
        return tuple, tuple(_identity(part) for part in content_hash)
    return type(content_hash), content_hash
