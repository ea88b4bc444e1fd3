"""Images of a call, split into the inputs of the vision tower, and a cache of the tower's outputs by content."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

import torch

from .api import encode, repeat_encoded, takes_encoded_images
from .calls import UnsupportedError, refuse_if
from .support import evict, tensor_bytes

PIXELS = ("pixel_values", "pixel_values_images", "image_patches")  # names of a vision tower's main input
OTHERS = {
    "pixel_values_videos": "videos",
    "input_features": "sounds",
    "input_values": "sounds",
    "mm_encoder_outputs": "outputs of an encoder",
}
"""Other content that a prompt may hold, by the name of its argument. Such calls are not served."""
LENGTHS = 1 << 16  # number of images whose token count is remembered


@dataclass(frozen=True)
class Images:
    """The images of a call.

    A unit is one input of the vision tower: an image or a tile, or all images of a call if they cannot be separated.
    Its digest is a hash of its bytes, of all options of the tower and of the active adapters.
    """

    units: list[bytes]  # digests, in the order of their tokens in the batch
    inputs: dict[bytes, dict[str, Any]]  # by digest: arguments of the tower for this unit alone
    token: int  # id of the placeholder token of images
    given: dict[str, Any]  # arguments of the tower as the caller passed them

    def under(self, adapters: tuple[str, ...]) -> Images:
        """Return the images with other digests for each state of PEFT's adapters, which may be in the tower too."""
        own = {unit: hashlib.sha256(unit + repr(adapters).encode()).digest() for unit in self.inputs}
        inputs = {own[unit]: inputs for unit, inputs in self.inputs.items()}
        return replace(self, units=[own[unit] for unit in self.units], inputs=inputs)


def take_images(model: Any, arguments: dict[str, Any]) -> Images | None:
    """Remove the images from generate's arguments and return them; None if the call has no images.

    Raises:
        UnsupportedError: The prompt has other content than tokens and images, or images that cannot be compared.
    """
    # Other arguments about images stay, because the model computes positions from them.
    for name, what in OTHERS.items():
        refuse_if(arguments.get(name) is not None, f"{what} beside tokens", name)
    main = next((name for name in PIXELS if arguments.get(name) is not None), None)
    if main is None:
        return None
    encoder = getattr(model.base_model, "get_image_features", None)
    token = getattr(model.config, "image_token_id", None)
    if not takes_encoded_images(model) or encoder is None:
        raise UnsupportedError("its forward pass does not accept encoded images")
    if type(token) is not int or model.main_input_name != "input_ids":
        raise UnsupportedError("its config names no placeholder token for images")
    refuse_if(arguments.get("assistant_model") is not None, "images with an assistant model")
    for name in ("position_ids", "inputs_embeds"):
        refuse_if(arguments.get(name) is not None, f"{name} of your own with images")
    names = [name for name in inspect.signature(encoder).parameters if name != "kwargs"]
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    refuse_if(main not in given, "its forward pass does not accept encoded images")
    units = [(_digest(inputs), inputs) for inputs in _apart(given, main)]
    del arguments[main]
    return Images([digest for digest, _ in units], dict(units), token, given)


