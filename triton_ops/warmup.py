"""The compilation of a model's kernels before its first request."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from typing import Any

import torch

from ._attention.build import INVARIANT_SPLIT_KEYS
from ._attention.kernel_arguments import MERGED_SPLITS
from ._attention.layout import DECODE_QUERIES, MIN_SPLIT_TILES, TILE_KEYS
from ._core.checks import check_integer
from ._core.operator import record_of
from .latent_attention import latent_attention
from .reshape_and_cache import reshape_and_cache
from .sparse_gap_attention import sparse_gap_attention


def warmup(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    alibi: bool = False,
    sinks: bool = False,
    gaps: bool = False,
    batch_invariant: bool = False,
    value_dim: int | None = None,
    workers: int = 1,
) -> None:
    """Compile all kernels of one kind of layer, so that no request waits for the compiler.

    This runs the layer's cache write and attention on a few tokens, once for each compiled variant.
    The compiled kernels serve batches of any lengths, mixes of prefills and decodes, any table and any number of
    blocks, with and without a plan. Call it once for each kind of layer. If only some layers of a model have windows,
    call it with and without one.

    It does not compile the `_with_lse` operators, shared prefixes, tables for each KV head, trees or lists of blocks.
    It compiles only for tensors whose addresses are multiples of 16 bytes.

    Args:
        num_heads: Query heads of the layer on this device.
        num_kv_heads: KV heads of the layer on this device.
        head_dim: Features of a head.
        block_size: Token slots of a block.
        dtype: The dtype of queries, keys and values.
        cache_dtype: float8_e4m3fn or int8 for a quantized cache. None: dtype.
        device: The device to compile for.
        causal: The option of the attention calls.
        window: 0 for no window. Any positive number compiles for all windows.
        softcap: 0 for no softcap. Any positive number compiles for all softcaps.
        alibi: Whether the layer passes alibi_slopes.
        sinks: Whether the layer passes sinks.
        gaps: Whether calls with query_positions are compiled too.
        batch_invariant: Whether calls use that mode.
        value_dim: The columns of a latent row, head_dim wide, that are its value. If given, `latent_attention` is
            compiled and no cache write.
        workers: The number of processes that compile at once into Triton's cache on disk, each a share of the variants.
            1: this process compiles all.

    Raises:
        ValueError: workers or a size is below 1, or the operators refuse a layer of this kind.

    Examples:
        >>> pc.warmup(num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu")
    """
    layer = _Layer(**locals())
    for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "workers"):
        check_integer(name, getattr(layer, name), 1)
    if workers > 1:
        _compile_in_processes(layer)
    _run_regimes(layer)


_Layer: Any = record_of(warmup)


def _compile_in_processes(layer: Any) -> None:
    """Compile in several processes into Triton's cache on disk, a share of the regimes in each; see `_run_regimes`.

    Errors of a process are ignored. The caller must then run all regimes itself, which loads the compiled kernels and
    raises such errors again.
    """
    script = "import importlib, sys; importlib.import_module(sys.argv[1])._run_share(*sys.argv[2:])"
    given = base64.b64encode(pickle.dumps(tuple(layer))).decode()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    commands = [[sys.executable, "-c", script, __name__, given, str(k)] for k in range(layer.workers)]
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for command in commands]
    for process in running:
        process.wait()


def _run_share(given: str, share: str) -> None:
    """Compile a share of the regimes; run by a process of `_compile_in_processes`."""
    layer = _Layer(*pickle.loads(base64.b64decode(given)))
    _run_regimes(layer, slice(int(share), None, layer.workers))


def _run_regimes(layer: Any, share: slice = slice(None)) -> None:
    """Run a share of the regimes, which are pairs of a number of queries and a number of keys."""
    device, dtype = torch.device(layer.device), layer.dtype
    num_heads, block_size = layer.num_heads, layer.block_size
    per_head = torch.zeros(num_heads, dtype=torch.float32, device=device)
    scale = None if layer.cache_dtype is None else torch.ones(1, device=device)
    cache = torch.zeros(1, block_size, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device)
    cache = cache if layer.cache_dtype is None else cache.to(layer.cache_dtype)
    # Tables are wide enough for splits, so that the kernel that sums them is compiled too, for few and for many splits.
    few = 2 * INVARIANT_SPLIT_KEYS if layer.batch_invariant else 4 * MIN_SPLIT_TILES * TILE_KEYS
    many = max(few, (2 * MERGED_SPLITS + 1) * MIN_SPLIT_TILES * TILE_KEYS)
    # The rows of a decode's tile are a power of two; a chunk of few queries is compiled like any prefill.
    regimes = [(1, few), (1, many), (2, few), (4, few), (DECODE_QUERIES, few), (4 * DECODE_QUERIES, few)]
    for num_tokens, keys in regimes[share]:
        columns = -(-keys // block_size)
        query = torch.zeros(num_tokens, num_heads, layer.head_dim, dtype=dtype, device=device)
        tables = torch.zeros(1, columns, dtype=torch.int32, device=device)
        lens = torch.full((1,), num_tokens, dtype=torch.int32, device=device)
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        options: dict[str, Any] = {"causal": layer.causal, "softcap": layer.softcap, "max_query_len": num_tokens}
        options["batch_invariant"] = layer.batch_invariant
        if layer.value_dim is not None:
            rows = cache[:, :, 0]
            latent_attention(query, rows, tables, lens, starts, 1.0, layer.value_dim, k_scale=scale, **options)
            continue
        key = torch.zeros(num_tokens, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device)
        slots = torch.full((num_tokens,), -1, device=device)
        reshape_and_cache(key, key, cache, cache.clone(), slots, scale, scale)
        positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
        for given in (None, positions) if layer.gaps else (None,):
            sparse_gap_attention(
                query,
                cache,
                cache.clone(),
                tables,
                lens,
                starts,
                given,
                1.0,
                # Long enough for splits.
                window=keys if layer.window else 0,
                alibi_slopes=per_head if layer.alibi else None,
                sinks=per_head if layer.sinks else None,
                k_scale=scale,
                v_scale=scale,
                **options,
            )
