"""A cache that a served call gave back and a later call goes on with: whether it is still what it was."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ..store import Store
from ..support import CONTINUED
from .layers import attention_layers, num_tokens


@dataclass(frozen=True, eq=False)
class _Mark:
    """What a cache has: tokens and mask, `[batch, length]`, under which keys and salt, and the state of its buffers."""

    store: weakref.ref[Store]
    tokens: torch.Tensor
    mask: torch.Tensor
    keys: tuple[Any, ...]
    salt: Any
    buffers: list[tuple[int, int]]

    def __deepcopy__(self, memo: Any) -> None:
        """A copy has buffers of its own, of which nothing is known."""

    def __reduce__(self) -> Any:
        return type(None), ()


def mark(cache: Any, store: Store, sequences: torch.Tensor, mask: Any, keys: tuple[Any, ...], salt: Any) -> None:
    """Says what the cache of a result has.

    Args:
        cache: Of a loop that gives each of its rows a row of the result.
        store: Whose blocks its prompts were read from.
        sequences: `[batch, length]`, prompts and answers.
        mask: Of the prompts, `[batch, columns]`; None where no token is left out.
        keys: What the KV depends on besides tokens.
        salt: Whose blocks were shared.
    """
    buffers = buffers_of(cache)
    if buffers is not None:
        tokens = sequences[:, : num_tokens(cache)].clone()
        whole = torch.ones_like(tokens)
        if mask is not None:
            whole[:, : mask.shape[1]] = mask
        setattr(cache, CONTINUED, _Mark(weakref.ref(store), tokens, whole, keys, salt, buffers))


def goes_on(cache: Any, store: Store, input_ids: torch.Tensor, mask: Any, keys: tuple[Any, ...], salt: Any) -> bool:
    """Whether a call goes on with what a cache has, and nobody has changed it since."""
    own = getattr(cache, CONTINUED, None)
    if not isinstance(own, _Mark) or own.store() is not store or (own.keys, own.salt) != (keys, salt):
        return False
    length = num_tokens(cache)
    rows = torch.ones_like(input_ids) if mask is None else mask
    return (
        0 < length < input_ids.shape[1]
        and length <= own.tokens.shape[1]
        and rows.shape == input_ids.shape
        and input_ids.shape[0] == own.tokens.shape[0]
        and torch.equal(input_ids[:, :length], own.tokens[:, :length].to(input_ids.device))
        and torch.equal(rows[:, :length].long(), own.mask[:, :length].to(input_ids.device))
        and buffers_of(cache) == own.buffers
    )


def buffers_of(cache: DynamicCache) -> list[tuple[int, int]] | None:
    """Address and version of every buffer; None where some cannot be told, or keys are not in them."""
    found = []
    for layer in attention_layers(cache).values():
        for name in ("keys", "values"):
            buffer, view = layer.__dict__.get(f"_{name}_buffer"), getattr(layer, name)
            if buffer is None or buffer.is_inference() or view.data_ptr() != buffer.data_ptr():
                return None
            found.append((buffer.data_ptr(), buffer._version))
    return found
