"""`pc check`: every operator is in it, PyTorch passes it, and a kernel that is broken on purpose does not."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pc
from pc.triton_ops._core.operator import LIBRARY
from pc.triton_ops._core.runtime import INTERPRET
from pc.triton_ops._verify import USES, Shape, check_kernels
from pc.triton_ops._verify.cases import all_cases, small_cases

CPU = torch.device("cpu")


def operators() -> set[str]:
    """Return the names of the package's operators; other tests register some of their own."""
    names = {name.removeprefix("pc::").partition(".")[0] for name in LIBRARY._op_defs}
    return {name for name in names if not name.startswith("test_")}


def test_every_operator_has_a_case() -> None:
    checked = {case.operator for case in all_cases(wide=True)}
    assert len(operators()) > 20
    assert operators() - checked == set()
    assert {case.operator for use in USES for case in small_cases(Shape(), use)} <= checked
    names = [(case.operator, case.name) for case in all_cases(wide=True)]
    assert len(names) == len(set(names))


@pytest.mark.skipif(INTERPRET, reason="kernels run here")
def test_pytorch_gives_what_the_formulas_give() -> None:
    """The formulas are a separate implementation, so this compares two implementations."""
    rows = check_kernels(CPU)
    assert [row for row in rows if not row.ok] == []
    assert {row.operator for row in rows} >= operators()


SHAPES = [Shape(heads=4, kv_heads=1), Shape(torch.float32, 3, 1, 80, 8, (5, 70)), Shape(windows=())]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_small_part_is_of_a_models_layers(shape: Shape) -> None:
    rows = check_kernels(CPU, small=shape)
    assert [row for row in rows if not row.ok] == []
    assert len(rows) == 2 + 2 * (1 + len(shape.windows)) + 3 + 5


_numbers = itertools.count()


@contextlib.contextmanager
def broken(file: str, old: str, new: str, folder: Path) -> Iterator[None]:
    """Make the interpreter run a file of kernels in which `old` is replaced by `new`, within the block."""
    module = importlib.import_module(f"pc.triton_ops.kernels.{file}")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert old in source, f"{file}.py has no {old!r}"
    path = folder / f"{file}_{next(_numbers)}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    changed = types.ModuleType(module.__name__)
    changed.__dict__.update(__file__=str(path), __package__=module.__package__)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), changed.__dict__)
    kernels = {name: kernel for name, kernel in vars(module).items() if hasattr(kernel, "rewriter")}
    before = {name: {**vars(kernel)} for name, kernel in kernels.items()}
    try:
        for name, kernel in kernels.items():
            vars(kernel).update(vars(changed.__dict__[name]))
        yield
    finally:
        for name, kernel in kernels.items():
            vars(kernel).update(before[name])


CAUSAL = ("predicate", "hi = tl.minimum(hi, high + 1)", "hi = tl.minimum(hi, high + 2)")
SCALE = ("program", "qk_scale = scale\n", "qk_scale = scale * 1.1\n")
QUERY = ("program", "head[:, None] * strides.stride_qh", "head[:, None] * (strides.stride_qh // 2)")
WINDOW = ("predicate", "low - mask.window + 1)", "low - mask.window + 2)")
KEYS = (
    "mainloop",
    "(offs_n % BLOCK_SIZE).to(tl.int64) * stride_t)",
    "(offs_n % BLOCK_SIZE).to(tl.int64) * (stride_t // 2))",
)
LSE = ("scores", "(m + tl.log2(denominator)) * LN2", "m + tl.log2(denominator)")
RESULT = ("scores", "row = q_token * NUM_HEADS + head", "row = q_token * NUM_HEADS + NUM_HEADS - 1 - head")
LIST = ("lists", "exists = (block >= 0) & (block < blocks)", "exists = (block > 0) & (block < blocks)")
COLUMNS = ("move_rows", "(cols < width)[None, :]", "(cols < width - 1)[None, :]")
BLOCKS = ("move_rows", "tl.cast(address[1], tl.int64) * VECTOR", "tl.cast(address[1], tl.int64) // 2 * VECTOR")
ROTATION = [
    ("move_slots", "mask_p = pair < HALF", "mask_p = pair < HALF - 1"),
    ("move_slots", "b * cos + a * sin", "b * cos + a * sin * 1.01"),
]
JOINED = ("join_prefix", "sequence * stride_bs", "sequence * 0")

