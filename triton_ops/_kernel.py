"""Kernels that take named tuples: what belongs together is one parameter of every function it goes through.

Triton (3.6 to 3.9) takes tuples from the host too, but compiles for the values of their numbers, whatever
`do_not_specialize` says. So a kernel's tuples are spelled out where it is launched: `kernel` writes the function that
puts them together,

    def _some_kernel(ptr, number, FLAG: tl.constexpr, BLOCK: tl.constexpr):
        body(ptr, Options(number, FLAG), BLOCK)

and Triton compiles the same code for it as for one that was written so by hand. Fields in capitals are compiled for.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Sequence
from typing import Any

from ._triton import HAS_TRITON, tl, triton


@functools.cache
def _num_numbers(bundle: type[tuple[Any, ...]]) -> int:
    """How many fields of a named tuple are numbers: its first ones."""
    names: tuple[str, ...] = bundle._fields  # type: ignore[attr-defined]
    count = sum(not name.isupper() for name in names)
    assert not any(name.isupper() for name in names[:count]), "numbers before what is compiled for"
    return count


def numbers(bundle: tuple[Any, ...]) -> tuple[Any, ...]:
    """The numbers of a named tuple, as kernels take them."""
    return bundle[: _num_numbers(type(bundle))]


def flags(bundle: tuple[Any, ...]) -> tuple[Any, ...]:
    """What kernels are compiled for of a named tuple: its last fields."""
    return bundle[_num_numbers(type(bundle)) :]


def constants(bundle: tuple[Any, ...]) -> dict[str, Any]:
    """The same by name."""
    values = flags(bundle)
    return dict(zip(bundle._fields[-len(values) :], values, strict=True))  # type: ignore[attr-defined]


def kernel(do_not_specialize: Sequence[str], **bundles: type[tuple[Any, ...]]) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` of a function whose parameters of these names are named tuples.

    The kernel has their numbers where the function has them, and what they are compiled for before its own constants;
    for none of the numbers anything is compiled.

    Args:
        do_not_specialize: As for `triton.jit`.
        bundles: The classes of the tuples, by parameter.
    """

    def decorate(function: Callable[..., None]) -> Any:
        body = triton.jit(function)
        if not HAS_TRITON:
            return body
        plain, compiled, passed, unspecialized = [], [], [], list(do_not_specialize)
        own_constants: list[str] = []
        for parameter in inspect.signature(function).parameters.values():
            bundle = bundles.get(parameter.name)
            if bundle is not None:
                names, count = bundle._fields, _num_numbers(bundle)  # type: ignore[attr-defined]
                plain += names[:count]
                compiled += names[count:]
                unspecialized += names[:count]
                passed.append(f"{bundle.__name__}({', '.join(names)})")
            else:
                (own_constants if "constexpr" in str(parameter.annotation) else plain).append(parameter.name)
                passed.append(parameter.name)
        constexprs = [f"{name}: tl.constexpr" for name in (*compiled, *own_constants)]
        text = f"def {function.__name__}({', '.join([*plain, *constexprs])}):\n    body({', '.join(passed)})\n"
        known = {"body": body, "tl": tl, "__name__": function.__module__}
        known |= {bundle.__name__: bundle for bundle in bundles.values()}
        # Triton reads the source of what it compiles.
        file = f"<{function.__module__}.{function.__name__} with its tuples spelled out>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), known)
        return triton.jit(do_not_specialize=unspecialized)(known[function.__name__])

    return decorate
