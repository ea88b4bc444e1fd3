"""Dispatch of attention to a paged pass, by a mark on the key tensor and without a change of any config.

In a paged pass, `Cache.update` marks the key tensor that it returns with the pass. Transformers passes this tensor to
the attention function. `install` replaces the attention registry of a modeling file by a `Dispatch`. Its functions call
the pass if the keys are marked, and otherwise the function of the original registry. No state is set during a call, so
nothing can leak to other threads, models or calls. A mask can be marked too, because transformers passes on a
four-dimensional mask unchanged.
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
    """The inputs of attention in one layer of a pass. `query` is `[batch, num_heads, num_tokens, head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class PagedPass:
    """A forward pass with its own attention, to which `Dispatch` sends the calls whose keys are marked."""

    _cached: tuple[Any, ...] | None = None

    def caches(self, values: torch.Tensor) -> None:
        """Record the values that a layer caches. Attention must be called with exactly these next."""
        self._cached = _seen(values)

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """Return attention of the queries over all cached tokens, `[batch, num_tokens, num_heads, head_dim]`.

        Subclasses implement this method. The method of this base class refuses every call. `no_mask` relies on that: it
        marks its masks with a plain `PagedPass`. The mark of a mask counts only if the keys have none. Such keys are
        not those that the layer has just cached.
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
        """Check the arguments of transformers' `AttentionInterface`, and call `attend`."""
        changed = self._cached is not None and _seen(value) != self._cached
        refuse_if(changed, "a layer attends to values other than those it has cached")
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        refuse_if(not causal, "its attention uses attention that is not causal")
        refuse_if(dropout, "its attention uses dropout")
        refuse_if(position_bias is not None, "its attention uses a position bias")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(MarkedCall(query, key, value, scale, sliding_window, softcap or 0.0, s_aux)), None


def _seen(values: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's address, layout and version, which differ once it was replaced or written to."""
    version = -1 if values.is_inference() else values._version
    return values.data_ptr(), values.shape, values.stride(), version


def mark(key: torch.Tensor, batch: PagedPass) -> torch.Tensor:
    """Mark a key tensor with its pass and return it. The mark lives as long as the tensor."""
    setattr(key, MARK, batch)
    return key


def no_mask(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return an attention_mask that masks nothing: one stored element, expanded to four dimensions."""
    # Transformers passes it on unchanged. Layers whose keys are not those just cached would wrongly go without a mask,
    # so its mark refuses them (`PagedPass.attend`).
    return mark(torch.ones((), dtype=torch.bool, device=device).expand(1, 1, num_tokens, num_tokens), PagedPass())


class Dispatch(AttentionInterface):  # type: ignore[misc]  # transformers is untyped here
    """A registry of attention functions that wraps a modeling file's own. Calls without a mark reach the original."""

    def __init__(self, original: AttentionInterface) -> None:
        self.original = original
        self._made: dict[Callable[..., Any], Callable[..., Any]] = {}

    def get_interface(self, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of the original registry, wrapped to look for marks."""
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
        """Return a function that looks for marks and then calls `found`. The same `found` gives the same function.

        While torch compiles, return `found` or a function that only calls `check_forward` before it.
        """
        if torch.compiler.is_compiling():  # a compiled forward is never part of a paged pass
            return _checking(found) if may_be_within() else found
        if found not in self._made:
            self._made[found] = _looking(found)
        return self._made[found]


def _looking(found: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function that runs the pass with which keys are marked, or `found` if there is no mark."""

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
    """Return a function that calls `check_forward`, outside of the compiled code, and then `found`.

    A compiled forward pass gets it while some thread is in a `with document:` block.
    """

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        _check_uncompiled(module)
        return found(module, *args, **kwargs)

    return attention


_check_uncompiled = torch.compiler.disable(check_forward)


def install(model: torch.nn.Module) -> int:
    """Put a `Dispatch` into the modeling files of a model, once each, and return the number of files with one."""
    # Never undone: without marks it costs a look-up, and removing it could disturb a pass of another model.
    need(PACKED)
    count = 0
    for names in modeling_globals(model):
        original = names.get(REGISTRY)
        if isinstance(original, AttentionInterface):
            count += 1
            if not isinstance(original, Dispatch):
                names[REGISTRY] = Dispatch(original)  # one assignment: a thread sees the one or the other
    return count
