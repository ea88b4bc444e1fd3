"""Kernels that take named tuples: what belongs together is one parameter of every function it goes through.

Triton (3.6 to 3.9) takes tuples from the host too, but compiles for the values of their numbers, whatever
`do_not_specialize` says. So a kernel's tuples are spelled out where it is launched: `kernel` writes the function that
puts them together,

    def _some_kernel(ptr, number, FLAG: tl.constexpr, BLOCK: tl.constexpr):
        body(ptr, Options(number, FLAG), BLOCK)

and Triton compiles the same code for it as for one that was written so by hand. Fields in capitals are compiled for.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from .._launch import num_numbers


def kernel(do_not_specialize: Sequence[str], **bundles: type[tuple[Any, ...]]) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` of a function whose parameters in `bundles` are named tuples, of these classes.

    The kernel has their numbers where the function has them, and what they are compiled for before its own constants;
    for none of the numbers anything is compiled, except for addresses (..._ptr) and strides (stride_...).
    """

    def decorate(function: Callable[..., None]) -> Any:
        text = _text(function, bundles)
        known = {"body": triton.jit(function), "tl": tl, "__name__": function.__module__}
        known |= {bundle.__name__: bundle for bundle in bundles.values()}
        # Triton reads the source of what it compiles.
        file = f"<{function.__module__}.{function.__name__} with its tuples spelled out>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), known)
        given = [name for bundle in bundles.values() for name in bundle._fields[: num_numbers(bundle)]]  # type: ignore[attr-defined]
        lengths = [name for name in given if not (name.endswith("_ptr") or name.startswith("stride_"))]
        unspecialized = [*do_not_specialize, *lengths]
        return triton.jit(do_not_specialize=unspecialized)(known[function.__name__])

    return decorate


def _text(function: Callable[..., None], bundles: Mapping[str, type[tuple[Any, ...]]]) -> str:
    """The source of the function that puts the tuples of `function` together and calls it by the name `body`."""
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
