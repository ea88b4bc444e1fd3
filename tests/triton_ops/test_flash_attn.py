"""FlashAttention's three functions over the grid of its own tests (tests/test_flash_attn.py there), by the formula."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from typing import Any

import flash_cases
import pytest
import torch
from flash_cases import HEADS, Cached, Case, in_pages, starts
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import pc
from pc.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from pc.triton_ops._attention.dense import as_blocks
from pc.triton_ops._core.runtime import INTERPRET, KERNELS_ON_CPU

# In the interpreter, only the first case of a test is quick, as for any test.
every_case_quick = (lambda test: test) if INTERPRET else pytest.mark.quick

# Numbers of queries and keys, as in FlashAttention's tests; a third of them in the slow interpreter.
LONG = ((113, 203), (128, 217), (113, 211), (108, 256), (256, 113), (64, 64), (160, 128))
LENGTHS = ((3, 1), (1, 147), *((q // 3, k // 3) if INTERPRET else (q, k) for q, k in LONG))
MASKS = ({}, {"causal": True}, {"window_size": (17, 0), "causal": True}, {"window_size": (23, 23)}, *(
    {"window_size": window} for window in ((31, 7), (-1, 11), (9, -1), (0, 40))))  # fmt: skip
TERMS = ({}, {"softcap": 20.0}, {"alibi_slopes": True}, {"s_aux": True})


def grid() -> list[Case]:
    """Return all masks with all lengths; all other options take turns."""
    found = []
    turn = itertools.count()
    for mask, lengths in itertools.product(MASKS, LENGTHS):
        n = next(turn)
        term, heads, dim = TERMS[n % 4], [*HEADS][n // 4 % 3], (32, 40, 59, 64, 96, 111, 128, 256)[n % 8]
        found.append(Case(lengths, mask, term, heads, dim, (torch.float32, torch.bfloat16, torch.float16)[n % 3]))
    return found


def laid_out(*layouts: str) -> list[tuple[Case, str]]:
    """Return the grid in every layout; in the interpreter, every fifth case, with layouts in turn."""
    if INTERPRET:
        return [*zip(grid()[::5], itertools.cycle(layouts), strict=False)]
    return [*itertools.product(grid(), layouts)]


@pytest.mark.parametrize(("case", "layout"), laid_out("tokens first", "heads first", "mixed", "sliced"), ids=str)
def test_dense(case: Case, layout: str) -> None:
    flash_cases.check_dense(case, layout)


@pytest.mark.parametrize(("case", "layout"), laid_out("packed", "paged"), ids=str)
def test_varlen(case: Case, layout: str) -> None:
    flash_cases.check_varlen(case, layout == "paged")


def cached_cases() -> list[Cached]:
    """Return FlashAttention's grid: each feature with each of the masks; the rest takes turns."""
    found = []
    kinds: tuple[dict[str, Any], ...] = (
        {}, {"new": 1}, {"new": 1, "rotary": 1.0}, {"new": 1, "rotary": 0.5, "interleaved": True}, {"new": 2},
        {"new": 2, "rotary": 1.0, "interleaved": True}, {"paged": 16}, {"paged": 256, "new": 1, "rotary": 1.0},
        {"paged": 16, "new": 1}, {"batch_idx": True}, {"batch_idx": True, "new": 1, "rotary": 0.5}, {"leftpad": True},
        {"leftpad": True, "new": 1, "rotary": 1.0}, {"leftpad": True, "new": 2, "batch_idx": True},
    )  # fmt: skip
    masks = ((), (("causal", True),), (("window_size", (20, 5)),), (("causal", True), ("window_size", (30, 0))),
             (("window_size", (12, 12)),))  # fmt: skip
    lengths = ((1, 128), (1, 339), (64, 160), (3, 96), (16, 128), (128, 128))
    for n, (kind, mask) in enumerate(itertools.product(kinds, masks)):
        q, k = lengths[n % 6]
        new = {0: 0, 1: q, 2: max(1, q // 2)}[kind.get("new", 0)]
        term = ("", "softcap", "s_aux", "alibi")[n // 5 % 4]
        dtype = (torch.float32, torch.float16, torch.bfloat16)[n % 3]
        rest = {"mask": mask, "term": term, "heads": [*HEADS][n % 3], "dtype": dtype}
        found.append(Cached((q,) * 4, length=k, **{**kind, "new": (new,) * 4}, **rest))
    return found


@pytest.mark.parametrize("case", cached_cases()[:: 7 if INTERPRET else 1], ids=str)
def test_kvcache(case: Cached) -> None:
    flash_cases.check_cached(case)


BF16 = torch.bfloat16
PACKED: tuple[dict[str, Any], ...] = (
    {}, {"rotary": 0.5}, {"paged": 16}, {"paged": 4, "batch_idx": True}, {"paged": 16, "leftpad": True},
    {"batch_idx": True, "leftpad": True}, {"paged": 16, "rotary": 1.0, "batch_idx": True, "leftpad": True},
    {"code": True, "dtype": BF16}, {"code": True, "dtype": BF16, "rotary": 1.0, "paged": 16},
    {"paged": 16, "new": (2, 2, 2, 2), "packed_new": False},
    {"code": True, "dtype": BF16, "paged": 4, "leftpad": True},
)  # fmt: skip


@every_case_quick
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", PACKED[:: 3 if INTERPRET else 1], ids=str)
def test_packed_new_keys(options: dict[str, Any], causal: bool) -> None:
    """FlashAttention 3's cu_seqlens_q and cu_seqlens_k_new, with tables of selected rows, padding, and float8."""
    base = {"queries": (3, 0, 5, 1), "new": (2, 4, 5, 0), "before": (7, 12, 0, 30), "length": 48, "head_dim": 32}
    base |= {"packed": True, "packed_new": True, "mask": (("causal", True),) if causal else ()}
    flash_cases.check_cached(Cached(**base | options))


def small(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 5, 4, 32).to(dtype), torch.randn(2, 9, 2, 32).to(dtype), torch.randn(2, 9, 2, 32).to(dtype)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


Q, K, V = small()
BEFORE = K.clone()
ONE = {"k": K[:, :1], "v": V[:, :1]}
ANGLES = torch.ones(9, 8)
USUAL: dict[Any, dict[str, Any]] = {
    flash_attn_func: {"q": Q, "k": K, "v": V},
    flash_attn_varlen_func: {
        "q": Q[0], "k": K[0], "v": V[0], "cu_seqlens_q": starts(2, 3), "cu_seqlens_k": starts(4, 5), "max_seqlen_q": 3,
        "max_seqlen_k": 9,
    },
    flash_attn_with_kvcache: {"q": Q, "k_cache": K, "v_cache": V},
    get_scheduler_metadata: {
        "batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 32,
        "cache_seqlens": ints(3, 4),
    },
}  # fmt: skip
# What only the read of a call refuses, from metadata alone, after new keys would have been written.
WRONG_KINDS: list[tuple[str, dict[str, Any]]] = [
    (
        "block_table: got strides [4, 2], needs a contiguous",
        {"q": Q[:, :1], "block_table": ints(0, 1, 1, 0, 1, 0, 0, 1).view(2, 4)[:, ::2]},
    ),
    ("qv: got float32 [10, 4, 32] on cpu, needs one KV head", {"qv": torch.zeros(2, 5, 4, 32)}),
    ("q: got float64", {"q": Q.double()}),
    ("k_cache: got float32 [2, 9, 2, 32] on cpu, needs dtype float16", {"q": Q.half()}),
    ("scheduler_metadata: got str, needs a tensor", {"scheduler_metadata": "plan"}),
    ("out: got strides [0, 0, 0, 0]", {"out": torch.zeros(1).expand(2, 5, 4, 32)}),
]
REFUSED: dict[Any, list[tuple[str, dict[str, Any]]]] = {
    flash_attn_func: [
        ("dropout_p", {"dropout_p": 0.1}),
        ("qv", {"qv": torch.zeros(1)}),
        ("attention_chunk: got -8", {"attention_chunk": -8}),
        ("alibi_slopes: got float32 [3, 4]", {"alibi_slopes": torch.rand(3, 4), "causal": True}),
        ("alibi_slopes: got 3 elements, needs 4", {"alibi_slopes": torch.rand(3), "causal": True}),
        *(
            ("alibi_slopes: got", {"q": Q[:1], "k": K[:1], "v": V[:1], "out": None, "alibi_slopes": slopes})
            for slopes in (torch.rand(2, 4), torch.rand(1, 4).expand(3, 4), torch.rand(1, 3))
        ),
        ("s_aux: got 2 elements, needs 4", {"s_aux": torch.zeros(2)}),
        ("softcap: got -1.0", {"softcap": -1.0}),
        ("softcap: got None, needs a number", {"softcap": None}),
        ("softmax_scale: got 'x', needs a number", {"softmax_scale": "x"}),
        ("softmax_scale: got nan, needs a finite number", {"softmax_scale": math.nan}),
        ("causal: got None, needs a bool", {"causal": None}),
        ("causal: got 'no', needs a bool", {"causal": "no"}),
        ("window_size: got 5, needs two ints", {"window_size": 5}),
        ("window_size: got (1,), needs two ints", {"window_size": (1,)}),
        ("window_size: got 1.5, needs an int", {"window_size": (1.5, 2)}),
        ("window_size: got None, needs an int", {"window_size": (None, None)}),
        ("alibi_slopes: got list, needs a tensor", {"alibi_slopes": [0.5] * 4}),
        ("s_aux: got float, needs a tensor", {"s_aux": 0.5}),
        ("out: got int32 [2, 5, 4, 32] on cpu, needs float16", {"out": torch.full((2, 5, 4, 32), 7).int()}),
        *(
            (
                f"{name}_descale: got float32 {shape} on cpu, needs [2, 2], [2], or one element",
                {
                    "q": Q.to(torch.float8_e4m3fn),
                    "k": K.to(torch.float8_e4m3fn),
                    "v": V.to(torch.float8_e4m3fn),
                    f"{name}_descale": torch.rand(shape),
                },
            )
            for name in "qkv"
            for shape in ([3, 2], [2, 4])
        ),
        ("out: got float32 [2, 5, 4]", {"out": torch.zeros(2, 5, 4)}),
        ("out: got strides [0, 32, 0, 1] for shape", {"out": torch.full((5, 1, 32), 7.0).expand(2, 5, 4, 32)}),
        ("k: got float16", {"k": K.half()}),
        ("v: got float32 [2, 8, 2, 32]", {"v": V[:, :8]}),
        ("v: got shape [9, 2, 32], needs [batch, seqlen, heads, head_dim]", {"v": V[0]}),
        ("k: got 3 KV heads", {"k": torch.zeros(2, 9, 3, 32), "v": torch.zeros(2, 9, 3, 32)}),
        ("s_aux: got a tensor that requires grad", {"s_aux": torch.zeros(4, requires_grad=True)}),
        ("q: got shape [2, 5, 0, 32]", {"q": Q[:, :, :0], "k": K[:, :, :0], "v": V[:, :, :0]}),
        ("q: got shape [2, 5, 4, 0]", {"q": Q[..., :0], "k": K[..., :0], "v": V[..., :0]}),
    ],
    flash_attn_varlen_func: [
        ("cu_seqlens_q: got 2 elements, needs 3", {"cu_seqlens_q": starts(5)}),
        ("cu_seqlens_k: got None", {"cu_seqlens_k": None}),
        ("seqused_q: got float32 [2] on cpu, needs dtype int32", {"seqused_q": torch.ones(2)}),
        ("max_seqlen_q: got 2, needs at least 3", {"max_seqlen_q": 2}),
        ("max_seqlen_q: got -1", {"max_seqlen_q": -1}),
        ("max_seqlen_q: got int32 [2] on cpu, needs an int", {"max_seqlen_q": ints(2, 3)}),
        ("max_seqlen_q: got float32 [] on cpu, needs an int", {"max_seqlen_q": torch.tensor(3.0)}),
        ("max_seqlen_k: got -2", {"max_seqlen_k": -2}),
        ("seqused_q: got list, needs a tensor [batch]", {"seqused_q": [2, 1]}),
        ("q: got None, needs a tensor", {"q": None, "seqused_q": ints(2, 1)}),
        ("qv: got list, needs a tensor", {"qv": [1], "seqused_q": ints(2, 1)}),
        ("out: got float32 [3] on cpu, needs [5, 4, 32]", {"out": torch.zeros(3), "seqused_q": ints(2, 1)}),
        ("out: got int32", {"out": torch.zeros(5, 4, 32).int(), "seqused_q": ints(2, 1)}),
        ("seqused_k: got [4, 1000], needs 0 to the sequences' lengths, [4, 5]", {"seqused_k": ints(4, 1000)}),
        ("seqused_k: got [4, 6], needs 0 to the sequences' lengths, [4, 5]", {"seqused_k": ints(4, 6)}),
        ("seqused_q: got [3, 1], needs 0 to the sequences' lengths, [2, 3]", {"seqused_q": ints(3, 1)}),
        ("seqused_q: got [-1, 1], needs 0 to", {"seqused_q": ints(-1, 1)}),
        ("cu_seqlens_k: got [0, 4, 10], needs ascending from 0 to at most 9", {"cu_seqlens_k": starts(4, 6)}),
        ("cu_seqlens_q: got int32 [0]", {"cu_seqlens_q": ints()}),
        ("cu_seqlens_k: got int32 [0]", {"cu_seqlens_k": ints()}),
    ],
    flash_attn_with_kvcache: [
        ("rotary_cos: ", {"rotary_cos": ANGLES, "rotary_sin": ANGLES, "cache_seqlens": ints(5, 9)}),
        ("cache_seqlens: got 9, needs at most 8, with 1 new", {"q": Q[:, :1], **ONE, "cache_seqlens": ints(5, 9)}),
        ("k_cache: got 2 sequences, needs at least 3", {"q": Q[[0, 1, 0]], "cache_seqlens": 4}),
        ("v: ", {"k": K[:, :1], "v": V[:, :2], "cache_seqlens": 4}),
        ("rotary_sin: got None", {**ONE, "rotary_cos": ANGLES}),
        ("rotary_cos: got None", {**ONE, "rotary_sin": ANGLES}),
        ("rotary_sin: got float32 [9, 4]", {**ONE, "rotary_cos": ANGLES, "rotary_sin": ANGLES[:, :4]}),
        (
            "rotary_cos: got 5 positions, needs at least 8",
            {**ONE, "rotary_cos": ANGLES[:5], "rotary_sin": ANGLES[:5], "cache_seqlens": 3, "causal": True},
        ),
        (
            "rotary_cos: got 4 positions, needs at least 5",
            {
                **{"q": Q[:, :1], "k": K[:, :2], "v": V[:, :2], "cache_seqlens": 3},
                **{"rotary_cos": ANGLES[:4], "rotary_sin": ANGLES[:4]},
            },
        ),
        (
            "rotary_cos: got 3 positions, needs at least 4",
            {
                **{"k": K[0, :0], "v": V[0, :0], "cu_seqlens_k_new": starts(0, 0), "cache_seqlens": 3},
                **{"rotary_cos": ANGLES[:3], "rotary_sin": ANGLES[:3]},
            },
        ),
        (
            "rotary_seqlens: got [-2, 1], needs at least 0",
            {**ONE, "rotary_cos": ANGLES, "rotary_sin": ANGLES, "cache_seqlens": 3, "rotary_seqlens": ints(-2, 1)},
        ),
        (
            "block_table: got block 7, needs blocks below 2",
            {**ONE, "cache_seqlens": 3, "block_table": ints(1, 7).view(2, 1)},
        ),
        *(
            (said, {**ONE, "cache_seqlens": 3, "block_table": ints(0, 1).view(2, 1), **changes})
            for said, changes in (
                ("q: got shape [2, 1, 3, 32], needs head_dim 32 and a multiple of 2 heads", {"q": Q[:, :1, :3]}),
                ("q: got shape [2, 1, 4, 31], needs head_dim 32", {"q": Q[:, :1, :, :31]}),
                ("softcap: got -1.0", {"softcap": -1.0}),
                ("alibi_slopes: got 3 elements, needs 4", {"alibi_slopes": torch.rand(3)}),
                ("alibi_slopes: got float32 [3, 4]", {"alibi_slopes": torch.rand(3, 4)}),
                ("alibi_slopes: got shape [], needs [num_heads]", {"alibi_slopes": torch.tensor(1.0)}),
                ("s_aux: got 2 elements, needs 4", {"s_aux": torch.zeros(2)}),
                ("block_table: got shape [3, 1], needs [2, max_blocks]", {"block_table": ints(0, 1, 0).view(3, 1)}),
                ("block_table: got shape [1, 1], needs [2, max_blocks]", {"block_table": ints(0).view(1, 1)}),
                ("block_table: got int64", {"block_table": torch.tensor([[0], [1]])}),
                (
                    "block_table: got -3 in row 1, column 0, needs -1 to 1",
                    {"q": Q[:, :1], "block_table": ints(0, -3).view(2, 1)},
                ),
                ("max_seqlen_q: got 0, needs at least 1", {"q": Q[:, :1], "max_seqlen_q": 0}),
                ("cu_seqlens_q: got [0, 5, 2], needs ascending", {"q": Q[0], "cu_seqlens_q": ints(0, 5, 2)}),
                ("cache_seqlens: got values from -4 to 4", {"cache_seqlens": ints(3, -5)}),
                ("rotary_interleaved: got None", {"rotary_interleaved": None}),
                *WRONG_KINDS,
            )
        ),
        ("q: got None, needs a tensor", {"q": None}),
        ("v: got None", {"k": K[:, :1]}),
        ("k: got None", {"v": V[:, :1]}),
        (
            "page_table: got int32 [2, 1] on cpu, needs None",
            {"block_table": ints(0, 1).view(2, 1), "page_table": ints(1, 0).view(2, 1)},
        ),
        ("cache_batch_idx: got values from 0 to 2, needs 0 to 1", {"cache_batch_idx": ints(0, 2)}),
        ("cache_batch_idx: got 3 elements, needs 2", {"cache_batch_idx": ints(0, 1, 0)}),
        ("cache_seqlens: got list", {"cache_seqlens": [5, 9]}),
        ("cache_seqlens: got -3", {"cache_seqlens": -3}),
        ("cache_seqlens: got int64 [2]", {"cache_seqlens": torch.tensor([5, 9])}),
        ("cache_leftpad: got values from -1 to 0", {"cache_leftpad": ints(-1, 0)}),
        (
            "cache_leftpad: got [2, 6], needs at most cache_seqlens, [5, 5]",
            {"cache_leftpad": ints(2, 6), "cache_seqlens": 5},
        ),
        ("max_seqlen_q: got -1", {"q": Q[0], "cu_seqlens_q": starts(2, 3), "max_seqlen_q": -1}),
        ("cu_seqlens_q: got int32 [0]", {"q": Q[0], "cu_seqlens_q": ints()}),
    ],
    get_scheduler_metadata: [
        ("cache_seqlens: got list, needs a tensor", {"cache_seqlens": [3, 4]}),
        ("cache_seqlens: got 2 elements, needs 3", {"batch_size": 3}),
        ("page_size: got 0, needs at least 1", {"page_size": 0}),
        ("page_size: got -1, needs at least 1", {"page_size": -1}),
        ("num_heads_kv: got 0, needs at least 1", {"num_heads_kv": 0}),
        ("batch_size: got None, needs an int", {"batch_size": None}),
        ("max_seqlen_k: got None, needs an int", {"max_seqlen_k": None}),
        ("max_seqlen_k_new: got -3, needs at least 0", {"max_seqlen_k_new": -3}),
        ("cu_seqlens_q: got list, needs a tensor", {"cu_seqlens_q": [0, 1, 2]}),
        ("cu_seqlens_k_new: got 4 elements, needs 3", {"cu_seqlens_k_new": starts(1, 1, 1)}),
        ("max_seqlen_q: got -1, needs at least 0", {"max_seqlen_q": -1}),
        ("max_seqlen_k: got -5, needs at least 0", {"max_seqlen_k": -5}),
        ("window_size: got 4, needs two ints", {"window_size": 4}),
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("function", "said", "changes"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_written(
    function: Any, said: str, changes: dict[str, Any]
) -> None:
    K.copy_(BEFORE)  # a test that failed may have written to it
    out = torch.full((2, 5, 4, 32), 7.0)
    given = USUAL[function] | ({"out": out} if function is flash_attn_func else {}) | changes
    for causal in {changes.get("causal", False), True} if function is flash_attn_varlen_func else {None}:
        with pytest.raises(RuntimeError if "requires grad" in said else (TypeError, ValueError)) as raised:
            function(**given | ({} if causal is None else {"causal": causal}))
        assert str(raised.value).startswith(said)
    assert torch.equal(K, BEFORE)
    assert (out == 7).all()


@pytest.mark.quick
@pytest.mark.parametrize(("said", "changes"), WRONG_KINDS)
def test_on_a_device_a_wrong_kind_of_call_writes_nothing(said: str, changes: dict[str, Any]) -> None:
    K.copy_(BEFORE)
    given = USUAL[flash_attn_with_kvcache] | ONE | {"cache_seqlens": 3, "block_table": ints(0, 1).view(2, 1)}
    with flash_cases.as_on_a_device(), pytest.raises((TypeError, ValueError)) as raised:
        flash_attn_with_kvcache(**given | changes)
    assert str(raised.value).startswith(said)
    assert torch.equal(K, BEFORE)


@every_case_quick
@pytest.mark.parametrize("watch", [torch.profiler.profile, lambda: torch.device("cpu")], ids=["profiler", "device"])
@pytest.mark.parametrize("changes", [{"block_table": ints(0, -3).view(2, 1)}, {"qv": Q}, {"cache_seqlens": 9}])
def test_a_watched_call_that_is_refused_writes_nothing(watch: Any, changes: dict[str, Any]) -> None:
    K.copy_(BEFORE)
    given = USUAL[flash_attn_with_kvcache] | ONE | {"cache_seqlens": 3, "block_table": ints(0, 1).view(2, 1)}
    name = next(iter(changes))
    with watch(), pytest.raises(ValueError, match=f"^{name}: got"):
        flash_attn_with_kvcache(**given | changes)
    assert torch.equal(K, BEFORE)


@pytest.mark.quick
def test_parameters_are_those_of_flash_attention() -> None:
    """FlashAttention 2.8's parameters go by position, FlashAttention 3's and those of vLLM and SGLang by name."""
    dense = "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    packed = dense.replace(" v ", " v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k ") + " block_table"
    cached = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table"
    cached += " softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    third = "qv q_descale k_descale v_descale attention_chunk num_splits pack_gqa sm_margin s_aux out"
    for function, in_order, others in (
        (flash_attn_func, dense, third),
        (flash_attn_varlen_func, packed, f"{third} seqused_q seqused_k scheduler_metadata fa_version"),
        (flash_attn_with_kvcache, cached, f"{third} page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q"
         " rotary_seqlens scheduler_metadata"),
    ):  # fmt: skip
        parameters = inspect.signature(function).parameters
        positional = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        assert positional == in_order.split()
        assert {*others.split()} <= {*parameters}


def test_no_lse_is_returned_for_none() -> None:
    """FlashAttention returns the lse if its argument is true, so None stands for False."""
    q, k, v = small()
    packed, starts_of_two = [x[:, :5].flatten(0, 1) for x in (q, k, v)], ints(0, 5, 10)
    for call in (
        lambda **given: flash_attn_func(q, k, v, **given),
        lambda **given: flash_attn_with_kvcache(q, k, v, **given),
        lambda **given: flash_attn_varlen_func(*packed, starts_of_two, starts_of_two, **given),
    ):
        assert torch.equal(call(return_softmax_lse=None), call(return_softmax_lse=False))


@pytest.mark.quick
def test_out_is_written_and_returned() -> None:
    q, k, v = small()
    wanted, out = flash_attn_func(q, k, v), torch.empty(2, 5, 4, 32)
    assert flash_attn_func(q, k, v, out=out) is out
    assert torch.equal(out, wanted)


@every_case_quick
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_descales(dtype: torch.dtype, per_sequence: bool) -> None:
    """k and v are quantized with a scale for each sequence and KV head, or one scale; q is quantized or not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, heads, 64, generator=generator) for n, heads in ((5, 4), (40, 2), (40, 2)))
    scales = [torch.rand(3, 2, generator=generator) + 0.5 for _ in range(3)]
    if not per_sequence:
        scales = [scale[:1, :1].expand(3, 2) for scale in scales]
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    given = q8 if dtype == torch.float8_e4m3fn else q.to(dtype)
    options = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    exact = [x.double() * s[:, None, :, None] for x, s in zip((k8, v8), scales[1:], strict=True)]
    factor = scales[0].repeat_interleave(2, 1)[:, None, :, None] if given is q8 else 1.0
    queries = given.double() * factor
    sequences = list(zip(queries.to(torch.bfloat16), *exact, strict=True))
    out = flash_attn_func(given, k8, v8, causal=True, **options)
    assert out.dtype == torch.bfloat16
    # k's rounding to bfloat16 after its scale exceeds the library's, which rounds q with all scales.
    flash_cases.check(out.flatten(0, 1), None, sequences, torch.bfloat16, causal=True)
    packed = (given.flatten(0, 1), k8.flatten(0, 1), v8.flatten(0, 1), starts(5, 5, 5), starts(40, 40, 40), 5, 40)
    assert torch.equal(flash_attn_varlen_func(*packed, causal=True, **options).view_as(out), out)


@pytest.mark.quick
def test_new_keys_are_stored_in_a_quantized_cache() -> None:
    q, k, v = (torch.randn(2, n, heads, 32) for n, heads in ((1, 4), (1, 2), (1, 2)))
    caches = [torch.zeros(2, 16, 2, 32, dtype=torch.float8_e4m3fn) for _ in range(2)]
    descale = torch.full((1, 1), 0.5).expand(2, 2)
    options = {"k_descale": descale, "v_descale": descale}
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, **options)
    assert torch.equal(caches[0][:, :1].float(), (k / 0.5).to(torch.float8_e4m3fn).float())
    torch.testing.assert_close(out, v.repeat_interleave(2, 2), atol=0.1, rtol=0.07)
    with pytest.raises(ValueError, match=r"^k_descale: .*the same for every sequence"):
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, k_descale=torch.rand(2, 2), v_descale=descale)


@pytest.mark.quick
def test_dense_keys_and_values_are_read_where_they_are() -> None:
    """The operators get the caller's memory, for every order of heads, tokens and sequences."""
    q, k, v = small()
    wide = torch.randn(4, 3, 2, 20, 32)
    for key, value in (
        (k, v),
        (k.transpose(1, 2).contiguous().transpose(1, 2), v.transpose(1, 2).contiguous().transpose(1, 2)),
        (wide[0, :2, :, :9].transpose(1, 2), wide[1, :2, :, :9].transpose(1, 2)),
        (k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)),
    ):
        key_cache, value_cache, _ = as_blocks(key, value)
        assert key_cache.data_ptr() == key.data_ptr()
        assert value_cache.data_ptr() == value.data_ptr()
        flash_attn_func(q, key, value)


@pytest.mark.quick
def test_a_padded_step_of_transformers_writes_nothing() -> None:
    """Entries of -1 are rows of a captured graph without a request."""
    q, k, v = torch.randn(3, 1, 4, 32), torch.randn(3, 1, 2, 32), torch.randn(3, 1, 2, 32)
    caches = [torch.randn(4, 8, 2, 32) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    tables = torch.tensor([[2, 0], [-1, -1], [-1, -1]], dtype=torch.int32)
    out = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=torch.tensor([9, -1, -1], dtype=torch.int32), block_table=tables, causal=True
    )
    assert not out[1:].any()
    before[0][0, 1], before[1][0, 1] = k[0, 0], v[0, 0]
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True))


FOUND = ("dense", "heads first", "lse", "narrow", "packed", "new keys", "index", "paged", "leftpad", "halves", "rotary")


@pytest.mark.parametrize("name", FOUND)
def test_a_call_that_is_found_gives_the_same(name: str) -> None:
    """From the second call of a kind on, no views of arguments are made, and kernels find slots and tables."""
    q, k, v = small()
    both = torch.randn(2, 2, 32, 2, 32)
    cached = (q[:, :1].contiguous(), *both.unbind(), k[:, :1].contiguous(), v[:, :1].contiguous())
    lens, cos = torch.tensor([3, 20], dtype=torch.int32), torch.randn(32, 8)
    tables = torch.tensor([[1, -1], [0, 1]], dtype=torch.int32)
    packed = (q[0], *both[:, 0, :9], starts(2, 3), starts(4, 5), 3, 9)
    calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "dense": (flash_attn_func, (q, k, v), {"causal": True}),
        "heads first": (flash_attn_func, (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
        "lse": (flash_attn_func, (q, k, v), {"window_size": (3, 3), "return_softmax_lse": True}),
        "narrow": (flash_attn_func, (q, k, v[..., :16].contiguous()), {}),
        "packed": (flash_attn_varlen_func, packed, {"causal": True}),
        "new keys": (flash_attn_with_kvcache, cached, {"cache_seqlens": lens, "causal": True}),
        "index": (flash_attn_with_kvcache, cached[:3], {"cache_seqlens": 7, "cache_batch_idx": lens.remainder(2)}),
        "paged": (flash_attn_with_kvcache, cached, {"cache_seqlens": lens % 16, "block_table": tables}),
        "leftpad": (flash_attn_with_kvcache, cached[:3], {"cache_seqlens": lens, "cache_leftpad": lens // 2}),
        "halves": (flash_attn_with_kvcache, (*cached, cos, cos + 1, lens), {"rotary_interleaved": False}),
        "rotary": (flash_attn_with_kvcache, (*cached, cos, cos + 1, lens), {"causal": True}),
    }  # fmt: skip
    function, arguments, options = calls[name]
    before = both.clone()
    wanted, written = function(*arguments, **options), both.clone()
    with flash_cases.as_on_a_device():
        for _ in range(3):
            both.copy_(before)
            torch.testing.assert_close(function(*arguments, **options), wanted)
            assert torch.equal(both, written)


@pytest.mark.quick
def test_tokens_outside_of_a_block_table_are_not_written() -> None:
    """If values are not read: tokens after the table's end, in a hole, and in a row of length -1 are not written."""
    caches = torch.zeros(2, 4, 16, 2, 32)
    new, lens = torch.ones(5, 1, 2, 32), torch.tensor([3, 16, 32, 40, -1], dtype=torch.int32)
    tables = torch.tensor([[-1, 1], [0, -1], [2, 3], [0, 0], [1, 1]], dtype=torch.int32)
    # PyTorch's attention reads values after the write, so it still refuses these lengths.
    refused = contextlib.nullcontext() if KERNELS_ON_CPU else pytest.raises(ValueError, match=r"^cache_seqlens: got")
    with flash_cases.as_on_a_device(), refused:
        flash_attn_with_kvcache(
            torch.ones(5, 1, 4, 32), *caches, new, new, cache_seqlens=lens, block_table=tables, causal=True
        )
    assert not caches.any()


@pytest.mark.parametrize("paged", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["packed", "paged"])
def test_used_queries(paged: bool) -> None:
    """With FlashAttention 3's seqused_q, the mask ends at the last used query, and other queries give 0."""
    generator, lens = torch.Generator().manual_seed(0), ((4, 6, 9), (0, 2, 5), (3, 3, 7), (2, 2, 0))
    drawn_of = [[torch.randn(n, h, 32, generator=generator) for n, h in ((m, 4), (k, 2), (k, 2))] for _, m, k in lens]
    sequences = [(q[:used], k, v) for (used, _, _), (q, k, v) in zip(lens, drawn_of, strict=True)]
    q, k, v = (torch.cat(tensors) for tensors in zip(*drawn_of, strict=True))
    q = torch.cat([q, torch.full_like(q[:2], float("nan"))])
    used, begins = torch.tensor([n for n, _, _ in lens], dtype=torch.int32), starts(*(m for _, m, _ in lens))
    tables = None
    if paged:
        k, v, tables = in_pages([s[1] for s in drawn_of], [s[2] for s in drawn_of], generator)
    given = (q, k, v, begins, starts(*(n for _, _, n in lens)), 6, 9)
    is_used = torch.cat([torch.arange(m) < n for n, m, _ in lens] + [torch.zeros(2, dtype=torch.bool)])
    for options in ({"causal": True}, {"window_size": (2, 1)}):
        out, lse, _ = flash_attn_varlen_func(
            *given, block_table=tables, seqused_q=used, return_attn_probs=True, out=torch.empty_like(q), **options
        )
        flash_cases.check(out[is_used], lse[:, is_used], sequences, torch.float32, **options)
        assert not out[~is_used].any()
        assert (lse[:, ~is_used] == flash_cases.EMPTY).all()


def check_outside_of_the_grid(case: Case, pages: tuple[int, ...], packed: tuple[bool, ...]) -> None:
    """Check dense keys, caches with pages of these sizes, and packed keys, in pages or not.

    Some sequences have fewer keys than queries.
    """
    case = dataclasses.replace(case, heads="mqa" if INTERPRET else "gqa", head_dim=16, dtype=torch.float32)
    flash_cases.check_dense(case, "mixed")
    for lengths, paged in itertools.product((case.lengths, case.lengths[::-1])[: 1 if INTERPRET else 2], packed):
        flash_cases.check_varlen(dataclasses.replace(case, lengths=lengths), paged)
    (queries, keys), term = case.lengths, dict(case.term)
    slopes = {None: "", True: "alibi", "each": "each"}[term.pop("alibi_slopes", None)]
    if "s_aux" in term:
        term["s_aux"] = torch.randn(HEADS[case.heads][0])
    base = Cached((queries, 1, 0, queries, 3), (0,) * 5, keys, (keys, keys // 2, 3, keys // 3, 0), packed=True)
    base = dataclasses.replace(base, mask=(*case.mask.items(), *term.items()), term=slopes, heads=case.heads)
    for size in pages:
        flash_cases.check_cached(dataclasses.replace(base, head_dim=16, paged=size))


EACH = ({"causal": True}, {"window_size": (2, -1), "softcap": 3.0}, {}, {"window_size": (4, 2), "s_aux": True})


@pytest.mark.parametrize("options", [pytest.param(o, marks=pytest.mark.slow if o else (), id=str(o)) for o in EACH])
def test_slopes_of_each_sequence(options: dict[str, Any]) -> None:
    """The slopes are `[batch, heads]`, as in FlashAttention's own tests, for all three functions."""
    terms = ("softcap", "s_aux")
    mask = {name: value for name, value in options.items() if name not in terms}
    term = {name: options[name] for name in terms if name in options}
    check_outside_of_the_grid(Case((5, 9), mask, {**term, "alibi_slopes": "each"}), (0,), (False,))


@pytest.mark.quick
def test_no_value_on_a_device_is_read() -> None:
    """Fake tensors have no values, so reading one raises. So a CUDA graph can capture the call."""
    with flash_cases.as_on_a_device(), FakeTensorMode():
        q, k, v = (torch.empty(2, 1, heads, 32) for heads in (4, 2, 2))
        caches, lens = torch.empty(2, 2, 32, 2, 32), torch.empty(2, dtype=torch.int32)
        cos, tables = torch.empty(32, 16), torch.empty(2, 4, dtype=torch.int32)
        for paged, options in itertools.product(
            (None, tables), ({"causal": True}, {"window_size": (3, 2)}, {"alibi_slopes": torch.empty(4)})
        ):
            out = flash_attn_with_kvcache(q, *caches, k, v, cos, cos, lens, block_table=paged, **options)
            assert out.shape == q.shape
        leftpad = flash_attn_with_kvcache(q, *caches, cache_seqlens=lens, cache_leftpad=lens)
        begin = torch.empty(3, dtype=torch.int32)
        packed = flash_attn_varlen_func(q[:, 0], k[:, 0], v[:, 0], begin, begin.clone(), 2, 2, window_size=(3, 1))
        assert (leftpad.shape, packed.shape) == (q.shape, q[:, 0].shape)
        with pytest.raises(DataDependentOutputException):
            int(lens.max())


@pytest.mark.quick
def test_empty_batches() -> None:
    q, k, v = small()
    assert flash_attn_func(q[:0], k[:0], v[:0]).shape == (0, 5, 4, 32)
    assert flash_attn_func(q[:, :0], k, v).shape == (2, 0, 4, 32)
    out, lse = flash_attn_func(q, k[:, :0], v[:, :0], return_softmax_lse=True)
    assert not out.any()
    assert (lse == flash_cases.EMPTY).all()
    assert pc.flash_attn.flash_attn_func is flash_attn_func
    q, k, v = (x[0, :, :, ::2] for x in (q, k, v))  # their last dimension is not contiguous
    for queries, keys in ((0, 9), (5, 0), (0, 0)):
        out = flash_attn_varlen_func(q[:queries], k[:keys], v[:keys], starts(queries), starts(keys), 5, 9, causal=True)
        assert out.shape == (queries, 4, 16)


def test_descales_of_no_sequences() -> None:
    """Queries without a sequence are padding, whose results are 0, whatever their factor."""
    names = ("q_descale", "k_descale", "v_descale")
    q, k, v = (x.to(torch.float8_e4m3fn) for x in small())
    for shape in ((0, 2), (0, 1), (2,), (1,)):
        given = {name: torch.rand(shape) for name in names}
        assert flash_attn_func(q[:0], k[:0], v[:0], **given).shape == (0, 5, 4, 32)
        out = flash_attn_varlen_func(q[0], k[0], v[0], starts(), starts(), 5, 9, **given)
        assert torch.equal(out, torch.zeros(5, 4, 32, dtype=torch.bfloat16))


@every_case_quick
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (0, -1)}], ids=str)
@pytest.mark.parametrize("used", [False, True])
def test_a_step_of_padding_alone(mask: dict[str, Any], used: bool) -> None:
    """A batch has no sequences, but graphs pad its queries and new keys."""
    q, k, v = small()
    lens, options = ints(), {**mask, "return_softmax_lse": True}
    given = {"seqused_q": lens} if used else {}
    for slopes in (None, torch.rand(4), torch.rand(0, 4)):
        options |= {"alibi_slopes": slopes}
        packed = flash_attn_varlen_func(q[0], k[0], v[0], starts(), starts(), 5, 9, **options, **given)
        cached = flash_attn_with_kvcache(
            q[0], k, v, k[0], v[0], cache_seqlens=lens, cu_seqlens_q=starts(), cu_seqlens_k_new=starts(),
            block_table=torch.empty(0, 3, dtype=torch.int32), **options,
        )  # fmt: skip
        for out, lse in (packed, cached):
            assert torch.equal(out, torch.zeros_like(q[0]))
            assert torch.equal(lse, torch.full((4, 5), -math.inf))


@every_case_quick
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (3, 2)}, {"window_size": (0, -1)}], ids=str)
def test_no_queries(mask: dict[str, Any]) -> None:
    """There is no sequence, or no sequence has queries; also with an lse and slopes."""
    q, k, v = small()
    for queries, keys, values in ((q[:0], k[:0], v[:0]), (q[:, :0], k, v), (q[:, :0], k[:, :0], v[:, :0])):
        for slopes in (None, torch.rand(4), torch.rand(len(queries), 4)):
            options = {**mask, "alibi_slopes": slopes, "return_softmax_lse": True}
            out, lse = flash_attn_func(queries, keys, values, **options)
            assert (out.shape, lse.shape) == (queries.shape, (len(queries), 4, queries.shape[1]))
            starts, starts_k = (torch.arange(len(queries) + 1, dtype=torch.int32) * x.shape[1] for x in (queries, keys))
            packed = [x.flatten(0, 1) for x in (queries, keys, values)]
            out, lse = flash_attn_varlen_func(*packed, starts, starts_k, queries.shape[1], keys.shape[1], **options)
            assert (out.shape, lse.shape) == (packed[0].shape, (4, len(packed[0])))


@pytest.mark.quick
def test_no_sequences_of_no_memory() -> None:
    q, k, v, caches = torch.empty(0, 5, 4, 32), *torch.empty(2, 0, 9, 2, 32), torch.empty(2, 0, 32, 2, 32)
    assert flash_attn_func(q, k, v, causal=True).shape == q.shape
    assert flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.empty(0, dtype=torch.int32)).shape == q.shape


@pytest.mark.quick
def test_a_negative_leftpad_reads_no_neighbour() -> None:
    """Values are not read in this test."""
    q, k, v = small()
    leftpad, lens = torch.tensor([0, -4], dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)
    wanted = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens)
    with flash_cases.as_on_a_device():
        torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_leftpad=leftpad), wanted)


