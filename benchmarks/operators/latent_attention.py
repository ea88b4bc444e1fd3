"""pc.latent_attention and sparse_latent_attention: decodes of DeepSeek's models, of all heads and of a rank's.

The sparse ones are over the blocks that an indexer chose, 2,048 tokens as DeepSeek's takes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch

import pc

from ..harness.conditions import version
from ..harness.registry import OURS, Benchmark, Case, Provider, UnsupportedError
from .attention import AttentionCall, attention_case
from .attention_peers import run_vllm_latent, vllm_version

K, HEAD_DIM, VALUE_DIM, BLOCK = 1024, 576, 512, 64
SCALE = 192**-0.5
COLUMNS = ("sequences", "seq_lens", "q_lens", "heads", "head_dim", "block_size", "live_tokens", "dtype")


def _gathered(call: AttentionCall) -> torch.Tensor:
    """Return the rows of each sequence's blocks, or of listed blocks: `[batch, tokens, head_dim]`."""
    blocks = call.block_tables.long()
    blocks = blocks if call.query_blocks is None else blocks.gather(1, call.query_blocks[:, 0].long())
    return call.key_cache[blocks].flatten(1, 3)


def _pc(op: str, call: AttentionCall) -> Callable[[], torch.Tensor]:
    given = call.arguments(op)
    if op == "latent_attention":
        tensors = (given[name] for name in ("block_tables", "seq_lens", "query_start_loc"))
        given["plan"] = pc.attention_plan(*tensors, BLOCK, num_kv_heads=max(1, call.query.shape[1] // 32))
    return functools.partial(getattr(pc, op), **given)


def _sdpa(call: AttentionCall) -> Callable[[], torch.Tensor]:
    """Prepare PyTorch's attention over gathered rows."""
    q_len, seq_len = call.case.q_lens[0], call.case.seq_lens[0]
    mask = torch.ones(q_len, seq_len, dtype=torch.bool, device=call.query.device).tril(seq_len - q_len)
    query = call.query.unflatten(0, (-1, q_len)).transpose(1, 2)

    def run() -> torch.Tensor:
        rows = _gathered(call)[:, None, :seq_len].expand(-1, query.shape[1], -1, -1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, rows, rows[..., :VALUE_DIM], attn_mask=None if q_len == 1 else mask, scale=SCALE
        )
        return out.transpose(1, 2)

    return run


def _flashinfer(call: AttentionCall) -> Callable[[], torch.Tensor]:
    import flashinfer

    device, heads = call.query.device, call.query.shape[1]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.zeros(128 << 20, dtype=torch.uint8, device=device))
    counts = [-(-length // BLOCK) for length in call.seq_lens.tolist()]
    pages = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    dtype, rest = call.query.dtype, HEAD_DIM - VALUE_DIM
    wrapper.plan(
        call.query_start_loc, pages, call.block_tables.flatten(), call.seq_lens, heads, VALUE_DIM, rest, BLOCK, True,
        SCALE, dtype, dtype,
    )  # fmt: skip
    parts = [tensor.split([VALUE_DIM, rest], dim=2) for tensor in (call.query, call.key_cache[:, :, 0])]
    return lambda: wrapper.run(*parts[0], *parts[1])


def _vllm(call: AttentionCall) -> Callable[[], torch.Tensor]:
    if call.case.q_lens[0] > 1:
        raise UnsupportedError("several queries a sequence")
    return run_vllm_latent(call.query, call.key_cache, call.block_tables, call.seq_lens, VALUE_DIM, SCALE)


def _case(
    name: str, device: str, quick: bool, batch: int, seq_len: int, q_len: int, heads: int, top_k: int = 0
) -> Case:
    """Return a case; with `top_k`, each query has a list of that many blocks."""
    sizes = {"seq_lens": (seq_len,) * batch, "q_lens": (q_len,) * batch, "heads": (heads, 1), "head_dim": HEAD_DIM}
    sizes |= {"block_size": BLOCK, "value_dim": VALUE_DIM, "scale": SCALE}
    sizes |= {"kept": top_k * BLOCK / seq_len, "lists": True} if top_k else {}
    made = attention_case(name, device, quick, **sizes)
    return dataclasses.replace(made, conditions={name: text for name in COLUMNS if (text := made.conditions[name])})


CPU = [
    ("decode 1x4k, 16 heads", True, 1, 4 * K, 1, 16),
    ("decode 8x1k, 16 heads", True, 8, K, 1, 16),
    ("decode 1x4k, 128 heads", False, 1, 4 * K, 1, 128),
    ("4 queries over 4k, 16 heads", False, 1, 4 * K, 4, 16),
]
CUDA = [
    (f"decode {b}x{s // K}k, {heads} heads", (b, s) == (32, 4 * K), b, s, 1, heads)
    for heads in (16, 64, 128)
    for b, s in ((1, 4 * K), (1, 32 * K), (8, 32 * K), (32, 4 * K), (64, 8 * K), (128, 4 * K))
]
CUDA += [(f"{q} queries over 32x4k, {heads} heads", False, 32, 4 * K, q, heads) for heads in (16, 128) for q in (2, 4)]
SPARSE = [
    (f"decode {b}x{s // K}k, 2k of it, {heads} heads", s == 32 * K, b, s, 1, heads, 32)
    for heads in (16, 128)
    for b, s in ((1, 32 * K), (8, 32 * K), (32, 8 * K))
]
SDPA = Provider("torch SDPA over gathered rows", _sdpa, lambda: torch.__version__)

BENCHMARKS = (
    Benchmark(
        "latent_attention",
        (*(_case(n, "cpu", *rest) for n, *rest in CPU), *(_case(n, "cuda", *rest) for n, *rest in CUDA)),
        (
            Provider(OURS, functools.partial(_pc, "latent_attention"), lambda: pc.__version__),
            SDPA,
            Provider("FlashInfer", _flashinfer, lambda: version("flashinfer-python"), "cuda"),
            Provider("vLLM Triton MLA", _vllm, vllm_version, "cuda"),
        ),
    ),
    Benchmark(
        "sparse_latent_attention",
        (
            _case("decode 1x8k, 2k of it, 16 heads", "cpu", True, 1, 8 * K, 1, 16, 32),
            *(_case(n, "cuda", *rest) for n, *rest in SPARSE),
        ),
        (Provider(OURS, functools.partial(_pc, "sparse_latent_attention"), lambda: pc.__version__), SDPA),
    ),
)
