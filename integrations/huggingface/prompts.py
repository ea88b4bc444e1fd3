"""The prompts of a batch: their rows and images, and the tokens that are read from the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ...cache import KeyAt
from ...cache.allocation import AnyAllocation
from ...cache.runs import Span
from .api import repeats_images_by_row
from .calls import RequestReport, UnsupportedError, refuse_if
from .images import Images, ImageSplit, RowsKey, VisionOutputs
from .layers import States
from .loop import Loop, expected_positions
from .store.blocks import RequestBlocks
from .support import host_copy

_numbers = itertools.count()


def numbered() -> str:
    """Return a new request id, `generate-<number>`, that no other request of this process has."""
    return f"generate-{next(_numbers)}"


TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


@dataclass(frozen=True)
class Item:
    """An image in a row of the batch. Its feature rows are a part of a vision tower's output."""

    rows: RowsKey  # the key of its feature rows, one for each placeholder token
    columns: np.ndarray = field(compare=False)  # columns of its placeholder tokens, ascending
    seen: bytes  # positions and types of its tokens, on which its KV depends too

    @property
    def first(self) -> int:
        """The column of its first placeholder token."""
        return int(self.columns[0])

    @property
    def end(self) -> int:
        """The column after its last placeholder token."""
        return int(self.columns[-1]) + 1

    @property
    def content(self) -> tuple[Any, ...]:
        """Everything that its KV depends on, for keys of blocks."""
        return (*self.rows, self.seen)

    def key(self, pad: int) -> KeyAt:
        """Return the image's extra key in a prompt that begins after `pad` columns."""
        return KeyAt(self.first - pad, self.content)


class RowImages:
    """The images of one call. `items` has a list for each row, and `names` are the positions and types of the call.

    Each row of the caller appears `repeats` times in the loop's `input_ids [batch, length]`.

    Raises:
        UnsupportedError: Tokens and images do not match, or `attention_mask` leaves out tokens of images. Or token
            types outside images, or positions before the first image, are not those of text.
    """

    def __init__(self, loop: Loop, images: Images, outputs: VisionOutputs) -> None:
        kwargs, repeats = loop.model_kwargs, loop.repeats
        self._model, self._outputs, self._units = loop.model, outputs, images.inputs
        self._unchanged = loop.unchanged
        self._inputs = {n: kwargs[n] for n in ("position_ids", *TYPES) if kwargs.get(n) is not None}
        self.names = tuple(self._inputs)
        known: dict[bytes, Any] = {unit: outputs.length(unit) for unit in images.inputs}
        unknown = {unit: inputs for unit, inputs in images.inputs.items() if known[unit] is None}
        self._fresh = outputs.encode(loop.model, unknown) if unknown else {}
        known |= {unit: len(rows) for unit, rows in self._fresh.items()}
        placeholders, lengths = loop.input_ids[::repeats] == images.token, [known[unit] for unit in images.units]
        rows = self._segments(images.units, lengths, placeholders, kwargs.get("attention_mask"), repeats)
        reordered = repeats > 1 and max(map(len, rows)) > 1 and not repeats_images_by_row(loop.model, images.token)
        refuse_if(reordered, "it repeats several images of a prompt in another order")
        self.items = [row for row in rows for _ in range(repeats)]
        self._check(loop.input_ids, kwargs.get("attention_mask"))

    def _segments(
        self, units: list[bytes], lengths: list[int], placeholders: torch.Tensor, mask: Any, repeats: int
    ) -> list[list[Item]]:
        """Return the images of each of the caller's rows. `placeholders` marks the image tokens in these rows."""
        refuse_if(
            sum(lengths) != int(placeholders.sum()),
            "the number of image tokens differs from the number of image features",
        )
        left_out = mask is not None and (placeholders & (mask[::repeats] == 0)).any()
        refuse_if(left_out, "attention_mask leaves out tokens of an image")
        rows: list[list[Item]] = []
        number = taken = 0
        for row, line in enumerate(placeholders.cpu().numpy()):
            columns, items = np.flatnonzero(line), []
            while columns.size:
                count = min(columns.size, lengths[number] - taken)
                if count:
                    own = columns[:count]
                    seen = self._seen(row * repeats, int(own[0]), int(own[-1]) + 1)
                    items.append(Item((units[number], taken, count), own, seen))
                taken, columns = taken + count, columns[count:]
                if taken == lengths[number]:
                    number, taken = number + 1, 0
            rows.append(items)
        return rows

    def _seen(self, row: int, first: int, end: int) -> bytes:
        """Return the positions and types of some columns of a row as bytes."""
        parts = [host_copy(value[..., row, first:end]) for value in self._inputs.values()]
        return b"".join(np.ascontiguousarray(part).astype(np.int64).tobytes() for part in parts)

    def _check(self, input_ids: torch.Tensor, mask: Any) -> None:
        """Check that token types outside images, and positions before the first image, are those of text.

        Blocks outside of images may be shared with prompts that have no images.
        """
        inside = torch.zeros(input_ids.shape, dtype=torch.bool)
        before = torch.ones(input_ids.shape, dtype=torch.bool)
        for row, items in enumerate(self.items):
            for item in items:
                inside[row, item.first : item.end] = True
                before[row, item.first :] = False
        for name in TYPES:
            if name in self._inputs and bool(self._inputs[name].cpu()[~inside].any()):
                raise UnsupportedError("token types could change a token's KV")
        if "position_ids" in self._inputs:
            expected = expected_positions(input_ids, mask).cpu()
            if bool(((self._inputs["position_ids"].cpu() != expected) & before).any()):
                raise UnsupportedError("position_ids differ from those that transformers derives from attention_mask")

    @property
    def split(self) -> ImageSplit:
        """Whether a prompt may be cut inside an image, for computing it and for reading cached tokens."""
        return self._outputs.splits.get(self.names, "never")

    def inputs(self, row: int, start: int, end: int) -> dict[str, torch.Tensor]:
        """Return the positions and types of some columns of one row, as a batch of one row."""
        return {name: value[..., row : row + 1, start:end] for name, value in self._inputs.items()}

    def features(self, items: list[Item], start: int, end: int) -> dict[str, Any]:
        """Return the image inputs of a forward pass over some columns. Images that are not kept are encoded first."""
        items = [item for item in items if item.first < end and start < item.end]
        kept = self._outputs.get([item.rows for item in items])
        lacking = [key for key, rows in kept.items() if rows is None]
        units = {unit: self._units[unit] for unit, _, _ in lacking if unit not in self._fresh}
        if units:
            self._fresh |= self._outputs.encode(self._model, units)
        found = {(unit, first, count): self._fresh[unit][first : first + count] for unit, first, count in lacking}
        if self._unchanged():
            self._outputs.put(found)
        rows = []
        for item in items:
            whole: Any = found.get(item.rows, kept[item.rows])
            rows.append(whole[slice(*np.searchsorted(item.columns, (start, end)))])
        return self._outputs.together(rows)