# The interpreter takes seconds for a call, so only two sides are tested, with the smallest and largest positions.
LEFT, RIGHT = ((2,), (9, 2**31 - 1)) if INTERPRET else ((-1, 2, 12), (-1, 8, 9, 10**4, 2**30, 2**31 - 1))


@every_case_quick
@pytest.mark.parametrize("term", [{}, {"alibi_slopes": True}], ids=["", "alibi"])
def test_a_side_as_far_as_all_keys_is_none(term: dict[str, Any]) -> None:
    """The results are right also if positions exceed 32 bits, and for paged caches with any block size."""
    for sides in itertools.product(LEFT, RIGHT):
        check_outside_of_the_grid(Case((9, 12), {"window_size": sides}, term), (1, 5), ())


@pytest.mark.quick
def test_slopes_of_many_queries_lose_nothing() -> None:
    """Biases of keys after a query are as small as those of keys before it."""
    generator, n = torch.Generator().manual_seed(0), 96 if INTERPRET else 1500
    q, k, v = (torch.randn(n, 1, 16, generator=generator) for _ in range(3))
    slopes = torch.full((1,), 0.55)
    out = flash_attn_func(q[None], k[None], v[None], alibi_slopes=slopes)
    wanted, _ = flash_cases.attention(q, k, v, alibi_slopes=slopes)
    torch.testing.assert_close(out[0].double(), wanted, atol=5e-6, rtol=5e-6)


