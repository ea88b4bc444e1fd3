"""Triton is imported at the first kernel, and then nothing that stood in for it is left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pc.triton_ops._triton import HAS_TRITON, INTERPRET

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.skipif(INTERPRET, reason="in processes of their own, the same ones"),
]


def run_python(code: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PC_KERNELS_ON_CPU")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


LEFT = """
import sys, types, pc
from pc.triton_ops import _triton
def left():
    modules = [m for name, m in sys.modules.items() if name.startswith("pc.triton_ops")]
    return sum(map(_triton._stands_in, [value for m in modules for value in vars(m).values()]))
"""


def test_the_first_use_of_a_kernel_makes_all_of_them() -> None:
    out = run_python(
        LEFT + "from pc.triton_ops._attention import kernel as where, scores\n"
        "held = where._attention_kernel\n"
        "print('triton' in sys.modules, left() > 50, held.__name__)\n"
        "print(held.arg_names[:2], left())\n"
        "import triton, triton.language as tl\n"
        "print(_triton.tl is tl, where.tl is tl, where.triton is triton, type(scores.LOG2E).__name__)\n"
        "print(type(where._attention_kernel).__name__, held.arg_names == where._attention_kernel.arg_names)\n"
        "print(where._attention_kernel.fn.__globals__['body'].fn.__globals__ is vars(where))\n"
    )
    assert out.splitlines() == [
        "False True _attention_kernel",
        "['query_ptr', 'key_ptr'] 0",
        "True True True constexpr",
        "JITFunction True",
        "True",
    ]


def test_the_interpreter_cannot_be_switched_after_the_import() -> None:
    out = run_python(
        "import os, pc\n"
        "from pc.triton_ops._attention.kernel import _attention_kernel as kernel\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "try: kernel.arg_names\n"
        "except RuntimeError as error: print(error)\n"
        "del os.environ['TRITON_INTERPRET']\n"
        "print(kernel.arg_names[0])\n"
    )
    assert out.splitlines() == [
        "TRITON_INTERPRET: was 0 when pc was imported and is 1 now that its first kernel runs; set it before",
        "query_ptr",
    ]


def test_threads_that_use_kernels_first_wait_for_one_another() -> None:
    out = run_python(
        LEFT + "from concurrent.futures import ThreadPoolExecutor\n"
        "from pc.triton_ops._attention.kernel import _attention_kernel as kernel\n"
        "with ThreadPoolExecutor(8) as pool: found = [*pool.map(lambda _: kernel.arg_names, range(8))]\n"
        "print(all(names == kernel.arg_names for names in found), left())\n"
    )
    assert out.split() == ["True", "0"]
