"""The judges: where their tests are, which tests run, and which cases are omitted for which reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Rule:
    """Cases that are left out, by the names of their tests and by their parameters.

    Attributes:
        reason: The reason in the report.
        tests: The beginnings of the names.
        when: Takes a case's parameters and returns whether it is left out. By default all are.
    """

    reason: str
    tests: tuple[str, ...] = ("",)
    when: Callable[[dict[str, Any]], bool] = lambda params: True


@dataclass(frozen=True)
class Judge:
    """Tests of another project.

    Attributes:
        package: `name==version`, as a package index serves its sources.
        files: Patterns of test files in the sources.
        ours: A file of this folder that uses the sources, in place of `files`.
        plugins: pytest plugins that replace the project's code by ours.
        counter: The plugin, if any, that counts in `made` the objects of ours that tests make. A case that makes none
            is left out.
        paths: Folders of the sources to import from.
        keep: The files and folders (with a slash) of the sources that are kept.
        rules: The cases that are left out.
        folder: The folder of sources that another command fetches. None: `fetch` gets them.
        made_by: The command that makes the folder or the environment.
        environment: The environment whose interpreter runs the tests. None: the project's own.
        variables: Environment variables of the tests.
        cases: The number of cases of each test function in a whole run.
        quick: Whether the quick sample has some of its cases.
        has_control: Whether its tests also run without `plugins`, over the code they were written for.
    """

    package: str
    files: tuple[str, ...] = ()
    ours: str | None = None
    plugins: tuple[str, ...] = ()
    counter: str = ""
    paths: tuple[str, ...] = (".",)
    keep: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    folder: str | None = None
    made_by: str = ""
    environment: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    cases: int = 40
    quick: bool = True
    has_control: bool = False


_BACKWARD = Rule("backward", ("test_flash_attn_bwd", "test_flash_attn_deterministic", "test_flash_attn_varlen_det"))
_REPEATS = Rule("hundreds of repeats, for races on a GPU", ("test_flash_attn_race", "test_flash_attn_cluster"))
_DROPOUT = Rule("dropout", when=lambda params: bool(params.get("dropout_p")))
_SCHEMAS = Rule("schemas of its C++ operators", ("test_flash3_bw_compatibility",))
_FLASH = Judge(
    package="flash-attn==2.8.3",
    files=("tests/test_flash_attn.py",),
    plugins=("judges.flash",),
    paths=("hopper", "."),
    keep=("tests/test_flash_attn.py", "hopper/", "flash_attn/"),
    rules=(_BACKWARD, _REPEATS, _DROPOUT),
    cases=150,  # a quarter of an hour
)


_VLLM = Judge(
    package="vllm==0.33.0",
    files=("tests/v1/core/test_*.py",),
    folder=".peers/vllm-0.33",
    made_by="make vllm-quick",
    environment=".peers/vllm-quick",
    variables={"VLLM_TARGET_DEVICE": "cpu", "HF_HOME": "hub", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    cases=10_000,
    quick=False,
    has_control=True,
)


def _policy(name: str) -> Judge:
    plugin, variables = "vllm_lru_pool", {**_VLLM.variables, "PC_VLLM_POLICY": name}
    return replace(_VLLM, plugins=(plugin,), counter=plugin, variables=variables)


def _unified(*endings: str) -> tuple[str, ...]:
    return tuple(f"test_triton_unified_attn_{ending}" for ending in endings)


_MATRIX = ("test_presses_of_its_matrix",)


def _is_press(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda params: params["press"].__name__ in names


JUDGES = {
    "flash-attn-2": _FLASH,
    "flash-attn-3": replace(_FLASH, files=("hopper/test_flash_attn.py",), rules=(_REPEATS, _SCHEMAS)),
    "flashinfer": Judge(
        package="flashinfer-python==0.7.4",
        ours="flashinfer_references.py",
        keep=("flashinfer/trace/",),
    ),
    "vllm-attention": replace(
        _VLLM,
        files=("tests/kernels/attention/test_triton_unified_attention.py",),
        plugins=("judges.vllm_attention",),
        keep=("tests/kernels/attention/test_triton_unified_attention.py",),
        rules=(
            Rule("float8 outputs", _unified("fp16_input_fp8_output")),
            Rule("masks of images", _unified("clamped_mm")),
            Rule("parts of its kernels", _unified("use_td")),
            Rule(
                "parts of its kernels",
                ("test_splitk", "test_reduce", "test_spec", "test_clamped", "test_fp8_softmax", "test_softcap_does"),
            ),
            Rule("a cache of gigabytes", when=lambda params: params.get("num_blocks", 0) > 2048),
        ),
        folder=None,
        cases=40,
        has_control=False,
    ),
    "kvpress": Judge(
        package="kvpress==0.5.5",
        ours="kvpress_presses.py",
        keep=("tests/",),
        rules=(
            Rule("files of a hub", _MATRIX, _is_press("ExpectedAttentionStatsPress", "QFilterPress")),
            Rule("adapters of PEFT", _MATRIX, _is_press("TestRestoreKVPress")),
        ),
        made_by="make kvpress",
        environment=".peers/kvpress",
        variables={"HF_HUB_OFFLINE": "1"},
        cases=10_000,
        quick=False,
    ),
    "vllm-lru": _policy("lru"),
    "vllm-default": _policy("default"),
}
"""In `make judges`' order. vLLM's block pools have our policies behind them; `make vllm-quick` has a part of these."""