CHUNKS = (
    ({"causal": True}, {}),
    ({}, {}),
    ({"window_size": (5, 0)}, {}),
    ({"window_size": (3, 9)}, {}),
    ({"causal": True}, {"alibi_slopes": True}),
    ({}, {"alibi_slopes": True}),
)


@every_case_quick
@pytest.mark.parametrize("chunk", [12, 8, 48, 100] if INTERPRET else [1, 8, 12, 48, 100])
@pytest.mark.parametrize(("mask", "term"), CHUNKS[:: 2 if INTERPRET else 1], ids=str)
def test_attention_chunk(mask: dict[str, Any], term: dict[str, Any], chunk: int) -> None:
    check_outside_of_the_grid(Case((20, 48), {**mask, "attention_chunk": chunk}, term), (5,), (False, True))


@every_case_quick
@pytest.mark.parametrize("joined", [False, True], ids=["apart", "one row"])
def test_second_part_of_queries(joined: bool) -> None:
    """FlashAttention 3's qv for MLA: scores use both parts, the first for keys, the second for values."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 9, 1, 64 + 32, generator=generator)
    q, qv = torch.randn(2, 3, 4, 32, generator=generator), torch.randn(2, 3, 4, 64, generator=generator)
    v, k = rows[..., :64], rows[..., 64:]
    if not joined:
        k, v = k.contiguous(), v.contiguous()
    for options in ({"causal": True}, {}, {"causal": True, "attention_chunk": 4}):
        pairs = [(torch.cat([b, a], 2), torch.cat([y, x], 2)) for a, b, x, y in zip(q, qv, k, v, strict=True)]
        wanted = torch.stack([flash_cases.attention(query, key, key, **options)[0] for query, key in pairs])[..., :64]
        tables = torch.tensor([[0], [1]], dtype=torch.int32)
        for given in ({}, {"cache_seqlens": 9}, {"cache_seqlens": 9, "block_table": tables}):
            function: Any = flash_attn_with_kvcache if given else flash_attn_func
            out = function(q, k, v, qv=qv, **given, **options)
            torch.testing.assert_close(out, wanted.float(), atol=3e-6, rtol=3e-6)
    for wrong in ({"window_size": (3, 0)}, {"s_aux": torch.zeros(4)}, {"qv": qv[..., :8]}, {"qv": qv.half()}):
        with pytest.raises((TypeError, ValueError), match=r"^qv: got"):
            flash_attn_func(q, k, v, **{"qv": qv, **wrong})


@every_case_quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine(dtype: torch.dtype) -> None:
    """Parts over pieces of the keys sum to the whole; a part without keys is ignored, whatever it holds."""
    q, k, v = small()
    whole = flash_attn_func(q, k, v, return_softmax_lse=True)
    parts = [flash_attn_func(q, k[:, i : i + 3], v[:, i : i + 3], return_softmax_lse=True) for i in (0, 3, 6)]
    outs = torch.stack([out for out, _ in parts] + [torch.full_like(q, float("nan"))])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts] + [torch.full((2, 5, 4), flash_cases.EMPTY)])
    out, lse = flash_attn_combine(outs, lses, out_dtype=dtype)
    torch.testing.assert_close(lse, whole[1].transpose(1, 2))
    torch.testing.assert_close(out.float(), whole[0], atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    given = torch.empty(10, 4, 32)
    assert flash_attn_combine(outs.flatten(1, 2), lses.flatten(1, 2), given)[0] is given
    torch.testing.assert_close(given, whole[0].flatten(0, 1))
    out, lse = flash_attn_combine(outs[3:], lses[3:])
    assert not out.any()
    assert (lse == flash_cases.EMPTY).all()
    for said, wrong in (
        ("out_partial", (outs[0, 0], lses)),
        ("lse_partial", (outs, lses[:2])),
        ("out", (outs, lses, q[0])),
    ):
        with pytest.raises(ValueError, match=f"^{said}: "):
            flash_attn_combine(*wrong)
    for said, others in (
        ("out_partial: got int32", (outs.int(), lses)),
        ("lse_partial: got float16", (outs, lses.half())),
        ("out: got int64", (outs, lses, q.long())),
        ("out: got int, needs a tensor of float16 or bfloat16 or float32", (outs, lses, 3)),
    ):
        with pytest.raises(TypeError, match=f"^{said}"):
            flash_attn_combine(*others)


@every_case_quick
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (5, 0)}, {}], ids=str)
@pytest.mark.parametrize("new", [0, 1])
def test_scheduler_metadata(options: dict[str, Any], new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a step share one plan, so the operator builds none; a plan that does not fit is ignored."""
    q, k, v = (torch.randn(2, 1, heads, 32) for heads in (4, 2, 2))
    caches, lens = torch.randn(2, 6, 16, 2, 32).unbind(), torch.tensor([20, 33], dtype=torch.int32)
    tables, written = torch.tensor([[1, 2, 5], [4, 0, 3]], dtype=torch.int32), {"k": k, "v": v} if new else {}
    given = {"cache_seqlens": lens, "block_table": tables, **options, **written}
    wanted = flash_attn_with_kvcache(q, *caches, **given)
    plan = get_scheduler_metadata(2, 1, 48, 4, 2, 32, lens, page_size=16, max_seqlen_k_new=new, **options)
    seen = []
    name = "sliding_window_attention" if "window_size" in options else "paged_attention"
    operator = getattr(flash_cases._flash.attend, name)
    spy = functools.wraps(operator)(lambda *given: seen.append(given[-2]) or operator(*given))
    monkeypatch.setattr(flash_cases._flash.attend, name, spy)
    torch.testing.assert_close(flash_attn_with_kvcache(q, *caches, scheduler_metadata=plan, **given), wanted)
    assert seen[-1] is plan
    flash_attn_with_kvcache(q, *caches, scheduler_metadata=plan[:-1], **given)
    assert seen[-1] is None