def runs(items: list[Item]) -> list[list[Item]]:
    """Return the images in groups. No token lies between the images of a group; in some models they see each other."""
    found: list[list[Item]] = []
    for item in items:
        if found and found[-1][-1].end == item.first:
            found[-1].append(item)
        else:
            found.append([item])
    return found


def clear_of(items: list[Item], column: int) -> int:
    """Return `column`; if a cut there would split a group of images, return the first column of the group instead."""
    for run in runs(items):
        if run[0].first < column < run[-1].end:
            return run[0].first
    return column


class PromptHit(NamedTuple):
    """The tokens of a prompt that are read from the cache instead of computed."""

    cached: int = 0  # number of leading tokens
    later: Sequence[Span] = ()  # spans after the first missing block
    moved: Sequence[Span] = ()  # spans that were cached at other positions and moved here
    repaired: np.ndarray = np.empty(0, np.int64)  # tokens in `moved` that are computed again
    states: States | None = None  # the checkpoint at the end of the cached tokens
    kv_hit: int = 0  # leading tokens with cached KV; more than `cached` if states are missing

    @property
    def tokens(self) -> int:
        """The number of tokens that are read."""
        return self.cached + sum(end - start for start, end in (*self.later, *self.moved)) - len(self.repaired)

    def report(self, prompt_tokens: int) -> RequestReport:
        """Return the report that users see."""
        return RequestReport.of(prompt_tokens, [(0, self.cached), *self.later], self.moved, len(self.repaired))


