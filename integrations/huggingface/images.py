"""Images of a call, cut into the parts that the model's vision tower encodes one by one, each with a hash."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .support import UnsupportedError

PIXELS = ("pixel_values", "pixel_values_images", "image_patches")
"""Names under which a vision tower takes its main input."""
OTHERS = {
    "pixel_values_videos": "videos",
    "input_features": "sounds",
    "input_values": "sounds",
    "mm_encoder_outputs": "outputs of an encoder",
}
"""What a prompt may hold besides tokens and images, by the name of its argument."""


@dataclass(frozen=True)
class Unit:
    """What the tower encodes by itself: an image or a tile, or all of a call where they cannot be told apart.

    Attributes:
        digest: Stands for its bytes and every option of the tower.
        inputs: Arguments of the tower for this unit alone.
    """

    digest: bytes
    inputs: dict[str, Any] = field(compare=False)


@dataclass(frozen=True)
class Images:
    """The images of a call.

    Attributes:
        units: In the order in which the tokens of the batch stand for them.
        token: The id of the tokens that stand for images.
        given: Arguments of the tower as the caller gave them.
    """

    units: list[Unit]
    token: int
    given: dict[str, Any]


def take_images(model: Any, arguments: dict[str, Any]) -> Images | None:
    """Takes pixels out of the arguments of generate; what else the tower is given stays, positions follow from it.

    Raises:
        UnsupportedError: There is something besides tokens that cannot be told apart by content.
    """
    for name, what in OTHERS.items():
        if arguments.get(name) is not None:
            raise UnsupportedError(f"{what} beside tokens are served by the model's own generate", name)
    main = next((name for name in PIXELS if arguments.get(name) is not None), None)
    if main is None:
        return None
    encoder = getattr(model.base_model, "get_image_features", None)
    token = getattr(model.config, "image_token_id", None)
    if not model._supports_mm_encoder_outputs() or "image" not in model.input_modalities or encoder is None:
        raise UnsupportedError("its forward pass takes no images that were encoded before")
    if type(token) is not int or model.main_input_name != "input_ids":
        raise UnsupportedError("no token of its prompts stands for images")
    if arguments.get("assistant_model") is not None:
        raise UnsupportedError("images with an assistant model are served by the model's own generate")
    if arguments.get("position_ids") is not None:
        raise UnsupportedError("position_ids of your own beside images")
    names = [name for name in inspect.signature(encoder).parameters if name != "kwargs"]
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    if main not in given:
        raise UnsupportedError("its forward pass takes no images that were encoded before")
    units = [Unit(_digest(inputs), inputs) for inputs in _apart(given, main)]
    del arguments[main]
    return Images(units, token, given)


def encoded_by_model(images: Images, model: Any, input_ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """What generate would give to its loop for the images, rows of the batch repeated for beams and several answers."""
    kwargs = {**images.given, "mm_encoder_outputs": {}}
    outputs: dict[str, Any] = model._prepare_multimodal_encoder_kwargs_for_generation(kwargs)["mm_encoder_outputs"]
    if repeats > 1:
        outputs = model._expand_multimodal_outputs(input_ids[::repeats], outputs, expand_size=repeats)
    return outputs


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
        elif _is_plain(value):
            digest.update(f"{name} {value!r}".encode())
        else:
            raise UnsupportedError(f"{name} of a type whose content cannot be compared", type(value).__name__)
    return digest.digest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
