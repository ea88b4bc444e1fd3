"""Kernels that take named tuples. A tuple groups parameters that functions pass on together.

Triton (3.6 to 3.9) accepts tuples from the host too, but specializes kernels for the numbers in them, regardless of
`do_not_specialize`. So a launch passes the fields of a kernel's tuples one by one. `kernel` writes the function that
rebuilds the tuples:

    def _some_kernel(ptr, number, FLAG: tl.constexpr, BLOCK: tl.constexpr):
        body(ptr, Options(number, FLAG), BLOCK)

Triton compiles the same code for it as for a function written by hand. Fields in capitals are constants.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from .._core.launch import num_numbers


def kernel(do_not_specialize: Sequence[str], **bundles: type[tuple[Any, ...]]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator like `triton.jit`, for a function that takes named tuples: the parameters in `bundles`.

    The kernel takes a tuple's numbers in the place of the tuple, and its constants before the function's own constants.
    It is not specialized for any of the numbers, except addresses (..._ptr) and strides (stride_...).
    """

    def decorate(function: Callable[..., None]) -> Any:
        text = _text(function, bundles)
        known = {"body": triton.jit(function), "tl": tl, "__name__": function.__module__}
        known |= {bundle.__name__: bundle for bundle in bundles.values()}
        # Triton reads the source of the functions it compiles.
        file = f"<{function.__module__}.{function.__name__} with its tuples spelled out>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), known)
        given = [name for bundle in bundles.values() for name in bundle._fields[: num_numbers(bundle)]]  # type: ignore[attr-defined]
        lengths = [name for name in given if not (name.endswith("_ptr") or name.startswith("stride_"))]
        unspecialized = [*do_not_specialize, *lengths]
        return triton.jit(do_not_specialize=unspecialized)(known[function.__name__])

    return decorate


def _text(function: Callable[..., None], bundles: Mapping[str, type[tuple[Any, ...]]]) -> str:
    """Return the source of a function that rebuilds the tuples of `function` and calls it by the name `body`."""
    plain, compiled, passed = [], [], []
    own_constants: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        bundle = bundles.get(parameter.name)
        if bundle is not None:
            names, count = bundle._fields, num_numbers(bundle)  # type: ignore[attr-defined]
            plain += names[:count]
            compiled += names[count:]
            passed.append(f"{bundle.__name__}({', '.join(names)})")
        else:
            (own_constants if "constexpr" in str(parameter.annotation) else plain).append(parameter.name)
            passed.append(parameter.name)
    constexprs = [f"{name}: tl.constexpr" for name in (*compiled, *own_constants)]
    return f"def {function.__name__}({', '.join([*plain, *constexprs])}):\n    body({', '.join(passed)})\n"
