"""Steps for SGLang's attention backends without an engine: SGLang's pools, layers and batches, and a reference."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import flash_cases
import torch

HEADS, KV_HEADS, DIM, CONTEXT = 4, 2, 32, 192


class Scene:
    """A pool, its table of slots, its layers, and the keys and values that each request passed."""

    def __init__(
        self,
        page_size: int = 16,
        windows: tuple[int, ...] = (0,),
        window_pool: bool = False,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        value_dim: int = DIM,
        num_requests: int = 6,
        **layer_options: Any,
    ) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        self.page_size, self.windows, self.window_pool, self.dtype = page_size, windows, window_pool, dtype
        self.rand = random.Random(0)
        self.num_pages = 2 + num_requests * -(-CONTEXT // page_size)
        size = (self.num_pages - 1) * page_size
        sizes = {"page_size": page_size, "dtype": cache_dtype or dtype, "head_num": KV_HEADS, "head_dim": DIM}
        sizes |= {"device": "cpu", "enable_memory_saver": False, "v_head_dim": value_dim}
        self.layers = []
        for number, window in enumerate(windows):
            # SGLang does not count a query's own key.
            sliding = {"sliding_window_size": window - 1 if window else -1, "v_head_dim": value_dim}
            self.layers.append(RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, number, **sliding, **layer_options))
        if window_pool:
            ids = [[n for n, w in enumerate(windows) if bool(w) is windowed] for windowed in (True, False)]
            self.pool: Any = SWAKVPool(
                size=size, size_swa=size, swa_attention_layer_ids=ids[0], full_attention_layer_ids=ids[1], **sizes
            )
            pages = torch.randperm(self.num_pages - 1) + 1
            table = torch.zeros(self.num_pages, dtype=torch.int64)
            table[1:] = pages
            slots = table[:, None] * page_size + torch.arange(page_size)
            slots[0] = 0
            self.pool.register_mapping(torch.cat([slots.view(-1), torch.tensor([-1])]))
        else:
            self.pool = MHATokenToKVPool(size=size, layer_num=len(windows), **sizes)
        self.table = ReqToTokenPool(num_requests, CONTEXT, "cpu", False)
        pages = self.rand.sample(range(1, self.num_pages), self.num_pages - 1)
        per_row = -(-CONTEXT // page_size)
        for row in range(1, num_requests + 1):
            own = torch.tensor(pages[(row - 1) * per_row : row * per_row])
            slots = own[:, None] * page_size + torch.arange(page_size)
            self.table.req_to_token[row] = slots.view(-1)[:CONTEXT]
        self.lengths = dict.fromkeys(range(1, num_requests + 1), 0)
        shape = (num_requests + 1, CONTEXT, KV_HEADS)
        self.keys = [torch.zeros(*shape, DIM, dtype=torch.float64) for _ in windows]
        self.values = [torch.zeros(*shape, value_dim, dtype=torch.float64) for _ in windows]
        self.value_dim = value_dim

    def runner(self, **changes: Any) -> Any:
        """Return a runner with all that a backend reads when it is constructed."""
        config = SimpleNamespace(
            context_len=CONTEXT,
            head_dim=DIM,
            is_encoder_decoder=False,
            is_multimodal=False,
            attention_chunk_size=None,
            get_num_kv_heads=lambda tp: KV_HEADS,
        )
        for name in [name for name in changes if hasattr(config, name)]:
            setattr(config, name, changes.pop(name))
        return SimpleNamespace(
            **{
                "model": torch.nn.ModuleList(self.layers),
                "model_config": config,
                "token_to_kv_pool": self.pool,
                "req_to_token_pool": self.table,
                "page_size": self.page_size,
                "device": "cpu",
                "is_draft_worker": False,
                "use_mla_backend": False,
                "kv_cache_dtype": self.pool.dtype,
                "kv_index_translator": None,
                **changes,
            }
        )

    def batch(self, mode: str, tokens: dict[int, int], spec_info: Any = None, positions: Any = None) -> Any:
        """Return a step of SGLang's forward mode `mode`, in which each request gets as many tokens as `tokens` says."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        rows, counts = list(tokens), list(tokens.values())
        before = [self.lengths[row] for row in rows]
        verify = mode == "TARGET_VERIFY"
        lengths = [b if verify else b + c for b, c in zip(before, counts, strict=True)]
        slots = [self.table.req_to_token[row, b : b + c] for row, b, c in zip(rows, before, counts, strict=True)]
        self.rows, self.before, self.counts = rows, before, counts
        extend = {}
        if mode in ("EXTEND", "MIXED"):
            extend = {
                "extend_seq_lens": torch.tensor(counts, dtype=torch.int32),
                "extend_prefix_lens": torch.tensor(before, dtype=torch.int32),
                "extend_seq_lens_cpu": counts,
                "extend_prefix_lens_cpu": before,
                "extend_num_tokens": sum(counts),
            }
        return ForwardBatch(
            forward_mode=ForwardMode[mode],
            batch_size=len(rows),
            input_ids=torch.zeros(sum(counts), dtype=torch.int64),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            seq_lens_sum=sum(lengths),
            out_cache_loc=torch.cat(slots).to(torch.int64),
            positions=positions,
            spec_info=spec_info,
            **extend,
        )

    def new(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a layer's queries, keys and values of the step, as SGLang's layers pass them.

        Store them for the reference.
        """
        total = sum(self.counts)
        query, key = (
            torch.randn(total, HEADS * DIM, dtype=self.dtype),
            torch.randn(total, KV_HEADS, DIM, dtype=self.dtype),
        )
        value = torch.randn(total, KV_HEADS, self.value_dim, dtype=self.dtype)
        done = 0
        for row, begin, count in zip(self.rows, self.before, self.counts, strict=True):
            self.keys[layer][row, begin : begin + count] = key[done : done + count].double()
            self.values[layer][row, begin : begin + count] = value[done : done + count].double()
            done += count
        return query, key, value

    def advance(self) -> None:
        """Append the step's tokens to their requests."""
        for row, begin, count in zip(self.rows, self.before, self.counts, strict=True):
            self.lengths[row] = begin + count

    def expected(
        self,
        layer: int,
        query: torch.Tensor,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        masks: Any = None,
    ) -> torch.Tensor:
        """Return attention by its formula in float64.

        `masks`: `[num_seqs, drafts, drafts]`, visible drafts, by depth.
        """
        out, done, window = [], 0, self.windows[layer]
        for number, (row, begin, count) in enumerate(zip(self.rows, self.before, self.counts, strict=True)):
            q = query[done : done + count].double().view(count, HEADS, DIM)
            done += count
            live = None
            if masks is not None:
                p, t = begin + masks[number].sum(1, keepdim=True) - 1, torch.arange(begin + count)
                live = (t <= p) & (t > p - (window or CONTEXT))
                live[:, begin:] = masks[number]
            own = (x[layer][row, : begin + count] for x in (self.keys, self.values))
            options = {"causal": True, "window_size": (window - 1, 0), "softcap": softcap, "s_aux": sinks, "seen": live}
            out.append(flash_cases.attention(q, *own, **options)[0].reshape(count, -1))
        return torch.cat(out)