@every_case_quick
@pytest.mark.parametrize("new", [1, 0])
def test_scheduler_metadata_of_fewer_keys_than_queries(new: int) -> None:
    """A plan is built for such a step too, and calls give the same results as without it."""
    q, k, v = torch.randn(3, 7, 4, 32), *torch.randn(2, 3, 2, 2, 32)
    caches, lens = torch.randn(2, 3, 16, 2, 32).unbind(), torch.tensor([3, 14, 0], dtype=torch.int32)
    given = {"cache_seqlens": lens, "causal": True, **({"k": k, "v": v} if new else {})}
    wanted = flash_attn_with_kvcache(q, *caches, **given)
    plan = get_scheduler_metadata(3, 7, 16, 4, 2, 32, lens, page_size=16, max_seqlen_k_new=2 * new, causal=True)
    torch.testing.assert_close(flash_attn_with_kvcache(q, *caches, scheduler_metadata=plan, **given), wanted)


@every_case_quick
@pytest.mark.parametrize("left", [42, 43, 47, 48, 63, 64])
def test_scheduler_metadata_with_a_window_near_the_longest_sequence(left: int) -> None:
    """The plan and the call agree whether a window is a bound, also if max_seqlen_k ends inside a block."""
    q, caches = torch.randn(2, 4, 32), torch.randn(2, 6, 16, 2, 32).unbind()
    lens, tables = ints(43, 41), torch.tensor([[1, 2, 5], [4, 0, 3]], dtype=torch.int32)
    given = {"seqused_k": lens, "block_table": tables, "causal": True, "window_size": (left, 0)}
    wanted = flash_attn_varlen_func(q, *caches, starts(1, 1), None, 1, 43, **given)
    plan = get_scheduler_metadata(2, 1, 43, 4, 2, 32, lens, page_size=16, causal=True, window_size=(left, 0))
    found = flash_attn_varlen_func(q, *caches, starts(1, 1), None, 1, 43, **given, scheduler_metadata=plan)
    torch.testing.assert_close(found, wanted)


def test_metadata_of_a_dense_cache_serve_its_calls():
    """They are made for blocks of 16 tokens, without the cache, whose sequences may be blocks of another size."""
    lens = torch.tensor([20, 7], dtype=torch.int32)
    q, k, v = torch.randn(2, 1, 4, 64), torch.randn(2, 64, 2, 64), torch.randn(2, 64, 2, 64)
    plan = get_scheduler_metadata(2, 1, 64, 4, 2, 64, lens, causal=True)
    given = {"cache_seqlens": lens, "causal": True}
    expected = flash_attn_with_kvcache(q, k, v, **given)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, **given, scheduler_metadata=plan), expected)
    with pytest.raises(ValueError, match="scheduler_metadata: got"):
        flash_attn_with_kvcache(q, k, v, **(given | {"cache_seqlens": lens + 1}), scheduler_metadata=plan)
