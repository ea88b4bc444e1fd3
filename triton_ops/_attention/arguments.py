"""The arguments of an attention call, of any operator; a new option is added here first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from .._core.checks import bad_argument
from .layout import DECODE_QUERIES
from .predicate import Mask
from .scores import ScoreModifiers

Result = tuple[torch.Tensor, torch.Tensor]
"""The result of attention, out, and its log-sum-exp."""

UNBOUNDED = 1 << 30
"""More tokens than any sequence has, so a window or number of sink tokens of this size is no limit."""


def table_heads(block_tables: torch.Tensor) -> int:
    """Return the number of KV heads with separate block tables; 1 if all heads share a table."""
    return block_tables.shape[1] if block_tables.dim() == 3 else 1


def table_strides(block_tables: torch.Tensor) -> tuple[int, int]:
    """Return the strides of block tables, in elements: between sequences and between KV heads (0: one table)."""
    return block_tables.stride(0), block_tables.stride(1) if block_tables.dim() == 3 else 0


# The next three functions take the arguments of an attention operator or of `attention_plan`, with the same names.


def mask_of(args: Any) -> Mask:
    """Return the options that decide which keys are live.

    A window of UNBOUNDED or more counts as none, because kernels add windows to int32 positions.
    """
    window = args.window
    if not window or window >= UNBOUNDED:
        return Mask(0, 0, args.causal, False, False)
    return Mask(window, min(args.num_sink_tokens, UNBOUNDED), args.causal, True, True)


def key_begin_of(args: Any) -> int:
    """Return the position of the first key that is read for each sequence alone: the length of the shared prefix."""
    return int(args.num_shared_blocks * args.block_size)


def decode_queries_of(args: Any) -> int:
    """Return how many queries a sequence may have to be decoded from the plan's work list; 0 if all are tiled."""
    # Scattered queries under a window are tiled, so that a tile reads the union of its queries' windows.
    is_tiled = args.batch_invariant or (args.query_positions is not None and args.window > 0)
    return 0 if is_tiled else DECODE_QUERIES


class AttentionArgs(NamedTuple):
    """The arguments of an attention operator, with defaults for those that the operator does not have."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: Any  # a tensor; None for latent rows until `with_rows` has been called
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float
    query_positions: torch.Tensor | None = None
    causal: bool = True
    window: int = 0
    num_sink_tokens: int = 0
    num_shared_blocks: int = 0
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    max_query_len: int | None = None
    max_seq_len: int | None = None
    plan: torch.Tensor | None = None
    batch_invariant: bool = False
    tree_mask: torch.Tensor | None = None
    query_blocks: torch.Tensor | None = None
    value_dim: int | None = None  # columns of a latent row that are its value; None where rows are not latent
    with_lse: bool = True  # whether the operator returns the log-sum-exp too
    head_tables: bool = True  # whether the operator takes a block table per KV head

    @property
    def mask(self) -> Mask:
        """The options that decide which keys are live."""
        return mask_of(self)

    @property
    def is_latent(self) -> bool:
        """Whether values are the first columns of keys."""
        return self.value_dim is not None

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.key_cache.shape[1]

    @property
    def terms(self) -> ScoreModifiers:
        """The options that change a score."""
        has_softcap, has_alibi = self.softcap > 0, self.alibi_slopes is not None
        plain = not (has_softcap or has_alibi)
        return ScoreModifiers(self.softcap, has_softcap, has_alibi, PLAIN=plain, NEGATIVE=self.scale < 0)

    def with_rows(self) -> AttentionArgs:
        """Return the arguments with latent rows as keys of one head and as values; without latent rows, unchanged."""
        cache, value_dim = self.key_cache, self.value_dim
        if value_dim is None or self.value_cache is not None:
            return self
        layout = "[num_blocks, block_size, head_dim] or [num_blocks, block_size, 1, head_dim]"
        if cache is None:
            raise bad_argument("cache", "None", f"a tensor {layout}", TypeError)
        if cache.dim() not in (3, 4) or (cache.dim() == 4 and cache.shape[2] != 1):
            raise bad_argument("cache", f"shape {list(cache.shape)}", layout)
        if value_dim < 16 or value_dim % 16 or value_dim >= cache.shape[-1]:
            raise bad_argument("value_dim", value_dim, f"a multiple of 16 below head_dim {cache.shape[-1]} of cache")
        rows = cache.unsqueeze(2) if cache.dim() == 3 else cache
        return self._replace(key_cache=rows, value_cache=rows[..., :value_dim], v_scale=self.k_scale)


NOT_NEGATIVE = {
    "window": "0 or a positive number of tokens",
    "num_sink_tokens": "0 or a positive number of tokens",
    "softcap": "0 (off) or a positive finite number",
}
"""Options that are refused below 0 and if they are not finite, with what they need to be."""


def binding(function: Callable[..., object], with_lse: bool) -> Callable[..., AttentionArgs]:
    """Return a function that makes AttentionArgs of an attention operator's arguments."""
    parameters = inspect.signature(function).parameters
    names = ["key_cache" if name == "cache" else name for name in parameters]
    defaults = tuple([parameter.default for parameter in parameters.values()])
    others = AttentionArgs._field_defaults | {"value_cache": None, "with_lse": with_lse}
    others["head_tables"] = "query_positions" in names
    missing = {name: value for name, value in others.items() if name not in names}
    order = [*names, *missing]
    pick = itemgetter(*[order.index(name) for name in AttentionArgs._fields])
    behind = [defaults[count:] + tuple(missing.values()) for count in range(len(defaults) + 1)]

    def bind(*values: Any, **named: Any) -> AttentionArgs:
        if named:
            values += tuple([named.get(name, p.default) for name, p in [*parameters.items()][len(values) :]])
        # Like `_make`, which would also count the fields again, in Python.
        return tuple.__new__(AttentionArgs, pick(values + behind[len(values)]))

    return bind
