"""Images of a call, cut into what the vision tower encodes one by one, and what it gave, kept by their content."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ...cache import EncoderCache, EncoderItem
from .api import encode, repeat_encoded, takes_encoded_images
from .calls import UnsupportedError, refuse_if

PIXELS = ("pixel_values", "pixel_values_images", "image_patches")  # names of a vision tower's main input
OTHERS = {
    "pixel_values_videos": "videos",
    "input_features": "sounds",
    "input_values": "sounds",
    "mm_encoder_outputs": "outputs of an encoder",
}
"""What a prompt may hold besides tokens and images, by the name of its argument."""
LENGTHS = 1 << 16  # images whose number of tokens is remembered


@dataclass(frozen=True)
class Unit:
    """What the tower encodes by itself: an image or a tile, or all of a call where they cannot be told apart."""

    digest: bytes  # of its bytes and every option of the tower
    inputs: dict[str, Any] = field(compare=False)  # arguments of the tower for it alone


@dataclass(frozen=True)
class Images:
    """The images of a call."""

    units: list[Unit]  # in the order in which the tokens of the batch stand for them
    token: int  # the id of these tokens
    given: dict[str, Any]  # arguments of the tower as the caller gave them


def take_images(model: Any, arguments: dict[str, Any]) -> Images | None:
    """Takes pixels out of generate's arguments; UnsupportedError: other content than tokens that cannot be compared."""
    # What else the tower is given stays: positions follow from it.
    for name, what in OTHERS.items():
        refuse_if(arguments.get(name) is not None, f"{what} beside tokens", name)
    main = next((name for name in PIXELS if arguments.get(name) is not None), None)
    if main is None:
        return None
    encoder = getattr(model.base_model, "get_image_features", None)
    token = getattr(model.config, "image_token_id", None)
    if not takes_encoded_images(model) or encoder is None:
        raise UnsupportedError("its forward pass takes no images that were encoded before")
    if type(token) is not int or model.main_input_name != "input_ids":
        raise UnsupportedError("no token of its prompts stands for images")
    refuse_if(arguments.get("assistant_model") is not None, "images with an assistant model")
    refuse_if(arguments.get("position_ids") is not None, "position_ids of your own beside images")
    names = [name for name in inspect.signature(encoder).parameters if name != "kwargs"]
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    refuse_if(main not in given, "its forward pass takes no images that were encoded before")
    units = [Unit(_digest(inputs), inputs) for inputs in _apart(given, main)]
    del arguments[main]
    return Images(units, token, given)


def encoded_by_model(images: Images, model: Any, input_ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """What generate would give to its loop for the images, rows of the batch repeated for beams and several answers."""
    outputs = encode(model, images.given)
    return repeat_encoded(model, input_ids[::repeats], outputs, repeats) if repeats > 1 else outputs


def _apart(given: dict[str, Any], main: str) -> Iterator[dict[str, Any]]:
    """The tower's arguments for each image: by the patches of a grid, or by a first dimension that all share."""
    pixels = given[main]
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if not isinstance(pixels, torch.Tensor) or not pixels.numel() or any(not t.dim() for t in tensors.values()):
        yield given
        return
    grid = next((t for name, t in tensors.items() if "grid" in name and t.dim() == 2), None)
    if grid is not None and int(grid.prod(-1).sum()) == len(pixels):
        patches = grid.prod(-1).tolist()
    else:
        patches = [1] * len(pixels)
    if any(len(t) != len(patches) for name, t in tensors.items() if name != main):
        yield given
        return
    end = 0
    for number, count in enumerate(patches):
        start, end = end, end + count
        own = {n: t[start:end] if n == main else t[number : number + 1] for n, t in tensors.items()}
        yield given | own


def _digest(inputs: dict[str, Any]) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif _is_literal(value):
            digest.update(f"{name} {value!r}".encode())
        else:
            raise UnsupportedError(f"{name} of a type whose content cannot be compared", type(value).__name__)
    return digest.digest()


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True)
class Segment:
    """Rows `offset` to `offset + length` of a unit's output, that one row of a batch has tokens for."""

    unit: Unit
    offset: int
    length: int

    @property
    def key(self) -> tuple[bytes, int, int]:
        """Stands for its content."""
        return self.unit.digest, self.offset, self.length


@dataclass(frozen=True)
class ImageSplit:
    """How a prompt goes on from a cached prefix that ends within an image."""

    computes: bool = False  # whether its parts may be computed one by one: not where tokens attend in both directions
    reads: bool = False  # whether the rest of an image may be computed behind blocks of one that was computed whole


@dataclass(frozen=True)
class _Form:
    """How a model wants its tower's output."""

    kind: type
    widths: tuple[int, ...]  # of its parts
    lists: tuple[bool, ...]  # which of them are lists


