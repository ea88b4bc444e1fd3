"""How CPU tensors of a cache are read: any layout, caches past 32 bits, and within one budget."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from attention_cases import Case, build, check
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pc
from pc.triton_ops._attention import cpu_sparse
from pc.triton_ops._attention.arguments import AttentionArgs
from pc.triton_ops._attention.cpu_cache import GATHER_BYTES, Cache
from pc.triton_ops._attention.operator import attention_cpu

NAMES = tuple(inspect.signature(pc.sparse_gap_attention).parameters)


def _call(batch):
    case = batch.case
    arguments = (*batch.tensors, batch.positions, batch.scale, case.window, case.num_sink_tokens)
    return AttentionArgs(**dict(zip(NAMES, arguments, strict=False)), **batch.options)


@pytest.mark.parametrize("place", ["halves", "pairs", "offset", "columns", "padded", "mixed"])
def test_layouts(place, monkeypatch):
    """Keys and values in parts of one tensor are read without copies, too, unless rows have gaps or other places."""
    monkeypatch.setattr(cpu_sparse, "_SMALL_GATHER", 1 << 62)
    batch = build(Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5))
    key, value = batch.key_cache, batch.value_cache
    if place == "halves":
        batch.key_cache, batch.value_cache = torch.stack([key, value])
    elif place == "pairs":
        batch.key_cache, batch.value_cache = torch.stack([key, value], 1).unbind(1)
    elif place == "offset":
        batch.key_cache, batch.value_cache = (torch.cat([x[:1], x])[1:] for x in (key, value))
    elif place == "mixed":
        batch.value_cache = value.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        wide = torch.cat([key, value, key], 3)[..., : 128 + 3 * (place == "padded")].contiguous()
        batch.key_cache, batch.value_cache = wide[..., :64], wide[..., 64:128]
    call = _call(batch)
    in_place = Cache(call).in_place
    assert (in_place is None) == (place in ("padded", "mixed"))
    if in_place is not None:
        assert in_place[0].untyped_storage().data_ptr() == batch.key_cache.untyped_storage().data_ptr()
    check(build(batch.case), *attention_cpu(call))


def test_vectors_of_large_caches():
    """With more than 2**31 vectors, numbers need 64 bits."""
    for blocks, dtype in ((1 << 24, np.int32), ((1 << 24) + 1, np.int64)):
        cache = torch.empty((blocks, 16, 8, 1), device="meta")
        call = AttentionArgs(cache[0], cache, cache, *[None] * 3, 1.0)
        vectors = Cache(call).of_blocks(np.array([(1 << 24) - 1, 0], np.int32), np.array([7, 2]))
        assert vectors.dtype == dtype
        assert vectors[:, [0, -1]].tolist() == [[(1 << 31) - 128 + 7, (1 << 31) - 1], [2, 122]]


class _Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes. Views make none."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, made = (
            [
                x.untyped_storage()
                for x in tree_leaves(tensors)
                if isinstance(x, torch.Tensor) and x.layout == torch.strided
            ]
            for tensors in (args, result)
        )
        known = {storage.data_ptr() for storage in given}
        self.bytes = max([self.bytes, *(storage.nbytes() for storage in made if storage.data_ptr() not in known)])
        return result


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("order", ["adjacent", "scattered", "by head"])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float32], ids=str)
def test_gathers_of_long_contexts_are_bounded(cache_dtype, order, softcap):
    """Converted or copied keys take at most the budget, however long the context is; adjacent ones too."""
    blocks, heads, width = 1024, 2, 64
    cache = torch.randint(-9, 9, (blocks, 16, heads, width), dtype=torch.int8).to(cache_dtype)
    table = torch.arange(blocks, dtype=torch.int32)
    tables = (table if order == "adjacent" else table.flip(0))[None]
    if order == "by head":
        tables = torch.stack([table, table.roll(7)])[None]
    scale = None if cache_dtype == torch.float32 else torch.ones(1)
    lens, query = torch.tensor([blocks * 16], dtype=torch.int32), torch.randn(3, 4, width)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    assert blocks * 16 * heads * width * 4 > GATHER_BYTES
    options = {"softcap": softcap, "k_scale": scale, "v_scale": scale}
    call = AttentionArgs(query, cache, cache, tables, lens, starts, 0.125, **options)
    with _Largest() as largest:
        attention_cpu(call)
    assert largest.bytes <= GATHER_BYTES
