"""The options of `pc_compress`, which a request carries in its sampling parameters' `extra_args` or in `vllm_xargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...presses import SCORES
from ..api import check_sampling_params

ASKED = "pc_compress"
"""The name under which a request asks to be compressed."""

HEADS = ("same", "ada")
"""Ways to divide a layer's budget among its KV heads: equally ("same"), or by score as in Ada-KV ("ada")."""


@dataclass(frozen=True)
class CompressionOptions:
    """Options of a compressed prompt: the share of its tokens that stays, and the way to choose them.

    Attributes:
        budget: The share of the prompt's whole blocks that stays, above 0 and at most 1, rounded up to a block.
        press: The name of a press, as for `handle.compress`.
        heads: One of `HEADS`.
        until: How many first tokens of the prompt are compressed, rounded down to a block. None: the whole prompt.
        share: Whether later requests with the same tokens up to `until` and the same options find the packed blocks.
            None: they do if `until` is given.
    """

    budget: float
    press: str = "snapkv"
    heads: str = "same"
    until: int | None = None
    share: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, int | float):
            raise TypeError(f"budget: got {type(self.budget).__name__}, needs a number")
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget: got {self.budget}, needs more than 0 and at most 1")
        _check_name("press", self.press, tuple(SCORES))
        _check_name("heads", self.heads, HEADS)
        if self.until is not None and (isinstance(self.until, bool) or not isinstance(self.until, int)):
            raise TypeError(f"until: got {type(self.until).__name__}, needs an integer")
        if self.until is not None and self.until < 1:
            raise ValueError(f"until: got {self.until}, needs at least 1")
        if self.share is not None and not isinstance(self.share, bool):
            raise TypeError(f"share: got {type(self.share).__name__}, needs true or false")
        if self.share and self.until is None:
            raise ValueError("share: got true for the whole prompt, needs until: only a part of a prompt can be shared")
        if self.share and self.heads != "same":
            raise ValueError(f"share: got true with heads {self.heads!r}, needs heads 'same'")


def _check_name(option: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{option}: got {value!r:.100}, needs one of {', '.join(known)}")


def read_options(extra: Mapping[str, Any]) -> CompressionOptions | None:
    """Read `pc_compress` of a request's `extra_args`.

    Its value is a budget, a mapping of options, or that mapping as JSON: clients of vLLM's server send JSON, since
    `vllm_xargs` takes no mappings.

    Raises:
        ValueError: An option is unknown or out of range. The message names it.
        TypeError: An option has the wrong type. The message names it.

    Examples:
        >>> from pc.integrations.vllm.compression.options import read_options
        >>> read_options({"pc_compress": 0.5})
        CompressionOptions(budget=0.5, press='snapkv', heads='same', until=None, share=None)
        >>> try:
        ...     read_options({"pc_compress": {"budget": 2}})
        ... except ValueError as error:
        ...     print(error)
        pc_compress: budget: got 2, needs more than 0 and at most 1
    """
    asked = extra.get(ASKED)
    if asked is None:
        return None
    if isinstance(asked, str):
        try:
            asked = json.loads(asked)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{ASKED}: got a string that is no JSON, needs a budget or options ({error})") from error
    given = asked if isinstance(asked, Mapping) else {"budget": asked}
    known = [field.name for field in fields(CompressionOptions)]
    for name in given:
        if name not in known:
            raise ValueError(f"{ASKED}: got {name!r:.100}, needs some of {', '.join(known)}")
    if "budget" not in given:
        raise ValueError(f"{ASKED}: got no budget, needs one")
    try:
        return CompressionOptions(**given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{ASKED}: {error}") from error


def refuse_wrong_options() -> None:
    """Make vLLM raise ValueError to the caller of a request whose `pc_compress` cannot be read."""

    def check(sampling_params: Any) -> None:
        try:
            read_options(sampling_params.extra_args or {})
        except TypeError as error:  # vLLM's server would report it as an internal error
            raise ValueError(str(error)) from error

    check_sampling_params(check)
