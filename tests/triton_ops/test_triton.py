"""Triton is imported at the first launch, not with the package."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pc.triton_ops._core.runtime import HAS_TRITON, INTERPRET

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.skipif(INTERPRET, reason="in processes of their own, the same ones"),
]

KERNEL = "from pc.triton_ops.kernels.attention import _attention_kernel as kernel"


def run_python(code: str, **changed: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PC_KERNELS_ON_CPU")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**env, **changed}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_comes_with_the_first_kernel() -> None:
    out = run_python(
        f"import pc.triton_ops, sys\nprint('triton' in sys.modules)\n{KERNEL}\nprint(kernel.arg_names[:2])"
    )
    assert out.splitlines() == ["False", "['query_ptr', 'key_ptr']"]


def test_the_interpreter_cannot_be_switched_after_the_import() -> None:
    out = run_python(
        "import os, pc.triton_ops\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        f"try: {KERNEL}\n"
        "except RuntimeError as error: print(error)\n"
        "del os.environ['TRITON_INTERPRET']\n"
        f"{KERNEL}\n"
        "print(kernel.arg_names[0])\n"
    )
    assert out.splitlines() == [
        "TRITON_INTERPRET: was 0 when pc was imported and is 1 now that its first kernel runs; set it before",
        "query_ptr",
    ]


def test_the_interpreter_stays_when_its_variable_goes() -> None:
    code = "import os, pc.triton_ops\ndel os.environ['TRITON_INTERPRET']\n"
    out = run_python(f"{code}{KERNEL}\nprint(type(kernel).__name__)", TRITON_INTERPRET="1")
    assert out.split() == ["InterpretedFunction"]


def test_threads_that_use_kernels_first_wait_for_one_another() -> None:
    out = run_python(
        "import importlib, pc.triton_ops\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def load(_): return importlib.import_module('pc.triton_ops.kernels.attention')._attention_kernel\n"
        "with ThreadPoolExecutor(8) as pool: found = [*pool.map(load, range(8))]\n"
        "print(len({*map(id, found)}), found[0].arg_names[0])\n"
    )
    assert out.split() == ["1", "query_ptr"]
