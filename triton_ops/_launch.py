"""A launch of a kernel without triton's work per launch, and the arguments that named tuples are to it.

At a launch Triton looks at every argument: 36 us for the 63 of an attention kernel where the launch of the compiled
kernel takes 6 (both on a CPU, with a driver that does nothing). Whoever launches the same kernel for every layer of
every step knows that nothing but addresses has changed, and keeps a `Launch` in a `LaunchCache`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

Programs = tuple[int, int, int]


@functools.cache
def num_numbers(bundle: type[tuple[Any, ...]]) -> int:
    """How many fields of a named tuple are numbers: its first ones. Those in capitals are what is compiled for."""
    names: tuple[str, ...] = bundle._fields  # type: ignore[attr-defined]
    count = sum(not name.isupper() for name in names)
    assert not any(name.isupper() for name in names[:count]), "numbers before what is compiled for"
    return count


def numbers(bundle: tuple[Any, ...]) -> tuple[Any, ...]:
    """The numbers of a named tuple, as kernels take them."""
    return bundle[: num_numbers(type(bundle))]


def flags(bundle: tuple[Any, ...]) -> tuple[Any, ...]:
    """What kernels are compiled for of a named tuple: its last fields."""
    return bundle[num_numbers(type(bundle)) :]


def constants(bundle: tuple[Any, ...]) -> dict[str, Any]:
    """The same by name."""
    values = flags(bundle)
    return dict(zip(bundle._fields[-len(values) :], values, strict=True))  # type: ignore[attr-defined]


@functools.cache
def _triton() -> Any:
    import triton  # which whoever has a kernel has imported

    return triton


def _is_profiled() -> bool:
    """Whether a profiler has asked triton to be told of launches."""
    knobs = _triton().knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream() -> int:
    """The stream that kernels are launched on now."""
    driver = _triton().runtime.driver.active
    stream: int = driver.get_current_stream(driver.get_current_device())
    return stream


class Launch:
    """A kernel and all that it is launched with but tensors; after the first launch what was compiled for it.

    Args:
        kernel: A `triton.jit` function; its parameters are tensors, then numbers, then constants.
        constants: What it is compiled for, by name and in its order.
        programs: The grid.
        numbers: Integers and floats between tensors and constants.
        num_warps, num_stages: As triton takes them; None: its default.
        reusable: Addresses of later launches are multiples of 16 bytes where those of the first are, and nowhere else;
            triton sorts out those of which that is not known.
        max_registers: Of a thread, so that more programs fit on a processor; 0: as many as the compiler likes.
    """

    __slots__ = (
        *("_bound", "_compiled", "_function", "_kernel", "_packed", "_reusable", "_run"),
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
        reusable: bool = True,
        max_registers: int = 0,
    ) -> None:
        self._kernel, self.constants, self._reusable = kernel, constants, reusable
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
        """What it was given between tensors and constants."""
        return self._bound[: len(self._bound) - len(self._values)]

    def __call__(
        self,
        tensors: tuple[Any, ...],
        stream: int | None = None,
        programs: Programs | None = None,
        numbers: tuple[Any, ...] = (),
    ) -> None:
        """Launches the kernel on these tensors.

        From call to call tensors may differ in address and in what nothing was compiled for. `stream`: the current one,
        where the caller has asked for it. With `programs` a grid and numbers of this call alone, integers that are not
        specialized in their value below 2**31.
        """
        if programs is None:
            programs, behind = self.programs, self._bound
        else:
            behind = (*numbers, *self._values)
        if self._run is None:
            self._compile(programs, (*tensors, *behind[: len(behind) - len(self._values)]))
        elif _is_profiled():  # it wants to know which kernel it is
            self._compiled[programs](*tensors, *behind)
        else:
            stream = current_stream() if stream is None else stream
            self._run(*programs, stream, self._function, self._packed, None, None, None, *tensors, *behind)

    def _compile(self, programs: Programs, arguments: tuple[Any, ...]) -> None:
        """Launches as triton does, which compiles, and keeps what it has compiled."""
        compiled = self._kernel[programs](*arguments, **self.constants, **self.options)
        # Not on ROCm, where triton compiles for the size of a tensor's storage as well.
        if self._reusable and torch.version.hip is None and isinstance(compiled, _triton().compiler.CompiledKernel):
            assert self._kernel.arg_names[len(arguments) :] == list(self.constants), "constants in the kernel's order"
            self._compiled, self._function, self._packed = compiled, compiled.function, compiled.packed_metadata
            self._run = compiled.run
