"""Launches of one kernel that differ in addresses only, without triton's work per launch.

Triton looks at every argument of every launch: 36 us for the 63 of an attention kernel where the launch of the compiled
kernel takes 6 (both on a CPU, with a driver that does nothing). Whoever launches the same kernel for every layer of
every step knows that nothing but addresses has changed, and keeps a `KernelLaunch` under a key of all that could.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from ._triton import CompiledKernel, triton

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not a promise of torch's: it saves time, nothing else
    TensorGuards = None  # type: ignore[misc, assignment]

# Signatures remembered by a kind of call: some steps' worth of lengths, each with a kind of layer or two.
MAX_REMEMBERED = 1024

T = TypeVar("T")


def metadata(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """Shape, strides, dtype and device of each: a key for what was decided or checked by them."""
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def remember(memory: dict[object, T], signature: object, decision: T) -> T:
    """Keeps a decision under its signature, in place of all others once they are too many."""
    if len(memory) >= MAX_REMEMBERED:
        memory.clear()
    memory[signature] = decision
    return decision


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether all begin at a multiple of 16 bytes, which triton compiles kernels for."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return not bits & 15


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Whose `check` tells in C++ whether tensors are like these in all but addresses; None where torch has none."""
    # It takes no tensor twice, and one that requires grad, met while grad mode is off, it takes for one met while on.
    if TensorGuards is None or len({id(tensor) for tensor in tensors}) != len(tensors):
        return None
    if any(tensor.requires_grad for tensor in tensors):
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    lengths: Any = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
    return TensorGuards(*tensors, **lengths)


class Decisions(Generic[T]):
    """What was decided for calls, by their options and by shape, strides, dtype and device of their tensors.

    A call like the last one with the same options is told by one comparison in C++, in a sixth of the time that its
    metadata take to collect.
    """

    def __init__(self) -> None:
        self._known: dict[object, T] = {}
        self._last: dict[object, tuple[Any, T]] = {}

    def get(self, options: object, tensors: Sequence[torch.Tensor]) -> T | None:
        """The decision for such a call, or None.

        Args:
            options: All that matters besides the tensors' metadata; which optional tensors are given, for one.
            tensors: Those that are given.
        """
        last = self._last.get(options)
        if last is not None and last[0].check(*tensors):
            return last[1]
        decision = self._known.get((options, *metadata(*tensors)))
        if decision is not None:
            self._expect(options, tensors, decision)
        return decision

    def keep(self, options: object, tensors: Sequence[torch.Tensor], decision: T) -> T:
        """Remembers a decision, in place of all others once they are too many."""
        if len(self._last) >= MAX_REMEMBERED:
            self._last.clear()
        remember(self._known, (options, *metadata(*tensors)), decision)
        self._expect(options, tensors, decision)
        return decision

    def clear(self) -> None:
        """Forgets all."""
        self._known.clear()
        self._last.clear()

    def _expect(self, options: object, tensors: Sequence[torch.Tensor], decision: T) -> None:
        if (guard := tensor_guards(tensors)) is not None:
            self._last[options] = guard, decision


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
    """A kernel's compile-time constants and, after its first launch, what was compiled for them.

    Args:
        constants: The constexpr arguments, which come last in the kernel's signature, in its order.
        num_warps: Warps of a program.
        num_stages: Stages of its pipelined loops; None for triton's choice.
        reusable: Whether the addresses of later launches are multiples of 16 bytes where those of the first are, and
            nowhere else. Triton sorts out those of which that is not known.
        max_registers: Of a thread, so that more programs fit on a processor; 0 for as many as the compiler likes.
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

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launches `kernel`, always the same one.

        Args:
            kernel: A `triton.jit` function.
            grid: Programs.
            arguments: All others than the constants. From call to call tensors may differ in their address and in
                what nothing was compiled for, integers that are not specialized in their value below 2**31.
        """
        self.launch(kernel, grid, arguments)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        numbers: tuple[Any, ...] = (),
        stream: int | None = None,
    ) -> None:
        """The same, without a copy of the arguments on the way.

        Args:
            kernel: A `triton.jit` function.
            grid: Programs.
            arguments: The first ones.
            numbers: Those behind them.
            stream: The current one where the caller has asked for it.
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
        if self._reusable and torch.version.hip is None and isinstance(compiled, CompiledKernel):
            names = kernel.arg_names[len(arguments) + len(numbers) :]
            assert names == list(self._constants), "constants in the kernel's order"
            self._compiled, self._function, self._packed = compiled, compiled.function, compiled.packed_metadata
            self._run = compiled.run
