"""Calls of other projects' kernels: doubles with the same signatures compute what the arguments mean."""

from __future__ import annotations

import itertools
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python

import pc
from benchmarks.harness import registry
from benchmarks.operators import attention
from benchmarks.operators import attention_peers as peers
from benchmarks.operators import attention_providers as providers

pytestmark = pytest.mark.usefixtures("plain_empty")
ROOT = Path(__file__).parent.parent
SMALL = {"heads": (4, 2), "head_dim": 32, "block_size": 16, "dtype": "float16"}
CASES = {
    "decode": {"seq_lens": (37, 5, 200), "q_lens": (1, 1, 1)},
    "decode, eight heads a group": {"seq_lens": (37,), "q_lens": (1,), "heads": (8, 1)},
    "prefill": {"seq_lens": (67,), "q_lens": (67,)},
    "mixed": {"seq_lens": (37, 64, 12), "q_lens": (1, 20, 12)},
    "window": {"seq_lens": (61, 20), "q_lens": (9, 1), "window": 10},
    "decode, window": {"seq_lens": (161, 20), "q_lens": (1, 1), "window": 30},
    "sinks": {"seq_lens": (33,), "q_lens": (5,), "sinks": True, "window": 8},
    "head-major": {"seq_lens": (33, 70), "q_lens": (5, 1), "layout": "HND"},
    "decode, float8": {"seq_lens": (33,), "q_lens": (1,), "cache_dtype": "float8_e4m3fn"},
    "holes": {"seq_lens": (64, 64), "q_lens": (1, 1), "live": ((0, 16), (48, 64))},
}


def attend(q, keys, values, tables, lens, starts, scale, window_left, **options):
    """Return attention over a paged cache, where a query sees `window_left` keys before its own. None or -1: all."""
    if window_left is None or window_left < 0:
        return pc.paged_attention(q, keys, values, tables, lens, starts, scale, **options)
    return pc.sliding_window_attention(q, keys, values, tables, lens, starts, scale, window_left + 1, **options)


class FlashInferWrapper:
    """A double of flashinfer 0.7.2, which takes pages in CSR form, plans and then runs."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        self.layout = kv_layout

    def _plan(self, starts, indptr, indices, last, heads, kv_heads, dim, page_size, given):
        pages = [indices[a:b] for a, b in itertools.pairwise(indptr.tolist())]
        self.tables = torch.full((len(pages), max(map(len, pages))), -1, dtype=torch.int32)
        for row, own in zip(self.tables, pages, strict=True):
            row[: len(own)] = own
        self.lens = torch.tensor([len(own) - 1 for own in pages], dtype=torch.int32) * page_size + last
        self.starts, self.given, self.sizes = starts, given, (heads, kv_heads, dim, page_size)

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None):
        assert q.dtype == self.given["q_data_type"]
        for cache in paged_kv_cache:
            assert cache.is_contiguous()
            assert cache.dtype == self.given["kv_data_type"]
        caches = [c.transpose(1, 2) if self.layout == "HND" else c for c in paged_kv_cache]
        assert (q.shape[1], *caches[0].shape[2:], caches[0].shape[1]) == self.sizes
        scales = [None if scale is None else torch.tensor([scale]) for scale in (k_scale, v_scale)]
        sm_scale, left = self.given["sm_scale"], self.given["window_left"]
        options = {"k_scale": scales[0], "v_scale": scales[1]}
        return attend(q, *caches, self.tables, self.lens, self.starts, sm_scale, left, **options)


class FlashInferDecode(FlashInferWrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        super().__init__(float_workspace_buffer, kv_layout)
        self.tensor_cores = use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        window_left=-1, q_data_type="float16", kv_data_type=None, sm_scale=None,
    ):  # fmt: skip
        assert self.tensor_cores == (num_qo_heads >= 4 * num_kv_heads)
        given = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale}
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(starts, indptr, indices, last_page_len, *sizes, given | {"window_left": window_left})


class FlashInferPrefill(FlashInferWrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, *,
        causal=False, sm_scale=None, window_left=-1, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert causal
        given = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "sm_scale": sm_scale}
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(qo_indptr, *pages, *sizes, given | {"window_left": window_left})


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
):  # fmt: skip
    """A double of flash-attn-4 4.0.0b36. A window's left side counts the keys before the query's."""
    assert causal
    assert cu_seqlens_k is None
    assert q.dtype == k.dtype == v.dtype
    assert num_splits == 1, "the only one that sm_90 takes"
    assert window_size[1] in (None, 0)
    return attend(q, k, v, page_table, seqused_k, cu_seqlens_q, softmax_scale, window_size[0], sinks=learnable_sink)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """A double of torch 2.13: (-1, 0) is causal, (w, 0) is causal with the w keys before the query's."""
    assert enable_gqa
    assert window_size[1] == 0
    return attend(query, key, value, block_table, seqused_k, cu_seq_q, scale, window_size[0])