def encoded_by_model(images: Images, model: Any, input_ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Return the encoder outputs that generate would pass to its loop, with repeated rows for beams and samples."""
    outputs = encode(model, images.given)
    return repeat_encoded(model, input_ids[::repeats], outputs, repeats) if repeats > 1 else outputs


def _apart(given: dict[str, Any], main: str) -> Iterator[dict[str, Any]]:
    """Yield the tower's arguments for each image, split by the patches of a grid or by a common first dimension."""
    pixels = given[main]
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    if not isinstance(pixels, torch.Tensor) or not pixels.numel() or any(not t.dim() for t in tensors.values()):
        yield given
        return
    padded = not bool(pixels.flatten(1).any(1).all())  # the tower may leave out zeros
    grid = next((t for name, t in tensors.items() if "grid" in name and t.dim() == 2), None)
    if grid is not None and int(grid.prod(-1).sum()) == len(pixels):
        patches = grid.prod(-1).tolist()
    else:
        patches = [1] * len(pixels)
    others = [value for name, value in given.items() if name != main]
    if (
        padded
        or any(map(_counts, others))
        or any(len(t) != len(patches) for name, t in tensors.items() if name != main)
    ):
        yield given
        return
    end = 0
    for number, count in enumerate(patches):
        start, end = end, end + count
        own = {n: t[start:end] if n == main else t[number : number + 1] for n, t in tensors.items()}
        yield given | own


def _counts(value: Any) -> bool:
    """Return whether an argument of the tower may say how many tiles each image has, if the numbers are not all 1."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and bool((value != 1).any())
    return isinstance(value, list | tuple)


def _digest(inputs: dict[str, Any]) -> bytes:
    """Return a hash of the tower's arguments for one unit. Raise UnsupportedError if one cannot be hashed."""
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(tensor_bytes(value))
        elif _is_literal(value):
            digest.update(f"{name} {value!r}".encode())
        else:
            raise UnsupportedError(f"{name} of a type whose content cannot be compared", type(value).__name__)
    return digest.digest()


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    return value is None or isinstance(value, bool | int | float | str)


RowsKey = tuple[bytes, int, int]
"""A range of rows of a unit's output: the unit's digest, the first row, and their number.

The tokens of these rows are in one prompt of the batch.
"""


ImageSplit = Literal["never", "read", "computed"]
"""The ways in which a prompt may be cut inside an image.

- "never": in no way.
- "read": the first tokens of an image may be read from the cache, and the rest computed, after one pass computed all.
- "computed": an image may also be computed in two passes. Its tokens must not attend in both directions.
"""


class VisionOutputs:
    """A cache of at most `max_bytes` for the outputs of one model's vision tower. The least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[RowsKey, torch.Tensor] = OrderedDict()  # least recently used first
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._joined: Callable[[torch.Tensor], Any] | None = None  # returns rows in the form of the tower's output
        self._apart: bool | None = None
        self._lock = threading.Lock()
        # By the positions and types that a call has, which may decide how tokens of an image attend.
        self.splits: dict[tuple[str, ...], ImageSplit] = {}

    def length(self, unit: bytes) -> int | None:
        """Return the number of tokens of the unit with this digest; None if it was never encoded."""
        return self._lengths.get(unit)

    def get(self, keys: list[RowsKey]) -> dict[RowsKey, torch.Tensor | None]:
        """Return the cached rows of each key, `[length, width]`, or None."""
        with self._lock:
            for key in keys:
                if key in self._rows:
                    self._rows.move_to_end(key)
            return {key: self._rows.get(key) for key in keys}

    def put(self, rows: dict[RowsKey, torch.Tensor]) -> None:
        """Cache rows by key. An entry that is larger than the whole budget is not cached."""
        with self._lock:
            for key, output in rows.items():
                if key in self._rows or output.nbytes > self._max_bytes:
                    continue
                if output.untyped_storage().nbytes() != output.nbytes:
                    output = output.clone()  # a view would keep a whole batch alive
                self._rows[key] = output.detach()
            evict(self._rows, self._max_bytes)

    def encode(self, model: Any, inputs: dict[bytes, dict[str, Any]]) -> dict[bytes, torch.Tensor]:
        """Run the tower over units, whose inputs are given by digest; return the output `[length, width]` of each.

        Raises:
            UnsupportedError: The output does not have one row for each token, or depends on the other images.
        """
        units = list(inputs.values())
        parts = self._run(model, units)
        if parts is None:
            parts = [part for unit in units for part in self._run(model, [unit]) or ()]
        elif len(units) > 1 and self._apart is None:
            alone = self._run(model, units[:1])
            self._apart = alone is not None and alike(parts[0], alone[0])
        depends = (len(units) > 1 and self._apart is False) or len(parts) != len(units)
        refuse_if(depends, "the output of its vision tower for an image depends on other images")
        found = dict(zip(inputs, parts, strict=True))
        self._lengths.update((digest, len(rows)) for digest, rows in found.items())
        evict(self._lengths, LENGTHS, lambda _: 1)
        return found

    def _run(self, model: Any, units: list[dict[str, Any]]) -> list[torch.Tensor] | None:
        """Return each unit's output from its inputs; None if the rows of several units cannot be told apart."""
        inputs = dict(units[0])
        if len(units) > 1:
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor):
                    if any(unit[name].shape[1:] != value.shape[1:] for unit in units):
                        return None
                    inputs[name] = torch.cat([unit[name] for unit in units])
        output = encode(model, inputs)["image"]
        deep: Any = getattr(output, "deepstack_features", None)
        # Granite 4 names the layer of each of its deep features, and has no others.
        layers = [part[0] for part in deep or () if isinstance(part[0], int)]
        parts = [part[1] for part in deep] if layers else [getattr(output, "pooler_output", None), *(deep or ())]
        refuse_if(
            not all(_are_features(part) for part in parts),
            "the output of its vision tower does not have one row for each token",
        )
        if len(units) > 1 and any(len(part) != len(units) for part in parts):
            return None
        widths = tuple(int(part[0].shape[-1]) for part in parts)
        in_lists = [not isinstance(part, torch.Tensor) for part in parts]
        self._joined = _joining(type(output), widths, in_lists, deep is not None, layers)
        groups = [[image] for image in range(len(units))] if len(units) > 1 else [list(range(len(parts[0])))]
        flat = [[torch.cat([part[i].flatten(0, -2) for i in group]) for part in parts] for group in groups]
        if any(len({len(rows) for rows in each}) != 1 for each in flat):
            raise UnsupportedError("the output of its vision tower does not have one row for each token")
        return [torch.cat(each, -1) for each in flat]

    def together(self, rows: list[torch.Tensor]) -> dict[str, Any]:
        """Return rows in the form of a forward pass's argument `mm_encoder_outputs`."""
        return {} if not rows or self._joined is None else {"image": self._joined(torch.cat(rows))}


