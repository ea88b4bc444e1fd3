"""Names of transformers that differ between its versions, and what each is called in the version that is installed.

Version 5.24 renamed `past_key_values` and `cache_params` to `cache`: in forward passes, in generate and in results.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import fields
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from .calls import callers_level

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What a cache is called as an argument, or in a result, the newest name first."""
CACHE = next(name for name in CACHE_NAMES if name in {f.name for f in fields(GenerateDecoderOnlyOutput)})
"""What a result of generate calls its cache."""
RENAMES = CACHE == "cache"
"""Whether transformers itself turns older names of the cache into the newest."""


def cache_argument(model: Any) -> str:
    """Return the name under which generate, and the forward pass, of a model take its cache."""
    return next((n for n in CACHE_NAMES[1:] if not RENAMES and takes(model.forward, n)), CACHE)


def takes_cache(forward: Any) -> bool:
    """Return whether a forward pass takes a cache, under any of its names."""
    return any(takes(forward, name) for name in CACHE_NAMES)


def takes(function: Any, name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def result_cache(result: Any) -> Any:
    """Return the cache of a result of generate; None where there is none."""
    return getattr(result, CACHE, None)


def drop_cache(result: Any) -> None:
    """Leave the cache out of a result of generate, if it has a place for one."""
    if hasattr(result, CACHE):
        setattr(result, CACHE, None)


def rename_cache(model: Any, arguments: dict[str, Any]) -> None:
    """Turn an older name of the cache in generate's arguments into the newest, with the warning that generate gives."""
    # Generate would blame the line of ours that calls it.
    for name in CACHE_NAMES[1:] if RENAMES else ():
        if name in arguments and CACHE not in arguments:
            arguments[CACHE] = arguments.pop(name)
            text = (
                f"`{name}` is deprecated and will be removed in version 6.0.0 for `{type(model).__name__}.generate`. "
            )
            warnings.warn(f"{text}Use `{CACHE}` instead.", FutureWarning, stacklevel=callers_level())
