"""pc.latent_attention and sparse_latent_attention: decodes of DeepSeek's models, of all heads and of a rank's.

The sparse ones are over the blocks that an indexer chose, 2,048 tokens as DeepSeek's takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..harness.conditions import version
from ..harness.registry import Provider, UnsupportedError
from .attention import AttentionCall, uniform
from .attention_peers import listed_blocks, run_vllm_latent, vllm_version
from .attention_providers import attention_benchmark, ours

K, HEAD_DIM, VALUE_DIM, BLOCK = 1024, 576, 512, 64
SCALE = 192**-0.5


def _gathered(call: AttentionCall) -> torch.Tensor:
    """Return the rows of each sequence's blocks, or of listed blocks: `[batch, tokens, head_dim]`."""
    blocks = call.block_tables.long()
    blocks = blocks if call.query_blocks is None else blocks.gather(1, call.query_blocks[:, 0].long())
    return call.key_cache[blocks].flatten(1, 3)


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
    blocks, begins = listed_blocks(call)
    pages = (call.query_start_loc, begins.to(device), blocks, call.seq_lens)
    dtype, rest = call.query.dtype, HEAD_DIM - VALUE_DIM
    wrapper.plan(*pages, heads, VALUE_DIM, rest, BLOCK, True, SCALE, dtype, dtype)
    parts = [tensor.split([VALUE_DIM, rest], dim=2) for tensor in (call.query, call.key_cache[:, :, 0])]
    return lambda: wrapper.run(*parts[0], *parts[1])


def _vllm(call: AttentionCall) -> Callable[[], torch.Tensor]:
    if call.case.q_lens[0] > 1:
        raise UnsupportedError("several queries a sequence")
    return run_vllm_latent(call.query, call.key_cache, call.block_tables, call.seq_lens, VALUE_DIM, SCALE)


def latent(batch: int, seq_len: int, heads: int, q_len: int = 1, top_k: int = 0) -> dict[str, Any]:
    """Return the conditions of a case; with `top_k`, each query has a list of that many blocks."""
    sizes = {"heads": (heads, 1), "head_dim": HEAD_DIM, "block_size": BLOCK, "value_dim": VALUE_DIM, "scale": SCALE}
    sizes |= {"kept": top_k * BLOCK / seq_len, "lists": True} if top_k else {}
    return uniform(batch, seq_len, q_len, **sizes)


CPU = [
    ("decode 1x4k, 16 heads", latent(1, 4 * K, 16), True),
    ("decode 8x1k, 16 heads", latent(8, K, 16), True),
    ("decode 1x4k, 128 heads", latent(1, 4 * K, 128), False),
    ("4 queries over 4k, 16 heads", latent(1, 4 * K, 16, 4), False),
]
CUDA = [
    (f"decode {b}x{s // K}k, {heads} heads", latent(b, s, heads))
    for heads in (16, 64, 128)
    for b, s in ((1, 4 * K), (1, 32 * K), (8, 32 * K), (32, 4 * K), (64, 8 * K), (128, 4 * K))
]
CUDA += [(f"{q} queries over 32x4k, {heads} heads", latent(32, 4 * K, heads, q)) for heads in (16, 128) for q in (2, 4)]
QUICK = [name for name, _ in CUDA if name.startswith("decode 32x4k")]

SPARSE_CPU = [("decode 1x8k, 2k of it, 16 heads", latent(1, 8 * K, 16, top_k=32), True)]
SPARSE_CUDA = [
    (f"decode {b}x{s // K}k, 2k of it, {heads} heads", latent(b, s, heads, top_k=32))
    for heads in (16, 128)
    for b, s in ((1, 32 * K), (8, 32 * K), (32, 8 * K))
]
SPARSE_QUICK = [name for name, _ in SPARSE_CUDA if "x32k" in name]

SDPA = Provider("torch SDPA over gathered rows", _sdpa, lambda: torch.__version__)
FLASHINFER = Provider("FlashInfer", _flashinfer, lambda: version("flashinfer-python"), "cuda")
VLLM = Provider("vLLM Triton MLA", _vllm, vllm_version, "cuda")

BENCHMARKS = (
    attention_benchmark("latent_attention", CPU, CUDA, QUICK, (ours("latent_attention"), SDPA, FLASHINFER, VLLM)),
    attention_benchmark(
        "sparse_latent_attention", SPARSE_CPU, SPARSE_CUDA, SPARSE_QUICK, (ours("sparse_latent_attention"), SDPA)
    ),
)
