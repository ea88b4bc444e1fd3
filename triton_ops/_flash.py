"""What FlashAttention's functions have in common: options, calls found again, errors with their names, checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ._checks import bad_argument, debug_mode_enabled, describe, refuse_grad
from ._dispatch import Memo, aligned, is_watched, may_keep
from ._kernel import current_stream


class Keys(NamedTuple):
    """Keys and values as the operators take them, and the batch that reads them.

    Attributes:
        key_cache, value_cache: Of blocks.
        tables: `[batch, max_blocks]`.
        lens: `[batch]`, keys of each sequence.
        starts: `[batch + 1]`, where its queries begin.
        max_queries: Of a sequence, at most.
        max_keys: Of a sequence, at most; None: what the tables hold.
        fewer_keys: Whether a sequence may have fewer keys than queries.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    max_queries: int
    max_keys: int | None
    fewer_keys: bool


class FlashOptions(NamedTuple):
    """What the three functions have in common besides tensors, as they were given."""

    softmax_scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    with_lse: bool


class Given(NamedTuple):
    """Tensors that they have in common."""

    alibi_slopes: torch.Tensor | None
    s_aux: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    out: torch.Tensor | None


_NAMES = {
    "query": "q",
    "key_cache": "k",
    "value_cache": "v",
    "block_tables": "block_table",
    "query_start_loc": "cu_seqlens_q",
    "seq_lens": "cu_seqlens_k",
    "max_query_len": "max_seqlen_q",
    "max_seq_len": "max_seqlen_k",
    "sinks": "s_aux",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}


def _alignments(*tensors: torch.Tensor) -> object:
    """Which begin at a multiple of 16 bytes; True where all do. A choice holds launches for some of the tensors."""
    return aligned(*tensors) or tuple([tensor.data_ptr() & 15 == 0 for tensor in tensors])


_chosen: Memo[Callable[..., Any]] = Memo(_alignments)


def run_chosen(
    choose: Callable[..., Callable[..., Any]],
    names: dict[str, str],
    options: tuple[Any, ...],
    *tensors: torch.Tensor | None,
) -> Any:
    """Runs what `choose` makes of a call's options and of its tensors' metadata, found again for calls of the kind.

    Args:
        choose: Takes options and tensors; what it returns takes the tensors.
        names: What errors call the parameters of operators, where it is not the usual.
        options: All that matters besides.
        tensors: No tensor twice.
    """
    try:
        query = tensors[0]
        on_gpu = isinstance(query, torch.Tensor) and query.is_cuda
        if not may_keep(on_gpu):
            return choose(options, *tensors)(*tensors)
        given = [tensor for tensor in tensors if tensor is not None]
        types = tuple(map(type, tensors))  # which are None, for one
        kind = (choose, options, types, debug_mode_enabled(), current_stream() if on_gpu else None)
        run = _chosen.find(kind, given)
        if run is None:
            run = choose(options, *tensors)
            _chosen.add(kind, given, run)
        return run(*tensors)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        known, said = _NAMES | names, str(error)
        renamed = re.sub(r"\b\w+\b", lambda found: known.get(found[0], found[0]), said)
        if renamed == said:
            raise
        raise type(error)(renamed) from None


def pair(window_size: Sequence[int] | None) -> tuple[int, int]:
    """A window's two sides, -1 for no bound."""
    if window_size is None or window_size == (-1, -1):
        return -1, -1
    left, right = window_size
    return max(-1, int(left)), max(-1, int(right))


def refuse(**arguments: Any) -> None:
    """Raises ValueError for an argument that is given although nothing here serves it."""
    for name, value in arguments.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor or (value is not None and value != 0):
            got = describe(value) if is_tensor else value
            needs = (
                "0: there is no dropout, this is forward only" if name == "dropout_p" else "nothing: it is not served"
            )
            raise bad_argument(name, got, needs)


def check_tensors(layouts: dict[str, tuple[Any, str]], given: Given) -> None:
    """Checks ranks, and that no tensor requires grad; what else is wrong the operators say."""
    for name, (tensor, layout) in layouts.items():
        if not isinstance(tensor, torch.Tensor):
            raise bad_argument(name, describe(tensor), f"a tensor {layout}", TypeError)
        if tensor.dim() != layout.count(",") + 1:
            raise bad_argument(name, f"shape {list(tensor.shape)}", layout)
        if 0 in tensor.shape[-2:]:
            raise bad_argument(name, f"shape {list(tensor.shape)}", "at least one head, of at least one feature")
    tensors = {name: tensor for name, (tensor, _) in layouts.items()}
    refuse_grad(**tensors, alibi_slopes=given.alibi_slopes, s_aux=given.s_aux)


def check_numbers(name: str, tensor: Any, count: int | None, device: torch.device) -> None:
    """Checks an int32 tensor of a number for each sequence, or of where each begins and the last ends."""
    needs = f"int32 [{'batch + 1' if count is None else count}] on {device}"
    if not isinstance(tensor, torch.Tensor):
        raise bad_argument(name, describe(tensor), needs, TypeError)
    fits = tensor.dim() == 1 and (tensor.shape[0] > 0 if count is None else tensor.shape[0] == count)
    if not fits or tensor.dtype != torch.int32 or tensor.device != device:
        raise bad_argument(name, describe(tensor), needs)


def check_values(name: str, tensor: torch.Tensor, least: int, most: int) -> None:
    """Checks numbers whose values may be read, unless a compiler looks on."""
    if is_watched():
        return
    low, high = (int(bound) for bound in torch.aminmax(tensor)) if tensor.numel() else (least, most)
    if low < least or high > most:
        raise bad_argument(name, f"values from {low} to {high}", f"{least} to {most}")


def check_out(out: torch.Tensor | None, q: torch.Tensor, value_dim: int) -> None:
    if out is not None and (out.shape != (*q.shape[:-1], value_dim) or out.device != q.device):
        raise bad_argument("out", describe(out), f"[{', '.join(map(str, q.shape[:-1]))}, {value_dim}] on {q.device}")


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, copied where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
