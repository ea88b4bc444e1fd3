"""Kernels that take named tuples, and launches without triton's work per launch.

What belongs together is one parameter of every function it goes through.

Triton (3.6 to 3.9) takes tuples from the host too, but compiles for the values of their numbers, whatever
`do_not_specialize` says. So a kernel's tuples are spelled out where it is launched: `kernel` writes the function that
puts them together,

    def _some_kernel(ptr, number, FLAG: tl.constexpr, BLOCK: tl.constexpr):
        body(ptr, Options(number, FLAG), BLOCK)

and Triton compiles the same code for it as for one that was written so by hand. Fields in capitals are compiled for.

At a launch Triton looks at every argument: 36 us for the 63 of an attention kernel where the launch of the compiled
kernel takes 6 (both on a CPU, with a driver that does nothing). Whoever launches the same kernel for every layer of
every step knows that nothing but addresses has changed, and keeps a `KernelLaunch` where choices are kept.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._triton import deferred, triton


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
    """`triton.jit` of a function whose parameters in `bundles` are named tuples, of these classes.

    The kernel has their numbers where the function has them, and what they are compiled for before its own constants;
    for none of the numbers anything is compiled, except for addresses (..._ptr) and strides (stride_...).
    """

    def decorate(function: Callable[..., None]) -> Any:
        def spell_out(triton: Any) -> Any:
            text = _text(function, bundles)
            known = {"body": triton.jit(function), "tl": triton.language, "__name__": function.__module__}
            known |= {bundle.__name__: bundle for bundle in bundles.values()}
            # Triton reads the source of what it compiles.
            file = f"<{function.__module__}.{function.__name__} with its tuples spelled out>"
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
            exec(compile(text, file, "exec"), known)
            given = [name for bundle in bundles.values() for name in bundle._fields[: _num_numbers(bundle)]]  # type: ignore[attr-defined]
            lengths = [name for name in given if not (name.endswith("_ptr") or name.startswith("stride_"))]
            unspecialized = [*do_not_specialize, *lengths]
            return triton.jit(do_not_specialize=unspecialized)(known[function.__name__])

        return deferred(spell_out, function)

    return decorate


def _text(function: Callable[..., None], bundles: Mapping[str, type[tuple[Any, ...]]]) -> str:
    """The source of the function that puts the tuples of `function` together and calls it by the name `body`."""
    plain, compiled, passed = [], [], []
    own_constants: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        bundle = bundles.get(parameter.name)
        if bundle is not None:
            names, count = bundle._fields, _num_numbers(bundle)  # type: ignore[attr-defined]
            plain += names[:count]
            compiled += names[count:]
            passed.append(f"{bundle.__name__}({', '.join(names)})")
        else:
            (own_constants if "constexpr" in str(parameter.annotation) else plain).append(parameter.name)
            passed.append(parameter.name)
    constexprs = [f"{name}: tl.constexpr" for name in (*compiled, *own_constants)]
    return f"def {function.__name__}({', '.join([*plain, *constexprs])}):\n    body({', '.join(passed)})\n"


def _is_profiled() -> bool:
    """Whether a profiler has asked triton to be told of launches."""
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream() -> int:
    """The stream that kernels are launched on now."""
    driver = triton.runtime.driver.active
    stream: int = driver.get_current_stream(driver.get_current_device())
    return stream


class KernelLaunch:
    """A kernel's constexpr arguments, last and in its order, and after its first launch what was compiled for them.

    `reusable`: addresses of later launches are multiples of 16 bytes where those of the first are, and nowhere else;
    triton sorts out those of which that is not known. `max_registers` of a thread, so that more programs fit on a
    processor; 0 for as many as the compiler likes.
    """

    __slots__ = ("_compiled", "_constants", "_function", "_options", "_packed", "_reusable", "_run", "_values")

    def __init__(
        self,
        constants: dict[str, Any],
        num_warps: int,
        num_stages: int | None = None,
        reusable: bool = True,
        max_registers: int = 0,
    ) -> None:
        self._constants = constants
        self._reusable = reusable
        self._values = tuple(constants.values())
        self._options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
        if max_registers and torch.version.hip is None:
            self._options["maxnreg"] = max_registers
        self._compiled: Any = None
        self._function: Any = None
        self._packed: Any = None
        self._run: Any = None

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        numbers: tuple[Any, ...] = (),
        stream: int | None = None,
    ) -> None:
        """Launches `kernel`, a `triton.jit` function, always the same one, on `arguments` and `numbers` behind them.

        From call to call tensors may differ in address and in what nothing was compiled for, integers that are not
        specialized in their value below 2**31. `stream`: the current one, where the caller has asked for it.
        """
        if self._run is not None:
            if stream is None:
                stream = current_stream()
            if not _is_profiled():
                self._run(
                    *grid, stream, self._function, self._packed, None, None, None, *arguments, *numbers, *self._values
                )
            else:  # it wants to know which kernel it is
                self._compiled[grid](*arguments, *numbers, *self._values)
            return
        compiled = kernel[grid](*arguments, *numbers, **self._constants, **self._options)
        # Not on ROCm, where triton compiles for the size of a tensor's storage as well.
        if self._reusable and torch.version.hip is None and isinstance(compiled, triton.compiler.CompiledKernel):
            names = kernel.arg_names[len(arguments) + len(numbers) :]
            assert names == list(self._constants), "constants in the kernel's order"
            self._compiled, self._function, self._packed = compiled, compiled.function, compiled.packed_metadata
            self._run = compiled.run


@dataclass(frozen=True, slots=True)
class Grid:
    """A launch whose programs and numbers are known too, so that only tensors are left to be filled in."""

    constants: KernelLaunch
    programs: tuple[int, int, int]
    numbers: tuple[Any, ...] = ()

    def run(self, kernel: Any, tensors: tuple[Any, ...], stream: int | None = None) -> None:
        """Launches `kernel`, always the same one."""
        self.constants.launch(kernel, self.programs, tensors, self.numbers, stream)
