"""Every operator through `torch.library.opcheck`: its schema, autograd registration, fake and compilation.

The first call of each is a usual one; the others are transposed, sliced, empty or of other dtypes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Case, build
from torch.utils._pytree import tree_leaves

import pc
from pc.triton_ops._attention.layout import PlanShape
from pc.triton_ops._core.runtime import INTERPRET

# In the interpreter, only the first case is quick, as for any test.
every_case_quick = (lambda test: test) if INTERPRET else pytest.mark.quick

SCHEMA = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL = (*SCHEMA, "test_aot_dispatch_dynamic")
E4M3 = torch.float8_e4m3fn
Calls = list[tuple[Any, ...]]
"""Arguments, and keywords and checks if they are not the usual ones."""


def _turned(tensor: torch.Tensor, first: int = 0, second: int = 1) -> torch.Tensor:
    """Return the same tensor with two dimensions swapped in memory."""
    return tensor.transpose(first, second).contiguous().transpose(first, second)


def _ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


NONE = torch.empty(0, dtype=torch.int32)


def _caches() -> list[torch.Tensor]:
    """Return caches in row-major and head-major order, with padded blocks, and with swapped features."""
    cache = torch.randint(99, (6, 4, 3, 8), dtype=torch.int32)
    return [cache, _turned(cache, 1, 2), torch.cat([cache, cache], 1)[:, :4], _turned(cache, 2, 3)]


def _gathers(index: torch.Tensor) -> Calls:
    return [(cache, given) for cache in _caches() for given in (index, NONE)]


def _gather_lists(index: torch.Tensor) -> Calls:
    return [([cache, cache[..., :1]], given) for cache in _caches() for given in (index, NONE)]


def _scatters(shape: tuple[int, ...], index: torch.Tensor) -> Calls:
    return [(torch.randint(99, shape, dtype=torch.int32), cache, index) for cache in _caches()]


def _scatter_lists(shape: tuple[int, ...], index: torch.Tensor) -> Calls:
    return [([source, source], [cache, cache.clone()], given) for source, cache, given in _scatters(shape, index)]


def _joins() -> Calls:
    cache, new = torch.randn(6, 4, 3, 8), torch.randn(6, 3, 8)
    tables, starts = torch.tensor([[3, 1, 0], [2, -1, 5]]), _ids(0, 4, 6)
    batch, none = (tables, _ids(9, 10), new, starts), torch.empty(0, 3, dtype=torch.int64)
    return [
        (cache, *batch, 19),
        (_turned(cache, 1, 2), *batch, 24, _ids(2, 3, 5, 8, 0, 9)),
        (cache, none, NONE.long(), new[:0], _ids(0), 4),
    ]


def _writes() -> Calls:
    key, slots, one = torch.randn(5, 2, 32), _ids(3, -1, 9, 15, 0), torch.ones(1)
    calls: Calls = []
    for dtype, utils in ((torch.float32, ALL), (torch.int8, ALL), (E4M3, ("test_faketensor",))):
        scale = None if dtype == torch.float32 else one
        caches = [torch.zeros(2, 8, 2, 32).to(dtype) for _ in range(2)]
        calls.append(((key, key, *caches, slots, scale, scale), {}, utils))
    return calls


def _ropes() -> Calls:
    query, key, value = (torch.randn(4, heads, 32) for heads in (6, 2, 2))
    caches = [torch.zeros(3, 8, 2, 32) for _ in range(2)]
    others = (key, value, _ids(0, 5, 2, 7), torch.randn(9, 32), *caches, _ids(3, -1, 9, 15))
    return [(query, *others), (_turned(query), *others, True)]


def _rotations() -> Calls:
    moves = (_ids(0, 1, -1, 2), _ids(4, 1, 6, -1), torch.tensor([5, -3, 2, 1], dtype=torch.int32))
    cache, inv_freq = torch.randn(8, 4, 3, 8), torch.tensor([1.0, 0.5, 0.1, 0.01])
    caches = (cache, _turned(cache, 1, 2), torch.cat([cache, cache], 1)[:, :4])
    return [*((c, *moves, inv_freq) for c in caches), (cache, NONE, NONE, NONE, inv_freq)]


def _slot_moves() -> Calls:
    moves = (_ids(3, 17, -1, 9), _ids(21, 30, 25, -1), torch.tensor([5, -3, 2, 1]))
    keys, values = torch.randn(8, 4, 3, 8), torch.randn(8, 4, 3, 5)
    inv_freq = torch.tensor([1.0, 0.5, 0.1])
    turned = (_turned(keys, 1, 2), _turned(values, 1, 2))
    return [
        *((*caches, *moves, inv_freq, True, 2) for caches in ((keys, values), turned)),
        (keys, None, *moves, inv_freq, False),
        (keys, values, *moves),
        (keys, values, NONE, NONE, NONE, inv_freq),
    ]


def _merges() -> Calls:
    out, lse = torch.randn(6, 4, 64, dtype=torch.float16), torch.randn(6, 4)
    return [(out, lse, out, lse), (_turned(out), _turned(lse), out, lse)]


def _case(**changes: Any) -> Case:
    return Case(**{"lens": (12, 9), "queries": (1, 5), "heads": (2, 2), "head_dim": 16, "block_size": 8} | changes)


def _tensors(case: Case) -> tuple[torch.Tensor, ...]:
    """Return tensors without NaN: opcheck compares results, and NaN equals nothing. Poison has its own tests."""
    return tuple(t.nan_to_num() if t.dtype.is_floating_point else t for t in build(case).tensors)


def _paged() -> Calls:
    cases = (
        _case(dtype=torch.float16, value_dim=24),
        _case(head_major=True, dtype=torch.bfloat16, sinks=True, alibi=True),
        _case(lens=(), queries=()),
        _case(cache_dtype=torch.int8),
    )
    calls: Calls = [((*_tensors(case), 0.3), build(case).options) for case in cases]
    query, *others = _tensors(_case())
    return [*calls, (_turned(query), *others, 0.3)]


def _gaps() -> Calls:
    scattered, headed = _case(scattered=True), _case(head_tables=True)
    query, key, value, tables, *rest = _tensors(headed)
    turned = (query, _turned(key, 1, 2), value, _turned(tables), *rest)
    calls: Calls = [
        (*_tensors(scattered), build(scattered).positions, 0.3, 16, 2),
        (*_tensors(_case()), None, 0.3),
        *((*tensors, None, 0.3) for tensors in (_tensors(headed), turned)),
        (*_tensors(_case(lens=(), queries=(), head_tables=True)), None, 0.3),
    ]
    tree, listed = _case(scattered=True, tree=True), _case(top_k=2)
    mask, lists = build(tree).options["tree_mask"], build(listed).options["query_blocks"]
    for given in (mask, mask.repeat(1, 2)[:, : mask.shape[1]]):
        calls.append(((*_tensors(tree), build(tree).positions, 0.3), {"tree_mask": given}))
    masked = build(dataclasses.replace(listed, tree=True)).options["tree_mask"]
    for given, bits in ((lists, None), (_turned(lists), masked), (lists[..., :0], None)):
        calls.append(((*_tensors(listed), None, 0.3), {"query_blocks": given, "tree_mask": bits}))
    return calls


def _latents() -> Calls:
    case = _case(heads=(4, 1), head_dim=48, value_dim=32, latent=True)
    query, cache, *rest = _tensors(case)
    calls: Calls = [(query, given, *rest, 0.3, 32) for given in (cache, cache.unsqueeze(2), _turned(cache))]
    calls.append((_turned(query), torch.cat([cache, cache], 2)[..., :48], *rest, 0.3, 32, False, 5.0))
    calls.append((query[:0], cache, *(tensor[:0] for tensor in rest[:2]), rest[2][:1], 0.3, 16))
    quantized = build(dataclasses.replace(case, cache_dtype=torch.int8, dtype=torch.float16))
    calls.append(((*quantized.tensors, 0.3, 32), {"k_scale": quantized.options["k_scale"]}))
    return calls


def _listed_latents() -> Calls:
    case = _case(heads=(4, 1), head_dim=48, value_dim=32, latent=True, top_k=2)
    lists = build(case).options["query_blocks"]
    tensors = _tensors(case)
    return [((*tensors, None, 0.3, 32), {"query_blocks": given}) for given in (lists, _turned(lists, 1, 2), None)]


def _shared() -> Calls:
    query, key, value, tables, *rest = _tensors(_case(lens=(26, 20)))
    tables[:, :2] = tables[:1, :2]
    return [(query, key, value, tables, *rest, 2, 0.3)]


def _plans(with_out: bool) -> Calls:
    calls: Calls = []
    for case in (_case(lens=(100, 20)), _case(head_tables=True)):
        tensors = _tensors(case)[3:]
        out = torch.zeros(PlanShape.of(tensors[0], 8).size, dtype=torch.int32)
        # Elements that a plan does not write are uninitialized, so they are not compared.
        calls.append(((*tensors, 8), {"out": out} if with_out else {}, SCHEMA))
    return calls


SLOTS, BLOCKS = _ids(3, -1, 17, 9), _ids(3, -1, 5)
MOVES = (_ids(0, 1, -1), _ids(4, 5, 3))
CALLS: dict[str, Callable[[], Calls]] = {
    "attention_plan": lambda: _plans(False),
    "attention_plan.out": lambda: _plans(True),
    "copy_blocks": lambda: [(cache.clone(memory_format=torch.preserve_format), *MOVES) for cache in _caches()],
    "copy_blocks_list": lambda: [([cache, cache.clone()], *MOVES) for cache in _caches()],
    "gather_blocks": lambda: _gathers(BLOCKS),
    "gather_blocks_list": lambda: _gather_lists(BLOCKS),
    "gather_slots": lambda: _gathers(SLOTS),
    "gather_slots_list": lambda: _gather_lists(SLOTS),
    "join_prefix": _joins,
    "join_prefix_list": lambda: [([c, c[..., :1]], t, n, [new, new[..., 1:2]], *r) for c, t, n, new, *r in _joins()],
    "latent_attention": _latents,
    "latent_attention_with_lse": lambda: _latents()[:3],
    "merge_attention": _merges,
    "move_slots": _slot_moves,
    "paged_attention": _paged,
    "paged_attention_with_lse": _paged,
    "reshape_and_cache": _writes,
    "rope_and_cache": _ropes,
    "rotate_keys": _rotations,
    "scatter_blocks": lambda: _scatters((3, 4, 3, 8), BLOCKS),
    "scatter_blocks_list": lambda: _scatter_lists((3, 4, 3, 8), BLOCKS),
    "scatter_slots": lambda: _scatters((4, 3, 8), SLOTS),
    "scatter_slots_list": lambda: _scatter_lists((4, 3, 8), SLOTS),
    "shared_prefix_attention": _shared,
    "shared_prefix_attention_with_lse": _shared,
    "sliding_window_attention": lambda: [(*_tensors(_case()), 0.3, 16, 2)],
    "sliding_window_attention_with_lse": lambda: [(*_tensors(_case()), 0.3, 16, 2)],
    "sparse_gap_attention": _gaps,
    "sparse_latent_attention": _listed_latents,
    "sparse_latent_attention_with_lse": _listed_latents,
    "sparse_gap_attention_with_lse": lambda: _gaps()[:5],
}


def _moved(value: Any, device: torch.device, copy: bool = False) -> Any:
    if isinstance(value, list):
        return [_moved(item, device, copy) for item in value]
    return value.to(device, copy=copy) if isinstance(value, torch.Tensor) else value


def _parts(call: tuple[Any, ...], device: torch.device, copy: bool = False) -> tuple[Any, ...]:
    """Return the arguments of a call, its keywords and its checks. A copy of a slice is no slice."""
    arguments, options, utils = (*call, ALL)[:3] if isinstance(call[0], tuple) else (call, {}, ALL)
    given = tuple(_moved(value, device, copy) for value in arguments)
    return given, {key: _moved(value, device) for key, value in options.items()}, utils


def _operator(name: str) -> Any:
    overload, _, out = name.partition(".")
    return getattr(getattr(torch.ops.pc, overload), out or "default")


def _check(name: str, call: tuple[Any, ...], device: torch.device) -> None:
    arguments, options, utils = _parts(call, device)
    if INTERPRET:  # where it compiles the same as for CPU tensors
        utils = tuple(util for util in utils if util != "test_aot_dispatch_dynamic")
    torch.library.opcheck(_operator(name), arguments, options, test_utils=utils)


def test_every_operator_is_checked() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("pc::")]
    names = {f"{schema.name[4:]}.{schema.overload_name}".rstrip(".") for schema in schemas}
    assert {name for name in names if not name.startswith("test_")} == CALLS.keys()


@every_case_quick
@pytest.mark.parametrize("name", CALLS)
def test_a_usual_call(name: str, device: torch.device) -> None:
    _check(name, CALLS[name]()[0], device)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_strides_empty_tensors_and_other_dtypes(name: str, device: torch.device) -> None:
    for call in CALLS[name]()[1:]:
        _check(name, call, device)


@pytest.mark.parametrize("name", [name for name in CALLS if "plan" not in name])
def test_compile(name: str, device: torch.device) -> None:
    """Compiled as one graph with dynamic shapes, results and written tensors are equal bit by bit."""
    function = getattr(pc, name)
    for call in CALLS[name]():
        torch._dynamo.reset()
        found = []
        for run in (function, torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")):
            given, options, _ = _parts(call, device, copy=True)
            result = run(*given, **options)
            tensors = [x for x in tree_leaves([result, given]) if isinstance(x, torch.Tensor)]
            found.append([x.contiguous().view(-1).view(torch.uint8).tolist() if x.numel() else [] for x in tensors])
        assert found[0] == found[1]


@pytest.mark.parametrize("name", CALLS)
def test_public_functions_take_meta_tensors(name: str) -> None:
    """They return the result of the operator's fake, in the second call too."""
    for call in CALLS[name]():
        arguments, options, _ = _parts(call, torch.device("meta"))
        expected = _operator(name)(*arguments, **options)
        for _ in range(2):
            found = getattr(pc, name.partition(".")[0])(*arguments, **options)
            assert _metadata(options.get("out", expected)) == _metadata(found)


def _metadata(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_metadata(item) for item in result]
    return None if result is None else (result.shape, result.stride(), result.dtype, result.device)
