"""Kernels: plain modules that import triton, and are imported only to build a launch.

Importing triton takes a quarter of a second, and decorating all kernels nearly as long. A process that only uses CPU
tensors never needs this, and `import pc` must work without triton. So a module outside of this folder imports from it
only in a function that is about to launch a kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

import triton

from .._core.runtime import INTERPRET, is_set

if is_set("TRITON_INTERPRET") != INTERPRET:
    raise RuntimeError(
        f"TRITON_INTERPRET: was {int(INTERPRET)} when pc was imported and is {int(not INTERPRET)} now that its first "
        "kernel runs; set it before"
    )


def _mend_interpreter() -> None:
    """Replace a function of triton's interpreter so that it works with numpy 2.5 and later."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # The interpreter calls int() on an array of one element, which numpy 2.5 and later refuse.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy


def _mend_negation() -> None:
    """Let triton's interpreter flip the sign of bfloat16, which it stores as integers and negates as such."""
    semantic: Any = importlib.import_module("triton.language.semantic").TritonSemantic
    minus, bfloat16 = semantic.minus, triton.language.bfloat16

    def minus_bits(self: Any, value: Any) -> Any:
        if value.type.scalar != bfloat16:
            return minus(self, value)
        flipped = type(value.handle)(value.handle.data ^ 0x8000, value.handle.dtype)
        return triton.language.tensor(flipped, value.type)

    semantic.minus = minus_bits


if INTERPRET:
    _mend_negation()
if INTERPRET and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
    _mend_interpreter()
