"""pc.latent_attention: decodes of DeepSeek's models, of all 128 heads and of a tensor-parallel rank's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pc

from ..harness.conditions import version
from ..harness.registry import OURS, Benchmark, Case, Provider, UnsupportedError, WrongError
from .attention_peers import vllm_version

K, HEAD_DIM, VALUE_DIM, BLOCK = 1024, 576, 512, 64
SCALE = 192**-0.5


@dataclass(frozen=True)
class Call:
    """Tensors of one call, named as the operator names them."""

    query: torch.Tensor
    cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    q_len: int
    seq_len: int
    lists: torch.Tensor | None = None  # query_blocks of `sparse_latent_attention`


class LatentInputs:
    """Several calls over disjoint blocks of one cache, at least `rotate` bytes of rows together."""

    def __init__(self, batch: int, seq_len: int, q_len: int, heads: int, device: torch.device, rotate: int) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        width, tokens = -(-seq_len // BLOCK), batch * q_len
        self.bytes = (batch * seq_len * HEAD_DIM + tokens * heads * (HEAD_DIM + VALUE_DIM)) * dtype.itemsize
        pairs = batch * sum(seq_len - i for i in range(q_len))
        self.flops = 2 * pairs * heads * (HEAD_DIM + VALUE_DIM)
        copies = max(2, min(16, -(-rotate // (batch * seq_len * HEAD_DIM * dtype.itemsize))))
        generator = torch.Generator(device).manual_seed(0)
        blocks = batch * width
        cache = torch.randn(copies * blocks, BLOCK, HEAD_DIM, generator=generator, device=device, dtype=dtype)
        order = torch.randperm(copies * blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        lens = torch.full((batch,), seq_len, dtype=torch.int32, device=device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len
        self.calls = [
            Call(
                torch.randn(tokens, heads, HEAD_DIM, generator=generator, device=device, dtype=dtype),
                cache,
                own.view(batch, width).to(device),
                lens,
                starts,
                q_len,
                seq_len,
            )
            for own in order.split(blocks)
        ]

    def check(self, call: Call, run: Callable[[], Any]) -> float:
        """Holds the first and the last row against float64: at most twice what eager low precision errs."""
        got = run()
        got = (got[0] if isinstance(got, tuple) else got).reshape(*call.query.shape[:2], VALUE_DIM)
        error = allowed = 0.0
        for row in (0, call.query.shape[0] - 1):
            sequence, i = divmod(row, call.q_len)
            rows = call.cache[call.block_tables[sequence].long()].flatten(0, 1)[: call.seq_len - call.q_len + i + 1]

            def attend(dtype: torch.dtype, row: int = row, rows: torch.Tensor = rows) -> torch.Tensor:
                scores = call.query[row].to(dtype) @ rows.to(dtype).T * SCALE
                return scores.softmax(1) @ rows[:, :VALUE_DIM].to(dtype)

            exact = attend(torch.float64)
            rounding = 4 * torch.finfo(call.query.dtype).eps * exact.abs().max().item()
            eager_error = (attend(call.query.dtype).double() - exact).abs().max().item()
            allowed = max(allowed, 2 * eager_error + rounding)
            error = max(error, (got[row].double() - exact).abs().nan_to_num(nan=float("inf")).max().item())
        if error > allowed:
            raise WrongError(f"off by {error:.3g}, {allowed:.3g} at most")
        return error


def _tensors(call: Call) -> tuple[torch.Tensor, ...]:
    return call.query, call.cache, call.block_tables, call.seq_lens, call.query_start_loc


def _pc(call: Call) -> Callable[[], torch.Tensor]:
    plan = pc.attention_plan(*_tensors(call)[2:], BLOCK, num_kv_heads=max(1, call.query.shape[1] // 32))
    given = {"plan": plan, "max_query_len": call.q_len, "max_seq_len": call.seq_len}
    return lambda: pc.latent_attention(*_tensors(call), SCALE, VALUE_DIM, **given)


def _sdpa(call: Call) -> Callable[[], torch.Tensor]:
    """Rows gathered and attended to by PyTorch, as many keys as values."""
    batch, q_len = call.seq_lens.shape[0], call.q_len
    mask = torch.ones(q_len, call.seq_len, dtype=torch.bool, device=call.query.device).tril(call.seq_len - q_len)
    query = call.query.view(batch, q_len, *call.query.shape[1:]).transpose(1, 2)

    def run() -> torch.Tensor:
        rows = call.cache[call.block_tables.long()].flatten(1, 2)[:, None, : call.seq_len]
        rows = rows.expand(-1, query.shape[1], -1, -1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, rows, rows[..., :VALUE_DIM], attn_mask=None if q_len == 1 else mask, scale=SCALE
        )
        return out.transpose(1, 2)

    return run


def _flash_mla(call: Call) -> Callable[[], Any]:
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    batch, heads = call.seq_lens.shape[0], call.query.shape[1]
    metadata = get_mla_metadata(call.seq_lens, call.q_len * heads, 1)
    query = call.query.view(batch, call.q_len, heads, HEAD_DIM)
    return lambda: flash_mla_with_kvcache(
        query, call.cache.unsqueeze(2), call.block_tables, call.seq_lens, VALUE_DIM, *metadata,
        softmax_scale=SCALE, causal=True,
    )  # fmt: skip


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
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    if call.q_len > 1:
        raise UnsupportedError("several queries a sequence")
    batch, heads, splits = call.seq_lens.shape[0], call.query.shape[1], 4  # as vLLM's backend has it
    out = call.query.new_empty(batch, heads, VALUE_DIM)
    lse, parts = out.new_empty(batch, heads), out.new_empty(batch, heads, splits, VALUE_DIM + 1, dtype=torch.float32)
    rows = call.cache.unsqueeze(2)

    def run() -> torch.Tensor:
        decode_attention_fwd(
            call.query, rows, rows[..., :VALUE_DIM], out, lse, call.block_tables, call.seq_lens, parts, splits, SCALE,
            BLOCK,
        )  # fmt: skip
        return out

    return run


def _case(name: str, device: str, quick: bool, batch: int, seq_len: int, q_len: int, heads: int) -> Case:
    conditions = {"sequences": str(batch), "seq_lens": f"{batch}x{seq_len}", "q_lens": f"{batch}x{q_len}"}
    conditions |= {"heads": f"{heads}/1", "head_dim": str(HEAD_DIM), "block_size": str(BLOCK)}
    conditions["dtype"] = "float32" if device == "cpu" else "bfloat16"
    sizes = (batch, seq_len, q_len, heads)
    return Case(name, lambda where, rotate: LatentInputs(*sizes, where, rotate), quick, device, conditions)


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
_torch_version = lambda: torch.__version__  # noqa: E731

BENCHMARK = Benchmark(
    "latent_attention",
    (*(_case(n, "cpu", *rest) for n, *rest in CPU), *(_case(n, "cuda", *rest) for n, *rest in CUDA)),
    (
        Provider(OURS, _pc, lambda: pc.__version__),
        Provider("torch SDPA over gathered rows", _sdpa, _torch_version),
        Provider("FlashMLA", _flash_mla, lambda: version("flash_mla"), "cuda"),
        Provider("FlashInfer", _flashinfer, lambda: version("flashinfer-python"), "cuda"),
        Provider("vLLM Triton MLA", _vllm, vllm_version, "cuda"),
    ),
)
