"""A launch of a kernel without triton's work for each launch, and named tuples as kernel arguments.

At a launch Triton inspects every argument. For the 63 arguments of an attention kernel this takes 36 us, and the launch
of the compiled kernel takes 6 us. Both were measured on a CPU, with a driver that does nothing. A caller that launches
the same kernel for every layer of every step knows that only addresses have changed. It keeps a `Launch` in a
`LaunchCache`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch

from .runtime import INTERPRET

Programs = tuple[int, int, int]
# Triton's interpreter keeps the number of the running program in one place, so threads must take turns.
_turn: Any = threading.Lock() if INTERPRET else contextlib.nullcontext()


@functools.cache
def num_numbers(bundle: type[tuple[Any, ...]]) -> int:
    """Return how many fields of a named tuple are numbers. Numbers come first, then constants, named in capitals."""
    names: tuple[str, ...] = bundle._fields  # type: ignore[attr-defined]
    count = sum(not name.isupper() for name in names)
    assert not any(name.isupper() for name in names[:count]), "fields: numbers must come before constants"
    return count


def numbers(bundle: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the numbers of a named tuple, as kernels take them."""
    return bundle[: num_numbers(type(bundle))]


def flags(bundle: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the constants of a named tuple: its last fields."""
    return bundle[num_numbers(type(bundle)) :]


def constants(bundle: tuple[Any, ...]) -> dict[str, Any]:
    """Return the constants of a named tuple by name."""
    values = flags(bundle)
    return dict(zip(bundle._fields[-len(values) :], values, strict=True))  # type: ignore[attr-defined]


@functools.cache
def _triton() -> Any:
    import triton  # a caller that has a kernel has imported it

    return triton


def current_stream() -> int:
    """Return the stream on which kernels are launched now."""
    driver = _triton().runtime.driver.active
    stream: int = driver.get_current_stream(driver.get_current_device())
    return stream


class Launch:
    """A kernel with all its arguments except tensors. After the first launch it also holds the compiled kernel.

    Args:
        kernel: A `triton.jit` function. Its parameters are tensors, then numbers, then constants.
        constants: The constants for which the kernel is compiled, by name, in the order of its parameters.
        programs: The grid.
        numbers: Integers and floats between tensors and constants.
        num_warps: As triton takes it.
        num_stages: As triton takes it. None: its default.
        same_alignment: Whether addresses in later launches are multiples of 16 bytes exactly where those of the first
            launch are. Otherwise triton inspects each launch.
        max_registers: Limit for a thread, so that more programs fit on a processor. 0: no limit.
    """

    __slots__ = (
        *("_bound", "_compiled", "_function", "_kernel", "_packed", "_run", "_same_alignment"),
        *("_values", "constants", "options", "programs"),
    )

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        programs: Programs = (0, 1, 1),
        numbers: tuple[Any, ...] = (),
        num_warps: int = 4,
        num_stages: int | None = None,
        same_alignment: bool = True,
        max_registers: int = 0,
    ) -> None:
        self._kernel, self.constants, self._same_alignment = kernel, constants, same_alignment
        self._values = tuple(constants.values())
        self.programs, self._bound = programs, (*numbers, *self._values)
        self.options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
        if max_registers and torch.version.hip is None:
            self.options["maxnreg"] = max_registers
        self._compiled: Any = None
        self._function: Any = None
        self._packed: Any = None
        self._run: Any = None

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers between tensors and constants."""
        return self._bound[: len(self._bound) - len(self._values)]

    def __call__(
        self,
        tensors: tuple[Any, ...],
        stream: int | None = None,
        programs: Programs | None = None,
        numbers: tuple[Any, ...] = (),
    ) -> None:
        """Launch the kernel on these tensors.

        From call to call, tensors may differ in their addresses, and `numbers` where the kernel is not specialized.

        Args:
            tensors: The tensors.
            stream: The current stream, if the caller has asked for it already.
            programs: A grid for this call alone.
            numbers: With `programs`, numbers for this call alone: integers below 2**31 for which the kernel is not
                specialized.
        """
        if programs is None:
            programs, behind = self.programs, self._bound
        else:
            behind = (*numbers, *self._values)
        if self._run is None:
            self._compile(programs, (*tensors, *behind[: len(behind) - len(self._values)]))
            return
        knobs = _triton().knobs.runtime
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler asks which kernel this is
            self._compiled[programs](*tensors, *behind)
        else:
            stream = current_stream() if stream is None else stream
            self._run(*programs, stream, self._function, self._packed, None, None, None, *tensors, *behind)

    def _compile(self, programs: Programs, arguments: tuple[Any, ...]) -> None:
        """Launch through triton, which compiles the kernel, and keep the compiled kernel."""
        with _turn:
            compiled = self._kernel[programs](*arguments, **self.constants, **self.options)
        is_compiled = isinstance(compiled, _triton().compiler.CompiledKernel)
        # Not on ROCm, where triton also specializes for the size of a tensor's storage.
        if is_compiled and self._same_alignment and torch.version.hip is None:
            assert self._kernel.arg_names[len(arguments) :] == list(self.constants), "constants in the kernel's order"
            self._compiled, self._function, self._packed = compiled, compiled.function, compiled.packed_metadata
            self._run = compiled.run