def varlen_attn_before_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """A double of torch 2.11."""


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(name: str, **contents: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    put(
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=FlashInferDecode,
        BatchPrefillWithPagedKVCacheWrapper=FlashInferPrefill,
    )
    for name in ("flash_attn", "flash_attn.cute"):
        put(name)
    put("flash_attn.cute.interface", flash_attn_varlen_func=flash_attn_varlen_func)
    put("torch.nn.attention.varlen", varlen_attn=varlen_attn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


RUNS = {
    "FlashInfer": (peers.run_flashinfer, {"sinks", "holes"}),
    "flash-attn-4": (peers.run_flash_attn_4, {"decode, float8", "holes"}),
    "varlen_attn": (providers._varlen, {"sinks", "decode, float8", "holes"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("stand_ins")
def test_a_peer_is_asked_for_the_same_result(name: str, case: str) -> None:
    inputs = attention.attention_inputs(attention.AttentionCase(**(SMALL | CASES[case])), torch.device("cpu"), 0)
    prepare, refused = RUNS[name]
    if case in refused:
        with pytest.raises(registry.UnsupportedError):
            prepare(inputs.calls[0])
    else:
        inputs.check(inputs.calls[1], prepare(inputs.calls[1]))


@pytest.mark.usefixtures("stand_ins")
def test_a_torch_without_block_tables_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.nn.attention.varlen"], "varlen_attn", varlen_attn_before_2_12)
    inputs = attention.attention_inputs(attention.AttentionCase(**(SMALL | CASES["decode"])), torch.device("cpu"), 0)
    with pytest.raises(registry.UnsupportedError, match=r"no block table before torch 2\.12"):
        providers._varlen(inputs.calls[0])


VLLM = """
import importlib, sys, torch
sys.path[:0] = [{tests!r}, {tests!r} + "/support"]
sys.path.append({source!r})
import guarded, test_peers as t
device = torch.device("cpu")
print(t.peers.vllm_version())
for name in ("decode", "mixed", "decode, window", "sinks", "head-major", "decode, float8", "holes"):
    case = t.CASES[name]
    inputs = t.attention.attention_inputs(t.attention.AttentionCase(**(t.SMALL | case)), device, 0)
    try:
        run = t.peers.run_vllm_triton(inputs.calls[1])
    except t.registry.UnsupportedError:
        assert name == "holes", name
        continue
    with guarded.language_patched_once():
        inputs.check(inputs.calls[1], run)
from benchmarks.operators import keys
torch.cuda.get_device_capability = lambda *device: (9, 0)
inputs = keys.write_inputs(21, 3, 40, None, device, 0)
inputs.check(inputs.calls[0], keys._vllm_write(inputs.calls[0]))
print("right")
"""


@pytest.mark.slow  # a clean checkout lacks vLLM's sources, and benchmarks compare each result again
def test_the_triton_kernels_of_vllm_give_the_same_result() -> None:
    source = Path(os.environ.get("PC_PEERS", ROOT / ".peers")) / "vllm-0.33"
    if not source.exists():
        pytest.skip(f"vLLM's sources are not in {source}: make vllm-quick")
    pytest.importorskip("triton")
    # vLLM turns its kernels off if it finds no device, unless the variable says that none is visible.
    code = VLLM.format(tests=str(Path(__file__).parent), source=str(source))
    done = python("-c", code, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.stdout.split()[-1] == "right"
