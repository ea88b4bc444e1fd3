"""pc.sparse_latent_attention: decodes over the blocks that an indexer chose, 2,048 tokens as DeepSeek's takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import pc

from ..harness.registry import OURS, Benchmark, Case, Provider, WrongError
from .latent_attention import BLOCK, HEAD_DIM, SCALE, VALUE_DIM, Call, LatentInputs

K = 1024


class ListedInputs(LatentInputs):
    """Calls whose queries, one a sequence, attend to `top_k` blocks each, drawn for it alone."""

    def __init__(self, batch: int, seq_len: int, top_k: int, heads: int, device: torch.device, rotate: int) -> None:
        super().__init__(batch, seq_len, 1, heads, device, rotate)
        share = top_k * BLOCK / seq_len
        self.bytes, self.flops = int(self.bytes * share), int(self.flops * share)
        drawn = [torch.randperm(seq_len // BLOCK)[:top_k].sort().values for _ in range(batch)]
        lists = torch.stack(drawn).int()[:, None].to(device)
        self.calls = [dataclasses.replace(call, lists=lists) for call in self.calls]

    def check(self, call: Call, run: Callable[[], Any]) -> float:
        """Holds the first row against float64: at most twice what eager low precision errs, plus four roundings."""
        got, rows = run().reshape(*call.query.shape[:2], VALUE_DIM), _gathered(call)[0]

        def attend(dtype: torch.dtype) -> torch.Tensor:
            scores = call.query[0].to(dtype) @ rows.to(dtype).T * SCALE
            return scores.softmax(1) @ rows[:, :VALUE_DIM].to(dtype)

        exact = attend(torch.float64)
        allowed = 4 * torch.finfo(call.query.dtype).eps * exact.abs().max().item()
        allowed += 2 * (attend(call.query.dtype).double() - exact).abs().max().item()
        error = (got[0].double() - exact).abs().nan_to_num(nan=float("inf")).max().item()
        if error > allowed:
            raise WrongError(f"off by {error:.3g}, {allowed:.3g} at most")
        return error


def _gathered(call: Call) -> torch.Tensor:
    """The rows that each query attends to: `[batch, tokens, head_dim]`."""
    assert call.lists is not None
    blocks = call.block_tables.long().gather(1, call.lists[:, 0].long())
    return call.cache[blocks].flatten(1, 2)


def _pc(call: Call) -> Callable[[], torch.Tensor]:
    given = {"query_blocks": call.lists, "max_query_len": 1, "max_seq_len": call.seq_len}
    tensors = (call.query, call.cache, call.block_tables, call.seq_lens, call.query_start_loc)
    return lambda: pc.sparse_latent_attention(*tensors, None, SCALE, VALUE_DIM, **given)


def _sdpa(call: Call) -> Callable[[], torch.Tensor]:
    """Rows gathered and attended to by PyTorch."""
    query = call.query[:, :, None]

    def run() -> torch.Tensor:
        rows = _gathered(call)[:, None].expand(-1, query.shape[1], -1, -1)
        return torch.nn.functional.scaled_dot_product_attention(query, rows, rows[..., :VALUE_DIM], scale=SCALE)

    return run


def _case(name: str, device: str, quick: bool, batch: int, seq_len: int, top_k: int, heads: int) -> Case:
    conditions = {"sequences": str(batch), "seq_lens": f"{batch}x{seq_len}", "q_lens": f"{batch}x1"}
    conditions |= {"heads": f"{heads}/1", "head_dim": str(HEAD_DIM), "block_size": str(BLOCK)}
    conditions |= {"live_tokens": str(batch * top_k * BLOCK), "dtype": "float32" if device == "cpu" else "bfloat16"}
    sizes = (batch, seq_len, top_k, heads)
    return Case(name, lambda where, rotate: ListedInputs(*sizes, where, rotate), quick, device, conditions)


CPU = [("decode 1x8k, 2k of it, 16 heads", True, 1, 8 * K, 32, 16)]
CUDA = [
    (f"decode {b}x{s // K}k, 2k of it, {heads} heads", s == 32 * K, b, s, 32, heads)
    for heads in (16, 128)
    for b, s in ((1, 32 * K), (8, 32 * K), (32, 8 * K))
]

BENCHMARK = Benchmark(
    "sparse_latent_attention",
    (*(_case(n, "cpu", *rest) for n, *rest in CPU), *(_case(n, "cuda", *rest) for n, *rest in CUDA)),
    (
        Provider(OURS, _pc, lambda: pc.__version__),
        Provider("torch SDPA over gathered rows", _sdpa, lambda: torch.__version__),
    ),
)