def _joining(
    output_type: Any, widths: Sequence[int], in_lists: Sequence[bool], has_deep: bool, layers: Sequence[int]
) -> Callable[[torch.Tensor], Any]:
    """Return a function that returns rows as an output of a vision tower, whose parts have these widths.

    With `has_deep`, the output has a list of deep features, which may be empty. With `layers`, all parts are deep
    features, each with the number of its layer.
    """
    # timm's output must have a `last_hidden_state`, which no forward pass reads.
    required = {field.name: None for field in fields(output_type) if field.default is MISSING}

    def joined(rows: torch.Tensor) -> Any:
        parts = zip(rows.split(list(widths), -1), in_lists, strict=True)
        packed = [[part] if in_list else part[None] for part, in_list in parts]
        if layers:
            return output_type(**required, deepstack_features=list(zip(layers, packed, strict=True)))
        deep = {"deepstack_features": packed[1:]} if has_deep else {}
        return output_type(**required, pooler_output=packed[0], **deep)

    return joined


def _are_features(part: Any) -> bool:
    images = list(part) if isinstance(part, torch.Tensor | list | tuple) else []
    return bool(images) and all(isinstance(image, torch.Tensor) and image.dim() >= 2 for image in images)


def alike(a: torch.Tensor, b: torch.Tensor, computed: torch.dtype = torch.float32) -> bool:
    """Return whether the difference of two tensors is within rounding. NaN differs from everything.

    `computed` is the dtype of the model, which rounds values that the tensors keep in float32.
    """
    exact = {a.dtype, computed} <= {torch.float32, torch.float64}
    a, b = a.float(), b.float()
    return a.shape == b.shape and (
        not a.numel() or bool((a - b).abs().max() <= a.abs().max() * (1e-3 if exact else 5e-2))
    )