@dataclass
class Prompt:
    """One prompt of a call, which may have several equal rows."""

    request_id: str
    tokens: np.ndarray  # from the first unmasked token to the next masked one, `[n]` int64
    pad: int  # number of columns before the tokens
    rows: list[int]  # its rows in the batch
    last: bool = True  # whether all columns after the tokens are masked
    items: list[Item] = field(default_factory=list)  # its images
    images: RowImages | None = None  # all images of the call; None if this prompt has none
    adapter: str | None = None  # PEFT adapter of its rows, if the caller named one
    allocation: AnyAllocation | None = None  # from the manager; None if the prompt has no tokens
    blocks: RequestBlocks = field(init=False)  # the blocks of its request
    branches: dict[int, RequestBlocks] = field(default_factory=dict)  # by row: forks for different answers
    hit: PromptHit = field(default_factory=PromptHit)
    from_tiers: int = 0  # tokens of the hit that were copied from lower tiers
    hidden: Sequence[torch.Tensor] = ()  # by layer: cached hidden states of the first tokens, if the caller wants any
    owner: Any = None  # in continuous batching, its `PromptRequests`, which forks share

    @property
    def waits(self) -> bool:
        """Whether another request is already computing this prompt's next block."""
        return self.allocation is not None and self.allocation.wait_for is not None

    @property
    def approximate(self) -> bool:
        """Whether some of the blocks that it reads are approximate."""
        return self.allocation is not None and self.allocation.approximate_from is not None

    def readable(self, length: int) -> int:
        """Return the largest prefix length, up to `length`, whose continuation can be computed."""
        within = self.images is None or self.images.split != "never"
        return length if within else clear_of(self.items, length + self.pad) - self.pad

    def computable(self, length: int) -> bool:
        """Return whether the first `length` tokens may be computed before the rest."""
        within = self.images is None or self.images.split == "computed"
        return within or clear_of(self.items, length + self.pad) == length + self.pad

    def inputs(self, start: int, end: int) -> dict[str, Any] | None:
        """Return the inputs of a forward pass over tokens `start` to `end`, besides the tokens; None without images.

        Positions and types begin at the first token, images at `start`.
        """
        if self.images is None:
            return None
        features = {"mm_encoder_outputs": self.images.features(self.items, self.pad + start, self.pad + end)}
        return self.images.inputs(self.rows[0], self.pad, self.pad + end) | features

    def image_keys(self) -> list[KeyAt]:
        """Return the extra keys that images add to a prompt's blocks.

        If tokens attend in both directions within images, an image's key contains all images of its group (`runs`).
        """
        if self.images is None or self.images.split == "computed":
            return [item.key(self.pad) for item in self.items]
        return [
            KeyAt(item.first - self.pad, tuple(other.content for other in run))
            for run in runs(self.items)
            for item in run
        ]

    def agrees(self, other: Prompt) -> int:
        """Return the length of the common prefix of two prompts. Placeholders of different images differ."""
        both = min(len(self.tokens), len(other.tokens))
        for a, b in zip(runs(self.items), runs(other.items), strict=False):
            if a != b:
                both = min(both, a[0].first - self.pad, b[0].first - other.pad)
                break
        differ = np.flatnonzero(self.tokens[:both] != other.tokens[:both])
        return int(differ[0]) if differ.size else both


def prompts_of(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    images: RowImages | None = None,
    adapters: list[str] | None = None,
) -> list[Prompt]:
    """Return the distinct prompts of a batch, in the order of their first rows."""
    ids = host_copy(input_ids)
    if mask is None and len(ids) == 1 and images is None and adapters is None:
        return [Prompt(numbered(), np.ascontiguousarray(ids[0]), 0, [0])]
    kept = np.ones(ids.shape, bool) if mask is None else host_copy(mask).astype(bool)
    found: dict[tuple[Any, ...], Prompt] = {}
    for row, (line, keep) in enumerate(zip(ids, kept, strict=True)):
        first = int(keep.argmax()) if keep.any() else len(line)
        gaps = np.flatnonzero(~keep[first:])
        end = first + int(gaps[0]) if gaps.size else len(line)
        items = [] if images is None else images.items[row]
        refuse_if(items and items[-1].end > end, "attention_mask leaves out tokens before an image")
        adapter = None if adapters is None else adapters[row]
        key = (first, line[first:].tobytes(), keep.tobytes(), adapter, *(item.key(first) for item in items))
        if key in found:
            found[key].rows.append(row)
        else:
            tokens = np.ascontiguousarray(line[first:end])
            found[key] = Prompt(numbered(), tokens, first, [row], last=not keep[end:].any())
            found[key].adapter = adapter
            if items:
                found[key].items, found[key].images = items, images
    return list(found.values())