SPARSE, LATENT, SPARSE_LATENT = "sparse_gap_attention", "latent_attention", "sparse_latent_attention"
WINDOWED, SHARED, ROTATED = "sliding_window_attention", "shared_prefix_attention", "rotate_keys"

BREAKS: dict[str, list[tuple[str, str, str]]] = {
    "paged_attention: float16, chunk": [CAUSAL, SCALE, QUERY],
    "paged_attention: float16, value_dim 32": [("program", "strides.stride_vt,\n", "strides.stride_vt // 2,\n")],
    "paged_attention_with_lse: float32, softcap, ALiBi, sinks, chunk": [CAUSAL, LSE],
    "paged_attention_with_lse: float32, softcap, ALiBi, sinks, decode": [RESULT],
    f"{WINDOWED}: float16, decode": [WINDOW, SCALE],
    f"{WINDOWED}: float16, chunk": [KEYS],
    f"{WINDOWED}_with_lse: float16, not causal": [
        ("predicate", "hi = tl.minimum(hi, high + mask.window)", "hi = tl.minimum(hi, high + mask.window - 1)")
    ],
    f"{WINDOWED}_with_lse: float16, decode": [LSE, QUERY],
    f"{SPARSE}: float16, holes, scattered": [
        (
            "program",
            "pos = tl.load(positions_ptr + sequence.q_begin + token, mask=mask_m, other=0)",
            "pos = tl.load(positions_ptr + sequence.q_begin + token, mask=mask_m, other=0) + 1",
        )
    ],
    f"{SPARSE}: float16, holes, decode": [SCALE],
    f"{SPARSE}: float16, a table per head, decode": [
        ("attention", "tl.cast(head, tl.int64) * stride_bh", "tl.cast(head, tl.int64) * 0")
    ],
    f"{SPARSE}: float16, lists of blocks, chunk": [LIST],
    f"{SPARSE}_with_lse: float16, a tree": [("mainloop", "(own & 31)[None, :]", "(own & 30)[None, :]")],
    f"{SPARSE}_with_lse: float16, lists": [
        LSE,
        ("lists", "tl.cast(head, tl.int64) * stride_lh", "tl.cast(head, tl.int64) * 0"),
    ],
    f"{SHARED}: float16, decode": [
        ("shared_prefix", "tl.store(lens_ptr, prefix_len)", "tl.store(lens_ptr, prefix_len - 1)"),
        ("merge_attention", "(weight_a / total)[:, None]", "(weight_a / total * 1.05)[:, None]"),
        QUERY,
    ],
    f"{SHARED}_with_lse: float16": [CAUSAL, LSE, ("merge_attention", "head * stride_lah", "head * 0")],
    f"{LATENT}: float16, decode": [SCALE, QUERY],
    f"{LATENT}: float16, int8": [
        (
            "program",
            "qk_scale *= tl.cast(tl.load(k_scale_ptr + kv_head * (traits.SCALES - 1)), tl.float32)",
            "qk_scale *= 1.0",
        )
    ],
    f"{LATENT}_with_lse: float16, chunk": [CAUSAL, LSE, QUERY],
    f"{SPARSE_LATENT}: float16, holes": [WINDOW, SCALE, QUERY],
    f"{SPARSE_LATENT}_with_lse: float16": [
        LIST,
        LSE,
        ("lists", "number64 * cache.stride_kb", "number64 * (cache.stride_kb // 2)"),
    ],
    "attention_plan: float16, decode": [("plan", "(block < blocks)", "(block < blocks - 1)")],
    "attention_plan: float16, window": [
        ("plan", "tl.where(partial > 0, PARTIAL_TILES, 0)", "0"),
        ("plan", "seq * stride_bt", "seq * 0"),
    ],
    "reshape_and_cache: float16": [
        (
            "reshape_and_cache",
            "(offs_d[None, :] < HEAD_DIM)\n    mask_v",
            "(offs_d[None, :] < HEAD_DIM - 1)\n    mask_v",
        )
    ],
    "reshape_and_cache: bfloat16 to int8": [("reshape_and_cache", "v_scale[:, None]", "k_scale[:, None]")],
    "reshape_and_cache: float32": [
        ("reshape_and_cache", "offset * strides.stride_vct", "offset * (strides.stride_vct // 2)")
    ],
    "rope_and_cache: float32": [
        ("rope_and_cache", "offs_d < ROTARY_DIM", "offs_d < ROTARY_DIM - 2"),
        ("rope_and_cache", "y * sin[None, :]", "y * sin[None, :] * 1.01"),
        ("rope_and_cache", "heads.to(tl.int64)[:, None] * stride", "heads.to(tl.int64)[:, None] * (stride // 2)"),
    ],
    f"{ROTATED}: float32": [
        *ROTATION,
        ("move_slots", "target % BLOCK_SIZE * stride_kt", "target % BLOCK_SIZE * (stride_kt // 2)"),
    ],
    "move_slots: float32": [
        *ROTATION,
        ("move_slots", "target % BLOCK_SIZE * stride_vt", "target % BLOCK_SIZE * 8"),
    ],
    "merge_attention: float16": [
        ("merge_attention", "row < num_rows", "row < num_rows - 1"),
        ("merge_attention", "tl.exp(lse_b - safe)", "tl.exp(lse_b - safe) * 1.05"),
        ("merge_attention", "token * stride_bt +", "token * (stride_bt // 2) +"),
    ],
    "join_prefix: bfloat16, rows at the end": [
        ("join_prefix", "is_new = live & (token >= first_token)", "is_new = live & (token > first_token)")
    ],
    "join_prefix: bfloat16, rows in gaps": [JOINED],
    "join_prefix_list: float32, rows in gaps": [COLUMNS],
    "join_prefix_list: float32, rows at the end": [JOINED],
    "flash_attn_with_kvcache": [
        ("append", "(block < max_blocks)", "(block < max_blocks - 1)"),
        ("append", "seq * stride_bt", "seq * 0"),
    ],
    "flash_attn_varlen_func": [
        ("packed_tables", "offs < num_columns", "offs < num_columns - 1"),
        ("packed_tables", "begin + offs", "begin + offs // 2"),
    ],
}
for _moving in ("gather_blocks", "scatter_blocks", "gather_slots", "scatter_slots", "copy_blocks"):
    BREAKS |= {f"{_moving}: ": [COLUMNS, BLOCKS], f"{_moving}_list: ": [COLUMNS, BLOCKS]}


