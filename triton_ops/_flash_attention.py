"""Attention of FlashAttention's functions: masks, biases and scales as operators take them, and the calls themselves.

A window (left, right) around position p holds the keys p - left to p + right; -1 is no bound, and so is a side that no
key is as far from a query as. It becomes that of an operator, whose queries stand `right` further where the two sides
differ: t <= p + right and t > p + right - window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._attention.dense import as_blocks, counted
from ._checks import bad_argument, describe, reads_values
from ._dispatch import ChosenOnce, current_device, is_launched, is_watched
from ._flash import FlashOptions, Given, Keys, check_values
from ._quantize import CODES
from .merge_attention import merge_attention
from .paged_attention import paged_attention, paged_attention_with_lse
from .sliding_window_attention import sliding_window_attention, sliding_window_attention_with_lse
from .sparse_gap_attention import sparse_gap_attention, sparse_gap_attention_with_lse


def _sequence_of_token(keys: Keys, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the packed queries, and of the sequence of each; of the last one for padding."""
    token = counted(keys.lens.device, count, 1)
    return token, _sequences(token, keys.starts)


def _sequences(token: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(starts[1:], token, right=True).clamp_(max=max(0, starts.shape[0] - 2))


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if x.dtype.itemsize == 1:  # no index takes float8
        return x.view(torch.uint8).index_select(0, index).view(x.dtype)
    return x.index_select(0, index)


class UsedQueries:
    """FlashAttention 3's seqused_q: of each sequence's queries in a packed q the first ones, packed anew.

    Args:
        q: `[total_q, num_heads, head_dim]`.
        starts: `[batch + 1]` int32, where each sequence's queries begin.
        used: `[batch]` int32, how many of them are used.
    """

    def __init__(self, q: torch.Tensor, starts: torch.Tensor, used: torch.Tensor) -> None:
        batch = starts.shape[0] - 1
        if used.shape != (batch,) or used.dtype != torch.int32 or used.device != starts.device:
            raise bad_argument("seqused_q", describe(used), f"int32 [{batch}] on {starts.device}")
        self.starts = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
        token, last = counted(q.device, q.shape[0], 1), max(0, q.shape[0] - 1)
        new, old = _sequences(token, self.starts), _sequences(token, starts)
        self._source = (token - self.starts[new] + starts[new]).clamp_(0, last)
        places = token - starts[old] + self.starts[old]
        self._unused = places >= self.starts[old + 1]
        self._places = places.clamp_(0, last)

    def pack(self, q: torch.Tensor) -> torch.Tensor:
        """The used queries, one behind the other; what follows is any."""
        return _rows(q, self._source)

    def unpack(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results where their queries are; 0 and -inf for those that are not used."""
        out = out.index_select(0, self._places).masked_fill_(self._unused[:, None, None], 0.0)
        if lse is not None:
            lse = lse.index_select(1, self._places).masked_fill_(self._unused, -torch.inf)
        return out, lse


def _with_holes(keys: Keys) -> Keys:
    """The same with absent blocks before each sequence's own, so that none has more queries than keys."""
    block_size = keys.key_cache.shape[1]
    holes = -(-keys.max_queries // block_size)
    tables = torch.nn.functional.pad(keys.tables, (holes, 0), value=-1)
    max_keys = None if keys.max_keys is None else keys.max_keys + holes * block_size
    return keys._replace(tables=tables, lens=keys.lens + holes * block_size, max_keys=max_keys)


def _mirrored(query: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, Keys, torch.Tensor]:
    """Each sequence's queries and the keys behind their positions from its end on, and where each query then is.

    Keys t > p are those before p in this order, t' = length - t, as blocks of a token behind one that is absent: to a
    query that many from the end, causally.
    """
    token, sequence = _sequence_of_token(keys, query.shape[0])
    first, last = keys.starts[:-1].index_select(0, sequence), keys.starts[1:].index_select(0, sequence)
    places = torch.where(token < last, first + last - 1 - token, token)  # padding stays where it is
    blocks, size = as_blocks(keys.key_cache, keys.value_cache, of_tokens=True), keys.key_cache.shape[1]
    ahead = counted(query.device, keys.max_queries, 1)
    key = keys.lens.unsqueeze(1) - ahead
    columns = key.div(size, rounding_mode="floor")
    is_inside = (ahead > 0) & (key >= 0) & (columns < keys.tables.shape[1])
    if not keys.tables.shape[1]:
        tables = torch.full_like(key, -1)
    else:
        numbers = keys.tables.gather(1, columns.clamp(0, keys.tables.shape[1] - 1).long())
        places_of = numbers * blocks.per_sequence + key.remainder(size) * blocks.per_block
        tables = torch.where(is_inside & (numbers >= 0), places_of, -1)
    lens, most = keys.starts.diff(), keys.max_queries
    own = Keys(blocks.key_cache, blocks.value_cache, tables, lens, keys.starts, most, most, False)
    return _rows(query, places), own, places


def scale_of_heads(name: str, descale: torch.Tensor, batch: int) -> torch.Tensor | None:
    """A descale `[batch, num_kv_heads]` as an operator takes it; None where sequences may differ."""
    if descale.dim() == 0 or descale.numel() == 1:
        return descale.reshape(1)
    if descale.dim() == 1:
        return descale
    if descale.dim() != 2 or descale.shape[0] != batch:
        raise bad_argument(name, describe(descale), f"[{batch}, num_kv_heads], or one element")
    if batch > 1 and descale.stride(0):
        return None
    return descale[0] if descale.stride(1) or descale.shape[1] == 1 else descale[0, :1]


def _of_query_heads(descale: torch.Tensor, num_heads: int, sequence: torch.Tensor | None) -> torch.Tensor:
    """A descale as a factor `[num_tokens or 1, num_heads, 1]` of queries or results."""
    if descale.dim() == 2:
        descale = descale[:1] if sequence is None else descale.index_select(0, sequence)
    descale = descale.reshape(-1, descale.shape[-1] if descale.dim() else 1).float()
    return descale.repeat_interleave(num_heads // descale.shape[1], 1).unsqueeze(2)


def _of_first(slopes: torch.Tensor) -> torch.Tensor:
    """Slopes `[num_heads]`: those of the first sequence, where there is one, if each has its own."""
    if slopes.dim() != 2:
        return slopes
    return slopes[0] if len(slopes) else slopes.new_zeros(slopes.shape[1])


class Launched:
    """An operator whose calls are all of a kind, from the second on what it launches, on the device that is current."""

    def __init__(self, operator: Callable[..., Any], may_learn: bool = True) -> None:
        self._operator = operator
        self._chosen: ChosenOnce[Any] | None = operator.chosen if may_learn else None  # type: ignore[attr-defined]
        self._launch: tuple[int | None, Callable[..., Any]] | None = None

    def takes_addresses(self) -> bool:
        """Whether the next call only launches: of tensors that others are views of it may be given these instead."""
        if self._launch is None:
            return False
        device, _ = self._launch
        return device is None or device == current_device()

    def __call__(self, *arguments: Any) -> Any:
        """Runs it; all of its arguments by position."""
        if self._launch is not None and self.takes_addresses():
            return self._launch[1](*arguments)
        found = self._operator(*arguments)
        if self._chosen is None or is_watched() or reads_values(arguments[0]):
            return found
        if is_launched([tensor for tensor in arguments if isinstance(tensor, torch.Tensor)]):
            self._launch = arguments[0].device.index, self._chosen.launch_for(arguments)
        return found


class Attention:
    """What runs attention of packed queries `[num_tokens, num_heads, head_dim]`, for calls of a kind.

    Args:
        operator: Of this package.
        before: Its numbers before causal.
        options: causal and softcap.
        with_lse: Whether it gives the lse too.
        dequantizes: Whether queries, keys or values are quantized.
        holes: Whether sequences may have fewer keys than queries, which operators refuse where they read values.
        ahead: How far ahead of their places queries are said to stand.
    """

    def __init__(
        self,
        operator: Callable[..., Any],
        before: tuple[float, ...],
        options: tuple[bool, float],
        with_lse: bool,
        dequantizes: bool,
        holes: bool,
        ahead: int,
    ) -> None:
        self._before, self._options, self._with_lse = before, options, with_lse
        self._dequantizes, self._holes, self._ahead = dequantizes, holes, ahead
        self._run = Launched(operator, not ahead)
        self._takes_shapes = dequantizes or holes or ahead > 0

    def takes_addresses(self) -> bool:
        """Whether queries, keys and values may come in their callers' shapes, if those are views of these."""
        return not self._takes_shapes and self._run.takes_addresses()

    def __call__(self, query: torch.Tensor, keys: Keys, given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result, and its lse or None."""
        after, slopes, scales = None, given.alibi_slopes, (None, None)
        positions: tuple[torch.Tensor, ...] = ()
        if self._dequantizes:
            query, scales, after = _dequantized(query, keys, given)
        if self._holes:  # which shift lengths: wrong ones are told as they were given
            check_values("seq_lens", keys.lens, 0, keys.tables.shape[1] * keys.key_cache.shape[1])
            keys = _with_holes(keys)
        if self._ahead:
            token, sequence = _sequence_of_token(keys, query.shape[0])
            offsets = keys.lens - keys.starts[1:] + self._ahead
            positions = (token + offsets.index_select(0, sequence),)
        if slopes is not None:
            slopes = _of_first(slopes)
        key_cache, value_cache, tables, lens, starts, max_queries, max_keys, _ = keys
        arguments = (
            query, key_cache, value_cache, tables, lens, starts, *positions, *self._before, *self._options,
            slopes, given.s_aux, *scales, max_queries, max_keys, None, False,
        )  # fmt: skip
        found = self._run(*arguments)
        out: torch.Tensor = found[0] if self._with_lse else found
        return (out if after is None else (out * after).to(out.dtype)), found[1] if self._with_lse else None


class _BothSides:
    """ALiBi of queries that see ahead, -slope * |t - p|: keys up to p, and those behind it in the order from the end.

    Args:
        past: Attends to keys up to each query's position.
        future: Attends to those behind it, `_mirrored`.
        with_lse: Whether it gives the lse too.
    """

    def __init__(self, past: Attention, future: Attention, with_lse: bool) -> None:
        self._past, self._future, self._with_lse = past, future, with_lse

    def takes_addresses(self) -> bool:
        """See `Attention`; never."""
        return False

    def __call__(self, query: torch.Tensor, keys: Keys, given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result, and its lse or None."""
        slopes = given.alibi_slopes
        assert slopes is not None
        past, past_lse = self._past(query, keys, given)
        mirrored, behind, places = _mirrored(query, keys)
        future, lse = self._future(mirrored, behind, given._replace(s_aux=None))
        assert past_lse is not None
        assert lse is not None
        # A key behind one that is absent is one nearer to its query than it should be.
        lse = lse.index_select(0, places) - _of_first(slopes).float()
        out, lse = merge_attention(past, past_lse, future.index_select(0, places), lse)
        return out, lse if self._with_lse else None


class _EachSequence:
    """ALiBi with slopes of each sequence's own: a call for each, in which the others have no keys."""

    def __init__(self, one: Attention | _BothSides) -> None:
        self._one = one

    def takes_addresses(self) -> bool:
        """See `Attention`; never."""
        return False

    def __call__(self, query: torch.Tensor, keys: Keys, given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result, and its lse or None."""
        assert given.alibi_slopes is not None
        token, sequence = _sequence_of_token(keys, query.shape[0])
        index = counted(query.device, keys.lens.shape[0], 1).unsqueeze(1)
        parts = []
        for i, slopes in enumerate(given.alibi_slopes.unbind()):
            own = keys._replace(tables=torch.where(index == i, keys.tables, -1))
            parts.append(self._one(query, own, given._replace(alibi_slopes=slopes)))
        out = torch.stack([part for part, _ in parts])[sequence, token]
        lses = [lse for _, lse in parts if lse is not None]
        return out, torch.stack(lses)[sequence, token] if lses else None


def choose_attention(
    query: torch.Tensor, keys: Keys, options: FlashOptions, given: Given
) -> Attention | _BothSides | _EachSequence:
    """What runs such a call, from its metadata."""
    batch, slopes, (left, right) = keys.lens.shape[0], given.alibi_slopes, options.window
    longest = keys.tables.shape[1] * keys.key_cache.shape[1] if keys.max_keys is None else keys.max_keys
    if left >= longest:
        left = -1
    if options.causal or keys.max_queries <= 1:  # behind a single query there are no keys
        right = 0
    elif right >= keys.max_queries - 1:
        right = -1
    if slopes is None or not right:
        attention: Attention | _BothSides = _choose_window(query, keys, options, left, right)
    else:
        both = options._replace(with_lse=True)
        mirrored, behind, _ = _mirrored(query, keys)
        future = _choose_window(mirrored, behind, both, max(-1, right - 1), 0)
        attention = _BothSides(_choose_window(query, keys, both, left, 0), future, options.with_lse)
    if slopes is None or slopes.dim() != 2:
        return attention
    if slopes.shape != (batch, query.shape[1]):
        needs = f"[{query.shape[1]}], or [{batch}, {query.shape[1]}], slopes of each sequence"
        raise bad_argument("alibi_slopes", describe(slopes), needs)
    return _EachSequence(attention) if batch > 1 and slopes.stride(0) else attention


def _ahead_of(keys: Keys, right: int) -> int:
    """How far ahead of a query keys may be: the last one is less than max_queries ahead of its first query."""
    return right if right > 0 else keys.max_queries


def _choose_window(query: torch.Tensor, keys: Keys, options: FlashOptions, left: int, right: int) -> Attention:
    """What attends to keys of a window around each query."""
    scale = query.shape[-1] ** -0.5 if options.softmax_scale is None else float(options.softmax_scale)
    before: tuple[float, ...] = (scale,)
    holes = keys.fewer_keys and keys.max_queries > 1 and reads_values(query)
    operators: tuple[Callable[..., Any], Callable[..., Any]] = (paged_attention, paged_attention_with_lse)
    ahead = 0
    if right and left != right:
        ahead = _ahead_of(keys, right)
        before = (scale, left + ahead + 1 if left >= 0 else 0, 0)
        operators = (sparse_gap_attention, sparse_gap_attention_with_lse)
    elif left >= 0:
        before = (scale, left + 1, 0)
        operators = (sliding_window_attention, sliding_window_attention_with_lse)
    quantized = query.dtype == torch.float8_e4m3fn or keys.key_cache.dtype in CODES
    flags = (ahead > 0 or right == 0, float(options.softcap))
    return Attention(operators[options.with_lse], before, flags, options.with_lse, quantized, holes, ahead)


def _dequantized(
    query: torch.Tensor, keys: Keys, given: Given
) -> tuple[torch.Tensor, tuple[Any, Any], torch.Tensor | None]:
    """Queries in a dtype that operators take, scales of a quantized cache, and what results are multiplied by.

    An operator has one scale a KV head: scales that differ from sequence to sequence become factors of its queries and
    results.
    """
    batch, num_heads, sequence = keys.lens.shape[0], query.shape[1], None
    scales: dict[str, Any] = {}
    factors: list[torch.Tensor] = []
    descales = {"q": given.q_descale, "k": given.k_descale, "v": given.v_descale}
    if batch > 1 and any(x is not None and x.dim() == 2 and x.stride(0) for x in descales.values()):
        sequence = _sequence_of_token(keys, query.shape[0])[1]
    if query.dtype == torch.float8_e4m3fn and given.q_descale is not None:
        factors.append(_of_query_heads(given.q_descale, num_heads, sequence))
    after = None
    if keys.key_cache.dtype in CODES:
        for name in ("k", "v"):
            descale = descales[name]
            scale = None if descale is None else scale_of_heads(f"{name}_descale", descale, batch)
            if scale is None:
                scale = torch.ones(1, device=query.device)
                if descale is not None:
                    factor = _of_query_heads(descale, num_heads, sequence)
                    factors, after = ([*factors, factor], after) if name == "k" else (factors, factor)
            scales[f"{name}_scale"] = scale
    dtype = torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype
    if factors or dtype != query.dtype:
        exact = query.float()
        for factor in factors:
            exact = exact * factor
        query = exact.to(dtype)
    return query, (scales.get("k_scale"), scales.get("v_scale")), after


def shaped(
    out: torch.Tensor, lse: torch.Tensor | None, batched: tuple[int, int] | None, given_out: torch.Tensor | None
) -> Any:
    """out, or both, in FlashAttention's shapes: the batch first where it is not packed, heads before queries in lse."""
    if batched is not None:
        out = out if out.dim() == 4 else out.view(*batched, *out.shape[1:])
        lse = None if lse is None else lse.view(*batched, lse.shape[-1])
    if given_out is not None:
        out = given_out.copy_(out)
    return out if lse is None else (out, lse.transpose(-1, -2).contiguous())
