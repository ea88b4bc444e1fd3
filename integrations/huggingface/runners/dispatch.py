"""Dispatch of a paged pass without touching any config: the pass is found through the key tensor.

`Cache.update` marks the key tensor it gives back with the pass it belongs to; transformers hands that very tensor to
the attention function. `install` replaces the attention registry that a modeling file looks at. The functions of the
new one look for the mark and otherwise call what the original registry gives. No state is set for the time of a call,
so nothing can be left set or seen by other threads, models or calls. Transformers returns a four-dimensional mask as it
is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..api import PACKED, REGISTRY, AttentionInterface, need
from ..calls import UnsupportedError, refuse_if
from ..support import modeling_globals
from ..visits import check_forward, may_be_within

MARK = "_pc_pass"


class MarkedCall(NamedTuple):
    """The inputs of a layer's attention: `query [batch, num_heads, num_tokens, head_dim]`, and keys that are marked."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class PagedPass:
    """A forward pass whose layers attend in a way of their own; marked keys lead to it."""

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """Return attention of a call's queries over all that is cached, `[batch, num_tokens, num_heads, head_dim]`.

        A mark of this class itself, on a mask, is found where a layer's keys are not those just cached.
        """
        raise UnsupportedError("a layer attends to keys other than those it has just cached")

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers' layers ask for it, with the parameters of `AttentionInterface`."""
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        refuse_if(not causal, "its attention uses attention that is not causal")
        refuse_if(dropout, "its attention uses dropout")
        refuse_if(position_bias is not None, "its attention uses a position bias")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(MarkedCall(query, key, value, scale, sliding_window, softcap or 0.0, s_aux)), None


def mark(key: torch.Tensor, batch: PagedPass) -> torch.Tensor:
    """Bind a key tensor to a pass; the mark dies with the tensor."""
    setattr(key, MARK, batch)
    return key


def no_mask(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return an attention_mask of the right shape, without memory, which mask functions return as it is."""
    # Marked too, so that a layer of the pass whose keys are not those just cached is refused, not computed.
    return mark(torch.ones((), dtype=torch.bool, device=device).expand(1, 1, num_tokens, num_tokens), PagedPass())


class Dispatch(AttentionInterface):  # type: ignore[misc]  # transformers is untyped here
    """A registry of attention functions before a modeling file's own, which unmarked calls reach unchanged."""

    def __init__(self, original: AttentionInterface) -> None:
        self.original = original
        self._made: dict[Callable[..., Any], Callable[..., Any]] = {}

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the original's function, which runs where the keys are not marked."""
        return self._before(self.original.get_interface(attn_implementation, default))

    def __getitem__(self, key: str) -> Callable[..., Any]:
        return self._before(self.original[key])

    def __setitem__(self, key: str, value: Callable[..., Any]) -> None:
        self.original[key] = value

    def __delitem__(self, key: str) -> None:
        del self.original[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.original)

    def __len__(self) -> int:
        return len(self.original)

    def __reduce__(self) -> Any:
        return Dispatch, (self.original,)

    def _before(self, found: Callable[..., Any]) -> Callable[..., Any]:
        if torch.compiler.is_compiling():  # a compiled forward is never part of a paged pass; traced as it was
            return _checking(found) if may_be_within() else found
        if found not in self._made:
            self._made[found] = _looking(found)
        return self._made[found]


def _looking(found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[0] if args else kwargs.get("attention_mask")
        batch: PagedPass | None = getattr(key, MARK, getattr(mask, MARK, None))
        if batch is None:
            check_forward(module)
            return found(module, query, key, value, *args, **kwargs)
        kwargs["attention_mask"] = mask
        return batch.attention(module, query, key, value, **kwargs)

    return attention


def _checking(found: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a forward pass that is compiled calls while some thread is within a document."""

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        _check_uncompiled(module)
        return found(module, *args, **kwargs)

    return attention


_check_uncompiled = torch.compiler.disable(check_forward)


def install(model: torch.nn.Module) -> int:
    """Put a `Dispatch` into the modeling files of a model, once each, and return how many files have one now."""
    # It stays: without marked keys it costs a look-up, and taking it out could hit a pass of another model.
    need(PACKED)
    count = 0
    for names in modeling_globals(model):
        original = names.get(REGISTRY)
        if isinstance(original, AttentionInterface):
            count += 1
            if not isinstance(original, Dispatch):
                names[REGISTRY] = Dispatch(original)  # one assignment: a thread sees the one or the other
    return count
