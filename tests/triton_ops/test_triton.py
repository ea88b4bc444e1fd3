"""Triton is imported with the first kernel that runs, and the interpreter is chosen when pc is imported."""

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

LOAD = "importlib.import_module('pc.triton_ops.kernels.attention')._attention_kernel"


def said_by(code: str, **changed: str) -> list[str]:
    """Return the words that a process of its own prints."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PC_KERNELS_ON_CPU")}
    command = [sys.executable, "-c", f"import importlib, os, sys, pc.triton_ops\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**env, **changed})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_that_load_the_first_kernel_get_one_kernel_unless_the_interpreter_was_switched() -> None:
    code = "from concurrent.futures import ThreadPoolExecutor\nprint('triton' in sys.modules)\n"
    code += f"os.environ['TRITON_INTERPRET'] = '1'\ntry: {LOAD}\nexcept RuntimeError as error: print(error)\n"
    code += "del os.environ['TRITON_INTERPRET']\n"
    code += f"with ThreadPoolExecutor(8) as pool: found = [*pool.map(lambda _: {LOAD}, range(8))]\n"
    code += "print(len({*map(id, found)}), found[0].arg_names[0], type(found[0]).__name__)"
    wanted = "TRITON_INTERPRET: was 0 when pc was imported and is 1 now that its first kernel runs; set it before"
    assert said_by(code) == ["False", *wanted.split(), "1", "query_ptr", "JITFunction"]


@pytest.mark.slow
def test_the_interpreter_is_chosen_when_pc_is_imported() -> None:
    code = f"del os.environ['TRITON_INTERPRET']\nprint(type({LOAD}).__name__)"
    assert said_by(code, TRITON_INTERPRET="1") == ["InterpretedFunction"]
