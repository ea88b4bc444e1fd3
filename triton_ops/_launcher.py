"""Launches of one kernel that differ in addresses only, without triton's work per launch.

Triton looks at every argument of every launch: 36 us for the 63 of an attention kernel where the launch of the compiled
kernel takes 6 (both on a CPU, with a driver that does nothing). Whoever launches the same kernel for every layer of
every step knows that nothing but addresses has changed, and keeps a `KernelLaunch` under a key of all that could.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ._triton import CompiledKernel

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


class KernelLaunch:
    """A kernel's compile-time constants and, after its first launch, what was compiled for them.

    Args:
        constants: The constexpr arguments, which come last in the kernel's signature, in its order.
        num_warps: Warps of a program.
        num_stages: Stages of its pipelined loops; None for triton's choice.
        reusable: Whether the addresses of later launches are multiples of 16 bytes where those of the first are, and
            nowhere else. Triton sorts out those of which that is not known.
    """

    __slots__ = ("_compiled", "_constants", "_options", "_reusable", "_values")

    def __init__(
        self, constants: dict[str, Any], num_warps: int, num_stages: int | None = None, reusable: bool = True
    ) -> None:
        self._constants = constants
        self._reusable = reusable
        self._values = tuple(constants.values())
        self._options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
        self._compiled: Any = None

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launches `kernel`, always the same one.

        Args:
            kernel: A `triton.jit` function.
            grid: Programs.
            arguments: All others than the constants. From call to call tensors may differ in their address and in
                what nothing was compiled for, integers that are not specialized in their value below 2**31.
        """
        if self._compiled is not None:
            self._compiled[grid](*arguments, *self._values)
            return
        compiled = kernel[grid](*arguments, **self._constants, **self._options)
        # Not on ROCm, where triton compiles for the size of a tensor's storage as well.
        if self._reusable and torch.version.hip is None and isinstance(compiled, CompiledKernel):
            assert kernel.arg_names[len(arguments) :] == list(self._constants), "constants in the kernel's order"
            self._compiled = compiled
