"""Outputs of a multimodal encoder, cached by the content they were computed from.

A prefix hit may end inside an image: the KV of its first tokens is cached, and the rest is computed from embeddings.
The encoder does not run again if its output is here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...triton_ops._core.checks import check_integer
from ..runs import Span


@dataclass(frozen=True)
class EncoderItem:
    """One image, clip or sound in a prompt.

    Attributes:
        content_hash: A hash of the content. Items with equal hashes have equal encoder outputs.
        start: Position of the item's first token.
        length: Number of its tokens, which is the number of rows of its encoder output.

    Raises:
        TypeError: `start` or `length` is not an int.
        ValueError: `start` is below 0, or `length` below 1.

    Examples:
        >>> image = pc.EncoderItem("sha256 of the pixels", start=4, length=3)
        >>> image.end, image.overlaps([(0, 4)]), image.overlaps([(6, 9)])
        (7, False, True)
    """

    content_hash: Hashable
    start: int
    length: int

    def __post_init__(self) -> None:
        check_integer("start", self.start, 0)
        check_integer("length", self.length, 1)

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.length

    def overlaps(self, spans: Iterable[Span]) -> bool:
        """Return whether one of its tokens is in a span [start, end)."""
        return any(self.start < end and start < self.end for start, end in spans)


@dataclass
class EncoderEntry:
    """An encoder output as policies see it. Times are ticks, which count accesses of the whole cache."""

    output: torch.Tensor  # [length, *features]
    nbytes: int
    inserted_at: int
    last_access: int
    access_count: int = 1
    holders: set[Hashable] = field(default_factory=set)  # requests


EncoderPolicy = Callable[[EncoderEntry], Any]

POLICIES: dict[str, EncoderPolicy] = {
    "lru": lambda entry: entry.last_access,
    "fifo": lambda entry: entry.inserted_at,
    "lfu": lambda entry: (entry.access_count, entry.last_access),
    "largest": lambda entry: (-entry.nbytes, entry.last_access),
}


class EncoderCache:
    """A cache of encoder outputs by content hash, within a budget of bytes.

    Outputs that requests hold are never evicted. Of the others, the output with the smallest key under the policy is
    evicted first. Two contents are the same if their hashes are equal and of one type. Not thread-safe.

    Args:
        max_bytes: Budget of all outputs.
        policy: "lru", "fifo", "lfu", "largest", or a function from an `EncoderEntry` to its key.
        device: Device to keep outputs on. None: the device of their computation.

    Raises:
        ValueError: `max_bytes` is below 0, or `policy` is no known name and no function.

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
        if not callable(policy) and policy not in [*POLICIES]:
            raise ValueError(f"policy: got {policy!r}, needs one of {', '.join(POLICIES)} or a function")
        self.max_bytes = max_bytes
        self.device = None if device is None else torch.device(device)
        self.nbytes = self.hits = self.misses = self.evictions = 0
        self._key = POLICIES[policy] if isinstance(policy, str) else policy
        self._entries: dict[Hashable, EncoderEntry] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, content_hash: Hashable) -> bool:
        return _identity(content_hash) in self._entries

    def missing(
        self, request_id: Hashable, items: Iterable[EncoderItem], compute_spans: Sequence[Span]
    ) -> list[EncoderItem]:
        """Hold the cached outputs that a request needs, and return the items that the encoder must compute.

        Args:
            request_id: The request that holds the outputs until `release`.
            items: All items of its prompt.
            compute_spans: Token ranges that will be computed. Items outside of them are not needed.

        Returns:
            Items to encode and then to `put`, one for each content.

        Raises:
            ValueError: Two items with one content differ in length, or an item differs from the cached output. No
                output is held then.

        Examples:
            >>> clip = pc.EncoderItem("clip", start=20, length=5)
            >>> [item.content_hash for item in cache.missing("third", [image, clip], compute_spans=[(0, 30)])]
            ['clip']
        """
        needed = [(_identity(item.content_hash), item) for item in items if item.overlaps(compute_spans)]
        lacking: dict[Hashable, EncoderItem] = {}
        for content, item in needed:
            if content in self._entries:
                _check_length(item, self._entries[content].output)
            elif lacking.setdefault(content, item).length != item.length:
                got = f"lengths {lacking[content].length} and {item.length}"
                raise ValueError(f"{item.content_hash!r}: got {got}, needs one length for one content")
        for content, _ in needed:
            if content in lacking:
                self.misses += 1
            else:
                self.hits += 1
                self._access(request_id, self._entries[content])
        return list(lacking.values())

    def _access(self, request_id: Hashable, entry: EncoderEntry) -> None:
        self._tick += 1
        entry.last_access = self._tick
        entry.access_count += 1
        entry.holders.add(request_id)

    def put(self, request_id: Hashable, item: EncoderItem, output: torch.Tensor) -> None:
        """Cache an output and hold it. If an output is already cached for the content, hold that instead.

        Args:
            request_id: The request that holds it until `release`.
            item: The item whose output this is.
            output: `[length, *features]`. Do not change it afterwards.

        Raises:
            ValueError: The output does not have a row for each token of the item.
            MemoryError: It does not fit beside the outputs that requests hold. Nothing has changed.

        Examples:
            >>> cache.put("third", pc.EncoderItem("clip", start=20, length=5), torch.ones(5, 8))
            >>> "clip" in cache, cache.nbytes
            (True, 256)
        """
        _check_length(item, output)
        content = _identity(item.content_hash)
        if content in self._entries:
            self._access(request_id, self._entries[content])
            return
        output = output.detach()
        size = output.numel() * output.dtype.itemsize
        victims = self._victims(item, size)
        if self.device is not None:
            output = output.to(self.device)
        if output.untyped_storage().nbytes() != size:
            output = output.clone(memory_format=torch.contiguous_format)  # a view would keep a whole batch alive
        for victim in victims:
            self.nbytes -= self._entries.pop(victim).nbytes
        self.evictions += len(victims)
        self._tick += 1
        self._entries[content] = EncoderEntry(output, size, self._tick, self._tick, holders={request_id})
        self.nbytes += size

    def _victims(self, item: EncoderItem, size: int) -> list[Hashable]:
        """Return the contents to evict so that an output of `size` bytes fits. Change nothing."""
        excess = self.nbytes + size - self.max_bytes
        if excess <= 0:
            return []
        idle = {content: entry for content, entry in self._entries.items() if not entry.holders}
        idle_bytes = sum([entry.nbytes for entry in idle.values()])
        if idle_bytes < excess:
            held_by = f"{self.nbytes - idle_bytes} of {self.max_bytes} bytes are held by requests"
            raise MemoryError(f"{item.content_hash!r}: needs {size} bytes, {held_by}")
        order = sorted(idle, key=lambda content: self._key(idle[content]))
        evicted_bytes = [*accumulate([idle[content].nbytes for content in order])]
        return order[: 1 + bisect_left(evicted_bytes, excess)]

    def output(self, item: EncoderItem) -> torch.Tensor:
        """Return the whole output of an item, `[length, *features]`. Do not change it.

        Raises:
            KeyError: It is not cached.

        Examples:
            >>> cache.output(image).shape
            torch.Size([3, 8])
        """
        try:
            return self._entries[_identity(item.content_hash)].output
        except KeyError:
            raise KeyError(f"item: got {item.content_hash!r}, needs a cached one") from None

    def place(
        self, embeddings: torch.Tensor, positions: npt.NDArray[np.integer[Any]], items: Iterable[EncoderItem]
    ) -> None:
        """Copy the cached rows of items to the embeddings of their tokens.

        Args:
            embeddings: `[num_tokens, *features]`, modified in place.
            positions: `[num_tokens]`, position of each token in its prompt.
            items: Items of that prompt. Only those that overlap the positions must be cached.

        Raises:
            KeyError: An output is not cached. Nothing has been written.
            ValueError: An output differs in length from its item, or its rows differ in shape from embeddings. Nothing
                has been written.

        Examples:
            >>> embeddings = torch.zeros(4, 8)
            >>> cache.place(embeddings, np.arange(5, 9), [image])  # the next token to compute is inside the image
            >>> embeddings[:, 0]
            tensor([1., 1., 0., 0.])
        """
        positions = np.asarray(positions)
        work = []
        for item in items:
            tokens = np.flatnonzero((positions >= item.start) & (positions < item.end))
            if tokens.size:
                output = self.output(item)
                _check_length(item, output)
                if output.shape[1:] != embeddings.shape[1:]:
                    got, needs = list(output.shape[1:]), list(embeddings.shape[1:])
                    raise ValueError(f"{item.content_hash!r}: got rows {got}, needs {needs} as embeddings have")
                work.append((tokens, positions[tokens] - item.start, output))
        for tokens, rows, output in work:
            index = torch.from_numpy(rows.astype(np.int64)).to(output.device)
            where = torch.from_numpy(tokens).to(embeddings.device)
            embeddings[where] = output[index].to(embeddings.device, embeddings.dtype)

    def release(self, request_id: Hashable) -> None:
        """Release all outputs that a request holds, if it holds any.

        Examples:
            >>> cache, image = pc.EncoderCache(max_bytes=12), pc.EncoderItem("image", start=4, length=3)
            >>> cache.put("request", image, torch.ones(3, 1))
            >>> cache.release("request")
            >>> cache.put("request", pc.EncoderItem("another", start=4, length=3), torch.ones(3, 1))
            >>> "image" in cache
            False
        """
        for entry in self._entries.values():
            entry.holders.discard(request_id)

    def check(self) -> None:
        """Assert that the number of bytes is right and within the budget.

        Examples:
            >>> cache.check()
        """
        assert self.nbytes == sum(entry.nbytes for entry in self._entries.values()) <= self.max_bytes


def _check_length(item: EncoderItem, output: torch.Tensor) -> None:
    """Raise ValueError unless an output has a row for each token of its item."""
    if output.dim() < 1 or output.shape[0] != item.length:
        got = f"an output of shape {list(output.shape)}"
        raise ValueError(f"{item.content_hash!r}: got {got}, needs {item.length} rows")


def _identity(content_hash: Hashable) -> Hashable:
    """Return a key that separates contents: 1, True and 1.0 are equal but must not count as one hash."""
    if isinstance(content_hash, tuple):
        return tuple, tuple(_identity(part) for part in content_hash)
    return type(content_hash), content_hash