def test_every_operator_is_broken_on_purpose() -> None:
    assert operators() - {case.partition(":")[0] for case in BREAKS} == set()


@pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("case", "change"), [(case, change) for case, changes in BREAKS.items() for change in changes])
def test_a_broken_kernel_is_found(case: str, change: tuple[str, str, str], tmp_path: Path) -> None:
    with broken(*change, tmp_path):
        wrong = check_kernels(CPU, only=case)
    assert wrong
    assert [row for row in wrong if row.ok] == []
    assert {row.operator for row in wrong} == {case.partition(":")[0]}
    assert all(row.problem for row in wrong)


@pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
def test_a_kernel_is_whole_again(tmp_path: Path) -> None:
    for _ in range(2):
        with broken(*COLUMNS, tmp_path):
            assert not check_kernels(CPU, only="gather_slots: ")[0].ok
        assert check_kernels(CPU, only="gather_slots: ")[0].ok


def test_a_call_that_raises_is_named_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **given: object) -> None:
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(pc.triton_ops, "gather_slots", fail)
    rows = check_kernels(CPU, only="gather_slots")
    assert [(row.operator, row.problem) for row in rows] == [
        ("gather_slots", "RuntimeError: out of resource: shared memory"),
        ("gather_slots_list", ""),
    ]


def test_results_that_are_no_numbers_or_of_another_kind_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = pc.triton_ops.merge_attention
    for spoil in (
        lambda out: out.fill_(torch.nan),
        lambda out: out.float(),
        lambda out: out[:-1],
        lambda out: out * 1.01,
    ):
        monkeypatch.setattr(
            pc.triton_ops, "merge_attention", lambda s=spoil, **given: (s(merge(**given)[0]), merge(**given)[1])
        )
        assert [row.ok for row in check_kernels(CPU, only="merge_attention: float16")] == [False]


def test_random_numbers_and_modes_of_the_caller_stay_as_they_were() -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert all(row.ok for row in check_kernels(CPU, only="reshape_and_cache"))
    torch.set_default_dtype(torch.float64)
    assert all(row.ok for row in check_kernels(CPU, only="paged_attention: float16, decode"))
    assert torch.equal(before, torch.get_rng_state())
