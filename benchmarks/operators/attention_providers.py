"""Providers of attention: this package, PyTorch, and the kernels of other projects where they are installed.

Every provider gets the same tensors. Plans, masks and compacted tables, which a serving engine prepares once a step for
all layers, are prepared outside the timing for every provider.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

import pc

from ..harness.conditions import version
from ..harness.registry import OURS, Benchmark, Provider, UnsupportedError
from .attention import AttentionCall, attention_case
from .attention_peers import (
    refuse_beyond_dense,
    run_flash_attn_3,
    run_flash_attn_4,
    run_flashinfer,
    run_vllm_triton,
    vllm_version,
)

Run = Callable[[], Any]


def _pc(op: str, call: AttentionCall, planned: bool = True, batch_invariant: bool = False) -> Run:
    arguments = call.arguments(op)
    if batch_invariant:
        arguments["batch_invariant"] = True
    if planned:
        arguments["plan"] = make_plan(call, arguments)
    return functools.partial(getattr(pc, op), **arguments)


def make_plan(call: AttentionCall, arguments: dict[str, Any]) -> torch.Tensor | None:
    """Return the step's plan, which all layers share; None for CPU tensors, where PyTorch uses none."""
    if call.query.device.type == "cpu":
        return None
    names = ("window", "num_sink_tokens", "query_positions", "num_shared_blocks", "batch_invariant")
    given = {name: arguments[name] for name in names if name in arguments}
    tensors = (arguments[name] for name in ("block_tables", "seq_lens", "query_start_loc"))
    # The one KV head of latent rows counts as a head for every 32 query heads.
    heads = max(1, call.case.heads[0] // 32) if call.case.value_dim else call.case.heads[1]
    plan: torch.Tensor = pc.attention_plan(*tensors, call.case.block_size, num_kv_heads=heads, **given)
    return plan


def _sdpa(call: AttentionCall) -> Run:
    """Gather live keys and values of sequences of one shape, for scaled_dot_product_attention."""
    case, device = call.case, call.query.device
    if case.cache_dtype or case.sinks or case.kept < 1:
        raise UnsupportedError("quantized cache, attention sinks or blocks of each head's own")
    tables, starts = call.block_tables.cpu().numpy(), np.cumsum([0, *case.q_lens])
    groups: dict[tuple[int, int], list[int]] = {}
    for i, lengths in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        groups.setdefault(lengths, []).append(i)
    parts = []
    for (_, q_len), members in groups.items():
        positions = case.positions(members[0])
        if len(positions) * case.seq_lens[members[0]] > 1 << 28 and not _square(call, members[0]):
            raise UnsupportedError("a mask of more than 256 MB")
        mask, live = _mask(call, members[0], positions)
        slots = np.stack(
            [tables[i][live // case.block_size] * case.block_size + live % case.block_size for i in members]
        )
        rows = np.stack([np.arange(starts[i], starts[i] + q_len) for i in members])
        parts.append(
            (
                torch.from_numpy(slots).long().to(device),
                None if len(groups) == 1 else torch.from_numpy(rows).to(device),
                mask if mask is None or isinstance(mask, str) else torch.from_numpy(mask).to(device),
            )
        )
    block_size, shape = case.block_size, call.query.shape

    def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return cache[slots // block_size, slots % block_size].transpose(1, 2)

    def run() -> torch.Tensor:
        out = torch.empty(shape, dtype=call.query.dtype, device=device) if len(parts) > 1 else None
        for slots, rows, mask in parts:
            q = call.query.view(slots.shape[0], -1, *shape[1:]) if rows is None else call.query[rows]
            o = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2),
                read(call.key_cache, slots),
                read(call.value_cache, slots),
                attn_mask=mask if isinstance(mask, torch.Tensor) else None,
                is_causal=isinstance(mask, str),
                scale=call.scale,
                enable_gqa=True,
            ).transpose(1, 2)
            if out is None:
                return o.reshape(shape)
            out[rows] = o
        assert out is not None
        return out

    return run


def _square(call: AttentionCall, i: int) -> bool:
    """Return whether sequence `i` is a whole prefill, for which PyTorch needs no mask."""
    case = call.case
    return case.live is None and not case.window and case.q_lens[i] == case.seq_lens[i]


def _mask(call: AttentionCall, i: int, positions: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return None, "causal" or an array `[queries, live keys]`, and the keys that any query attends to."""
    case = call.case
    if _square(call, i):
        return ("causal" if case.q_lens[i] > 1 else None), np.arange(case.seq_lens[i])
    visible = case.visible(i, positions)
    live = np.flatnonzero(visible.any(axis=0))
    mask = visible[:, live]
    return (None if mask.all() else mask), live


def _compacted(call: AttentionCall) -> Run:
    """Remove the dead blocks from the table for the dense kernel; exact only after block-aligned holes."""
    case = call.case
    if case.kept < 1:
        return _compacted_heads(call, copies=True)
    if case.live is None or case.window or case.queries is not None:
        raise UnsupportedError("compaction needs holes, all queries behind them, and no window")
    tables = call.block_tables.cpu()
    kept = [row[row >= 0] for row in tables]
    arguments = _dense(call, kept, [int(case.present(i).sum()) for i in range(len(kept))])
    return functools.partial(pc.paged_attention, **arguments)


def _dense(call: AttentionCall, blocks: Sequence[torch.Tensor], lens: list[int]) -> dict[str, Any]:
    """Return arguments of the dense kernel over some blocks of each sequence, with their number of tokens."""
    tables = torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True).int()
    arguments = call.arguments("paged_attention") | {
        "block_tables": tables.to(call.query.device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=call.query.device),
        "max_seq_len": max(lens),
    }
    return arguments | {"plan": make_plan(call, arguments)}


def _compacted_heads(call: AttentionCall, copies: bool) -> Run:
    """Copy each head's blocks together for the dense kernel, which then has as many tokens and the same result.

    Args:
        call: Heads with blocks of their own, its queries after them.
        copies: Whether each call copies; otherwise it is done once, outside of the timing.
    """
    case = call.case
    if case.kept == 1:
        raise UnsupportedError("blocks that all heads share")
    chosen = [torch.from_numpy(case.chosen(i)).to(call.query.device) for i in range(len(case.seq_lens))]
    tables, heads = call.block_tables, torch.arange(case.heads[1], device=call.query.device)
    numbers = torch.cat([tables[i].expand(len(heads), -1).gather(1, own) for i, own in enumerate(chosen)], dim=1).long()
    size, lens = case.block_size, [own.shape[1] * case.block_size for own in chosen]
    # Tokens of the last block that are not there yet.
    lens = [n - -length % size for n, length in zip(lens, case.seq_lens, strict=True)]
    places = torch.arange(numbers.shape[1])
    if not copies:
        # Blocks of a pool lie anywhere in it; a copy of the moment is in order.
        pool = sum(-(-length // size) for length in case.seq_lens)
        places = torch.randperm(pool, generator=torch.Generator().manual_seed(0))[: len(places)]

    def copied(cache: torch.Tensor) -> torch.Tensor:
        # Head-major as they are gathered, [heads, blocks, slots, dim].
        return cache.transpose(1, 2)[numbers, heads[:, None]].permute(1, 2, 0, 3)

    def pooled(cache: torch.Tensor) -> torch.Tensor:
        shape = (pool, len(heads), size, cache.shape[3]) if case.layout == "HND" else (pool, *cache.shape[1:])
        made = cache.new_empty(shape)
        made = made.transpose(1, 2) if case.layout == "HND" else made
        return made.index_copy_(0, places.to(made.device), copied(cache))

    arguments = _dense(call, places.split([own.shape[1] for own in chosen]), lens)
    kept = {} if copies else {"key_cache": pooled(call.key_cache), "value_cache": pooled(call.value_cache)}

    def run() -> torch.Tensor:
        made = kept or {"key_cache": copied(call.key_cache), "value_cache": copied(call.value_cache)}
        return pc.paged_attention(**{**arguments, **made})

    return run


def _flex(call: AttentionCall, compile: bool = True) -> Run:
    """Prepare FlexAttention over the cache, with the page tables that PyTorch has for it."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, device, size = call.case, call.query.device, call.case.block_size
    if case.sinks or case.cache_dtype or case.shared or case.kept < 1:
        raise UnsupportedError("attention sinks, quantized cache, shared blocks or blocks of each head's own")
    if len(set(case.q_lens)) != 1:
        raise UnsupportedError("sequences of unequal query length")
    if call.key_cache.stride(1) != case.heads[1] * case.head_dim:
        raise UnsupportedError("head-major caches")
    batch, q_len, tables = len(case.q_lens), case.q_lens[0], call.block_tables.long()
    held = tables >= 0
    paged = PagedAttention(call.key_cache.shape[0], size, batch, device)
    paged.page_table[:, : tables.shape[1]] = tables
    sequences, logical = held.nonzero(as_tuple=True)
    paged.physical_to_logical[sequences, tables[held]] = logical
    positions = torch.from_numpy(np.stack([case.positions(i) for i in range(batch)])).to(device)

    def visible(b: Any, h: Any, q: Any, t: Any) -> Any:
        p = positions[b, q]
        mask = (t <= p) & held[b, t // size]
        if case.window:
            mask = mask & ((t > p - case.window) | (t < case.num_sink_tokens))
        return mask

    whole = create_block_mask(visible, batch, None, q_len, tables.shape[1] * size, device, (128, size))
    mask = paged.convert_logical_block_mask(whole, kv_len=call.seq_lens)
    keys, values = (c.flatten(0, 1).transpose(0, 1)[None] for c in (call.key_cache, call.value_cache))
    query = call.query.view(batch, q_len, *call.query.shape[1:]).transpose(1, 2)
    attend = _compiled_flex() if compile else flex_attention
    options = {"BLOCK_N": min(size, 64)} if compile else None
    return lambda: attend(
        query, keys, values, block_mask=mask, scale=call.scale, enable_gqa=True, kernel_options=options
    ).transpose(1, 2)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # One compilation a case; past the limit it would run uncompiled without a word.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False)


def _varlen(call: AttentionCall) -> Run:
    from torch.nn.attention.varlen import varlen_attn

    refuse_beyond_dense(call, "varlen_attn")
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise UnsupportedError("varlen_attn has no block table before torch 2.12")
    case = call.case
    starts = torch.tensor([0, *np.cumsum(case.seq_lens).tolist()], dtype=torch.int32, device=call.query.device)
    return lambda: varlen_attn(
        call.query,
        call.key_cache,
        call.value_cache,
        call.query_start_loc,
        starts,
        max(case.q_lens),
        max(case.seq_lens),
        scale=call.scale,
        window_size=(case.window - 1 if case.window else -1, 0),
        enable_gqa=True,
        seqused_k=call.seq_lens,
        block_table=call.block_tables,
    )


def _varlen_version() -> str:
    from torch.nn.attention import varlen  # noqa: F401  where torch has it

    return torch.__version__


def ours(op: str, name: str = OURS, device: str | None = None, **options: bool) -> Provider:
    """Return one of our attention operators, with options of `_pc`."""
    return Provider(name, functools.partial(_pc, op, **options), lambda: pc.__version__, device)


def attention_providers(op: str) -> tuple[Provider, ...]:
    """Return ours and all rivals for one of the attention operators over keys and values."""
    torch_version = lambda: torch.__version__  # noqa: E731
    beside: list[Provider] = []
    if op == "sparse_gap_attention":
        copied = functools.partial(_compacted_heads, copies=False)
        beside.append(Provider("compaction + pc.paged_attention", _compacted, lambda: pc.__version__))
        beside.append(Provider("pc.paged_attention over a copy made before", copied, lambda: pc.__version__))
    if op == "shared_prefix_attention":
        beside.append(ours("paged_attention", "each alone: pc.paged_attention"))
    return (
        ours(op),
        ours(op, "pc, planning in each call", "cuda", planned=False),
        ours(op, "pc, batch-invariant", "cuda", batch_invariant=True),
        *beside,
        Provider("torch SDPA over gathered KV", _sdpa, torch_version),
        Provider("FlexAttention, paged mask", _flex, torch_version, "cuda"),
        Provider("torch varlen_attn", _varlen, _varlen_version, "cuda"),
        Provider("FlashInfer", run_flashinfer, lambda: version("flashinfer-python"), "cuda"),
        Provider("FlashAttention-3", run_flash_attn_3, lambda: f"vLLM {vllm_version()}", "cuda"),
        Provider("flash-attn-4", run_flash_attn_4, lambda: version("flash-attn-4"), "cuda"),
        Provider("vLLM unified_attention", run_vllm_triton, vllm_version, "cuda"),
    )


def attention_benchmark(
    op: str,
    cpu: Iterable[tuple[str, dict[str, Any], bool]],
    cuda: Iterable[tuple[str, dict[str, Any]]],
    quick: Collection[str],
    providers: tuple[Provider, ...] = (),
) -> Benchmark:
    """Return the benchmark of an attention operator; cases are arguments of `AttentionCase` by name.

    Args:
        op: Its name.
        cpu: Cases, and whether each is a quick one.
        cuda: Cases.
        quick: Names of those that are.
        providers: Ours and the rivals; by default those of `attention_providers`.
    """
    cases = [attention_case(name, "cpu", is_quick, **given) for name, given, is_quick in cpu]
    cases += [attention_case(name, "cuda", name in quick, **given) for name, given in cuda]
    return Benchmark(op, tuple(cases), providers or attention_providers(op))
