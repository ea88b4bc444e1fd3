"""pc.latent_attention and sparse_latent_attention: decodes of DeepSeek's models, of all heads and of a rank's.

The sparse ones are over the blocks that an indexer chose, 2,048 tokens as DeepSeek's takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch

import pc

from ..harness.conditions import version
from ..harness.inputs import Call, Draw, Expected, Inputs, default_dtype, paged_batch, shuffled
from ..harness.registry import OURS, Benchmark, Case, Provider, UnsupportedError, case
from .attention import expected_rows
from .attention_peers import run_vllm_latent, vllm_version

K, HEAD_DIM, VALUE_DIM, BLOCK = 1024, 576, 512, 64
SCALE = 192**-0.5


def latent_inputs(
    batch: int, seq_len: int, q_len: int, heads: int, top_k: int, device: torch.device, rotate: int
) -> Inputs:
    """Return calls over disjoint blocks of one cache; with `top_k`, each query has a list of that many blocks."""
    dtype, width, tokens = default_dtype(device), -(-seq_len // BLOCK), batch * q_len
    share = top_k * BLOCK / seq_len if top_k else 1

    def calls(draw: Draw, copies: int) -> Iterable[Call]:
        cache = draw(copies * batch * width, BLOCK, HEAD_DIM).to(dtype)
        lists = torch.stack([torch.randperm(width)[: top_k or 1].sort().values for _ in range(batch)])
        for own in shuffled(len(cache), torch.device("cpu")).split(batch * width):
            tables, lens, starts = paged_batch((seq_len,) * batch, (q_len,) * batch, BLOCK, own)
            yield Call(
                query=draw(tokens, heads, HEAD_DIM).to(dtype),
                cache=cache,
                block_tables=tables.to(device),
                seq_lens=lens.to(device),
                query_start_loc=starts.to(device),
                q_len=q_len,
                seq_len=seq_len,
                lists=lists.int()[:, None].to(device) if top_k else None,
            )

    def reference(call: Call) -> Iterable[Expected]:
        rows, names = call.cache.unsqueeze(2), ("query", "block_tables", "seq_lens")
        given = {name: getattr(call, name) for name in names} | {"query_blocks": call.lists, "scale": SCALE}
        places = {row: (row // q_len, seq_len - q_len + row % q_len) for row in (0, tokens - 1)}
        yield expected_rows(given | {"key_cache": rows, "value_cache": rows[..., :VALUE_DIM]}, places)

    moved = (batch * seq_len * HEAD_DIM + tokens * heads * (HEAD_DIM + VALUE_DIM)) * dtype.itemsize
    pairs, held = batch * sum(seq_len - i for i in range(q_len)), batch * seq_len * HEAD_DIM * dtype.itemsize
    flops = 2 * pairs * heads * (HEAD_DIM + VALUE_DIM)
    return Inputs(calls, reference, int(moved * share), int(flops * share), device, rotate, held)


def _gathered(call: Call) -> torch.Tensor:
    """Return the rows of each sequence's blocks, or of listed blocks: `[batch, tokens, head_dim]`."""
    blocks = call.block_tables.long()
    blocks = blocks if call.lists is None else blocks.gather(1, call.lists[:, 0].long())
    return call.cache[blocks].flatten(1, 2)


def _tensors(call: Call) -> tuple[torch.Tensor, ...]:
    return call.query, call.cache, call.block_tables, call.seq_lens, call.query_start_loc


def _pc(call: Call) -> Callable[[], torch.Tensor]:
    given = {"max_query_len": call.q_len, "max_seq_len": call.seq_len}
    if call.lists is not None:
        given["query_blocks"] = call.lists
        return lambda: pc.sparse_latent_attention(*_tensors(call), None, SCALE, VALUE_DIM, **given)
    given["plan"] = pc.attention_plan(*_tensors(call)[2:], BLOCK, num_kv_heads=max(1, call.query.shape[1] // 32))
    return lambda: pc.latent_attention(*_tensors(call), SCALE, VALUE_DIM, **given)


def _sdpa(call: Call) -> Callable[[], torch.Tensor]:
    """Prepare PyTorch's attention over gathered rows."""
    batch, q_len = call.seq_lens.shape[0], call.q_len
    mask = torch.ones(q_len, call.seq_len, dtype=torch.bool, device=call.query.device).tril(call.seq_len - q_len)
    query = call.query.view(batch, q_len, *call.query.shape[1:]).transpose(1, 2)

    def run() -> torch.Tensor:
        rows = _gathered(call)[:, None, : call.seq_len].expand(-1, query.shape[1], -1, -1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, rows, rows[..., :VALUE_DIM], attn_mask=None if q_len == 1 else mask, scale=SCALE
        )
        return out.transpose(1, 2)

    return run


def _flashinfer(call: Call) -> Callable[[], torch.Tensor]:
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
    parts = [tensor.split([VALUE_DIM, rest], dim=2) for tensor in (call.query, call.cache)]
    return lambda: wrapper.run(*parts[0], *parts[1])


def _vllm(call: Call) -> Callable[[], torch.Tensor]:
    if call.q_len > 1:
        raise UnsupportedError("several queries a sequence")
    return run_vllm_latent(call.query, call.cache.unsqueeze(2), call.block_tables, call.seq_lens, VALUE_DIM, SCALE)


def _case(
    name: str, device: str, quick: bool, batch: int, seq_len: int, q_len: int, heads: int, top_k: int = 0
) -> Case:
    columns = {"sequences": batch, "seq_lens": f"{batch}x{seq_len}", "q_lens": f"{batch}x{q_len}"}
    columns |= {"heads": f"{heads}/1", "head_dim": HEAD_DIM, "block_size": BLOCK}
    columns |= {"live_tokens": batch * top_k * BLOCK} if top_k else {}
    columns |= {"dtype": "float32" if device == "cpu" else "bfloat16"}
    return case(name, device, quick, latent_inputs, batch, seq_len, q_len, heads, top_k, **columns)


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
ALL = (
    Provider(OURS, _pc, lambda: pc.__version__),
    Provider("torch SDPA over gathered rows", _sdpa, lambda: torch.__version__),
)

BENCHMARKS = (
    Benchmark(
        "latent_attention",
        (*(_case(n, "cpu", *rest) for n, *rest in CPU), *(_case(n, "cuda", *rest) for n, *rest in CUDA)),
        (
            *ALL,
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
        ALL,
    ),
)