class VisionOutputs:
    """The outputs of one model's vision tower, of `max_bytes` at most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cache = EncoderCache(max_bytes)
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._form: _Form | None = None
        self._apart: bool | None = None
        self._lock = threading.Lock()
        self.split: ImageSplit | None = None  # None before the first prompt with images was looked at

    def length(self, unit: Unit) -> int | None:
        """Tokens that stand for a unit; None for one that was never encoded."""
        return self._lengths.get(unit.digest)

    def get(self, segments: list[Segment]) -> list[torch.Tensor | None]:
        """The rows of segments that are kept, `[length, width]` each."""
        items = [EncoderItem(s.key, 0, s.length) for s in segments]
        with self._whole() as cache:
            cache.missing("call", items, [(0, 1)])
            found = [cache.output(i) if i.content_hash in cache else None for i in items]
            cache.release("call")
        return found

    def put(self, rows: dict[Segment, torch.Tensor]) -> None:
        """Keeps the rows of segments, as far as there is room."""
        with self._whole() as cache:
            for segment, output in rows.items():
                with suppress(MemoryError):
                    cache.put("call", EncoderItem(segment.key, 0, segment.length), output)
                cache.release("call")

    @contextmanager
    def _whole(self) -> Iterator[EncoderCache]:
        """The cache under its lock; an interrupt, which may leave it half changed, empties it."""
        with self._lock:
            try:
                yield self._cache
            except BaseException:
                self._cache = EncoderCache(self._max_bytes)
                raise

    def encode(self, model: Any, units: list[Unit]) -> dict[bytes, torch.Tensor]:
        """Runs the tower over units; by digest all rows of its output, `[length, width]`."""
        # UnsupportedError: its output is not rows for tokens, or differs with the images beside one.
        units = list({unit.digest: unit for unit in units}.values())
        parts = self._run(model, units)
        if parts is None:
            parts = [part for unit in units for part in self._run(model, [unit]) or ()]
        elif len(units) > 1 and self._apart is None:
            alone = self._run(model, units[:1])
            self._apart = alone is not None and alike(parts[0], alone[0])
        if (len(units) > 1 and self._apart is False) or len(parts) != len(units):
            raise UnsupportedError("what its vision tower gives for an image depends on others beside it")
        for unit, rows in zip(units, parts, strict=True):
            self._lengths[unit.digest] = len(rows)
        while len(self._lengths) > LENGTHS:
            self._lengths.popitem(last=False)
        return {unit.digest: rows for unit, rows in zip(units, parts, strict=True)}

    def _run(self, model: Any, units: list[Unit]) -> list[torch.Tensor] | None:
        """The output of each of several units; None where it cannot be told whose a row is."""
        inputs = dict(units[0].inputs)
        if len(units) > 1:
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor):
                    if any(u.inputs[name].shape[1:] != value.shape[1:] for u in units):
                        return None
                    inputs[name] = torch.cat([u.inputs[name] for u in units])
        output = encode(model, inputs)["image"]
        pooled: Any = getattr(output, "pooler_output", None)
        deep = getattr(output, "deepstack_features", None) or ()
        parts = [pooled, *deep]
        refuse_if(not all(_are_features(part) for part in parts), "what its vision tower gives is not rows for tokens")
        if len(units) > 1 and any(len(part) != len(units) for part in parts):
            return None
        widths = tuple(int(part[0].shape[-1]) for part in parts)
        self._form = _Form(type(output), widths, tuple(not isinstance(part, torch.Tensor) for part in parts))
        groups = [[image] for image in range(len(units))] if len(units) > 1 else [list(range(len(pooled)))]
        flat = [[torch.cat([part[i].flatten(0, -2) for i in group]) for part in parts] for group in groups]
        if any(len({len(rows) for rows in each}) != 1 for each in flat):
            raise UnsupportedError("what its vision tower gives is not rows for tokens")
        return [torch.cat(each, -1) for each in flat]

    def together(self, rows: list[torch.Tensor]) -> dict[str, Any]:
        """Rows of segments in order, as a forward pass takes them: `mm_encoder_outputs`."""
        if not rows or self._form is None:
            return {}
        parts = torch.cat(rows).split(self._form.widths, -1)
        packed = [[part] if in_list else part[None] for part, in_list in zip(parts, self._form.lists, strict=True)]
        deep = {"deepstack_features": packed[1:]} if len(packed) > 1 else {}
        return {"image": self._form.kind(pooler_output=packed[0], **deep)}


def _are_features(part: Any) -> bool:
    images = list(part) if isinstance(part, torch.Tensor | list | tuple) else []
    return bool(images) and all(isinstance(image, torch.Tensor) and image.dim() >= 2 for image in images)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ by no more than rounding explains; NaN differs from everything."""
    tolerance = 1e-3 if a.dtype in (torch.float32, torch.float64) else 5e-2
    a, b = a.float(), b.float()
    return a.shape == b.shape and (not a.numel() or bool((a - b).abs().max() <= a.abs().max() * tolerance))
