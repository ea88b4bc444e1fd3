"""The arguments of an attention call, whichever operator it came through; an option is added here first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch

from .._checks import bad_argument
from .layout import DECODE_QUERIES
from .predicate import Mask
from .scores import Terms

Call = TypeVar("Call", bound="BatchCall")
UNBOUNDED = 1 << 30
"""No sequence is as long, so a window or a number of sink tokens of this size bounds nothing."""


class PlanOptions(NamedTuple):
    """The options that a plan is made for."""

    mask: Mask
    decode_queries: int
    key_begin: int

    def header(self) -> dict[str, int]:
        """The integers of the header from its second on, by name."""
        mask = {name: int(value) for name, value in self.mask._asdict().items()}
        return {"decode_queries": self.decode_queries, "key_begin": self.key_begin, **mask}


@dataclass(eq=False, kw_only=True)
class BatchCall:
    """The arguments that decide which keys each query attends to; a plan is made from them."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_positions: torch.Tensor | None = None
    causal: bool = True
    window: int = 0
    num_sink_tokens: int = 0
    num_shared_blocks: int = 0
    batch_invariant: bool = False

    @classmethod
    def of(cls: type[Call], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call of an operator whose parameters are `names`; a third of the time that the constructor takes."""
        call = cls.__new__(cls)
        # What is not given has its default from the class.
        call.__dict__.update(zip(names, args, strict=False))
        call.__dict__.update(kwargs)
        return call

    def changed(self: Call, **changes: Any) -> Call:
        """The same with other values; a tenth of the time that `dataclasses.replace` takes."""
        call = type(self).__new__(type(self))
        call.__dict__.update(self.__dict__, **changes)
        return call

    if TYPE_CHECKING:  # a field of one kind of call, a property of the other

        @property
        def block_size(self) -> int: ...

    @property
    def head_tables(self) -> bool:
        """Whether block_tables may be one per KV head: in calls of operators that take query_positions."""
        return "query_positions" in self.__dict__

    @property
    def table_heads(self) -> int:
        """KV heads that have a table of their own; 1 where all share one."""
        return self.block_tables.shape[1] if self.block_tables.dim() == 3 else 1

    @property
    def table_strides(self) -> tuple[int, int]:
        """Elements of block_tables from sequence to sequence, and from KV head to KV head."""
        return self.block_tables.stride(0), self.block_tables.stride(1) if self.block_tables.dim() == 3 else 0

    @property
    def key_begin(self) -> int:
        """The first key position behind the shared blocks."""
        return self.num_shared_blocks * self.block_size

    @property
    def mask(self) -> Mask:
        """The options that decide which keys are live.

        A window of UNBOUNDED or more holds every key: kernels add it to positions in int32.
        """
        window = self.window
        if not window or window >= UNBOUNDED:
            return Mask(0, 0, self.causal, False, False)
        return Mask(window, min(self.num_sink_tokens, UNBOUNDED), self.causal, True, True)

    def plan_options(self, tiled: bool = False) -> PlanOptions:
        """Return the options of a plan for this call; `tiled`: few queries are tiled too."""
        # Scattered queries under a window are tiled over queries, whose windows are then united.
        tiled = tiled or self.batch_invariant or (self.query_positions is not None and self.window > 0)
        return PlanOptions(self.mask, 0 if tiled else DECODE_QUERIES, self.key_begin)


@dataclass(eq=False, kw_only=True)
class PlanCall(BatchCall):
    """The arguments of `attention_plan`."""

    block_size: int
    num_kv_heads: int = 8
    out: torch.Tensor | None = None

    @property
    def head_tables(self) -> bool:
        """Whether block_tables may be one per KV head."""
        return True


@dataclass(eq=False, kw_only=True)
class AttentionCall(BatchCall):
    """The arguments of an attention operator."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    scale: float
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    plan: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    query_blocks: torch.Tensor | None = None
    with_lse: bool = True  # whether the operator gives the log-sum-exp too
    is_latent: ClassVar[bool] = False  # whether values are the first columns of keys

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.key_cache.shape[1]

    @property
    def tree_sizes(self) -> tuple[int, int]:
        """Keys that a row of tree_mask has bits for, and elements from row to row; 0 without one."""
        return (0, 0) if self.tree_mask is None else (32 * self.tree_mask.shape[1], self.tree_mask.stride(0))

    @property
    def terms(self) -> Terms:
        """The options that change a score."""
        has_softcap, has_alibi = self.softcap > 0, self.alibi_slopes is not None
        plain = not (has_softcap or has_alibi)
        return Terms(self.softcap, has_softcap, has_alibi, PLAIN=plain, NEGATIVE=self.scale < 0)


@dataclass(eq=False, kw_only=True)
class LatentCall(AttentionCall):
    """The arguments of an operator over latent rows: keys of one head, whose first columns are the values."""

    cache: torch.Tensor
    value_dim: int = 512
    is_latent: ClassVar[bool] = True

    @classmethod
    def of(cls, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> LatentCall:
        """The call of an operator whose parameters are `names`."""
        call = super().of(names, args, kwargs)
        cache, value_dim = call.cache, call.value_dim
        layout = "[num_blocks, block_size, head_dim] or [num_blocks, block_size, 1, head_dim]"
        if cache.dim() not in (3, 4) or (cache.dim() == 4 and cache.shape[2] != 1):
            raise bad_argument("cache", f"shape {list(cache.shape)}", layout)
        if value_dim < 16 or value_dim % 16 or value_dim >= cache.shape[-1]:
            raise bad_argument("value_dim", value_dim, f"a multiple of 16 below head_dim {cache.shape[-1]} of cache")
        rows = cache.unsqueeze(2) if cache.dim() == 3 else cache
        given = {"key_cache": rows, "value_cache": rows[..., :value_dim], "v_scale": call.k_scale}
        call.__dict__.update(given)
        return call


NOT_NEGATIVE = {
    "window": "0 or a positive number of tokens",
    "num_sink_tokens": "0 or a positive number of tokens",
    "softcap": "0 (off) or a positive number",
}
"""Options that are refused below 0, with what they need to be."""

TENSOR_NAMES = (
    *("query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc", "query_positions"),
    *("plan", "alibi_slopes", "sinks", "k_scale", "v_scale", "tree_mask", "query_blocks"),
)
LATENT_NAMES = {"key_cache": "cache", "value_cache": "cache", "v_scale": "k_scale"}
"""Tensors that operators over latent rows have by another name."""
TENSORS: Callable[[AttentionCall], tuple[Any, ...]] = attrgetter(*TENSOR_NAMES)
"""The tensors that a launch takes, in its order; None for those that are not given."""


def kind_of(names: Sequence[str]) -> type[AttentionCall]:
    """Return the class of calls of an operator with these parameters."""
    return LatentCall if "cache" in names else AttentionCall
