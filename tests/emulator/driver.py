"""A Triton driver for an absent device: it compiles for the device and passes launches to the emulator.

With triton 3.9, Triton's own launcher in C runs over a stub of libcuda. Triton 3.6 compiles a launcher for each
signature, so a launcher in Python replaces it there. ptxas never runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import _allocation
from triton.runtime import driver as runtime

from .arguments import Arguments, packed, tensors_in
from .build import libcuda
from .launch import run
from .program import program
from .ptx import EmulationError

# CUDA's allocator returns multiples of 512 bytes, the host's of 64.
ALIGNMENT = 512


class _Launcher:
    """A double of Triton's launcher, which packs arguments by the compiled signature and runs the grid."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.arguments, self.metadata = Arguments(source), metadata
        self.ptx: str = runtime.active.assembly["ptx"]

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        _, _, _, _, *values = rest
        kernel, given = program(self.metadata.name, self.ptx), self.arguments.check(values)
        memory = []
        for kind in ("global_scratch", "profile_scratch"):
            size = getattr(self.metadata, f"{kind}_size") * x * y * z
            if size:
                allocate = _allocation._allocator.get()
                memory.append(allocate(size + ALIGNMENT, getattr(self.metadata, f"{kind}_align"), stream))
                given.append(("Q", memory[-1].data_ptr() + -memory[-1].data_ptr() % ALIGNMENT))
            else:
                given.append(("Q", 0))
        data = packed(kernel.name, given, kernel.parameters)
        run(kernel, (x, y, z), self.metadata.shared, data, tensors_in([*values, *memory]))


class _Utils:
    def __init__(self, shared: int, processors: int) -> None:
        self._properties = {
            "max_shared_mem": shared,
            "multiprocessor_count": processors,
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1_410_000,
            "mem_clock_rate": 1_215_000,
            "mem_bus_width": 5120,
        }

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._properties

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        """Do nothing, since there is no module."""


class _Driver:
    """The methods that every Triton driver has."""

    launcher_cls: Any = _Launcher

    def __init__(self, arch: int, utils: Any) -> None:
        self._arch, self.utils = arch, utils
        self.assembly: Any = None  # of the kernel that is being loaded

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self._arch, 10)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing, since there is one device."""

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def _native(arch: int, shared: int, processors: int) -> _Driver:
    """Return Triton's launcher in C, with our libcuda."""
    path = libcuda()
    stub = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = os.environ["TRITON_LIBCUDA_PATH"] = str(path.parent)
    from triton.backends.nvidia import driver as theirs

    kernels: dict[int, tuple[str, str]] = {}
    tensors: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def launched(function: int, x: int, y: int, z: int, threads: int, shared: int, parameters: Any) -> int:
        try:
            kernel = program(*kernels[function])
            if threads != kernel.threads:
                raise EmulationError(f"{kernel.name}: {threads} threads, compiled for {kernel.threads}")
            data = b""
            for k, (offset, size) in enumerate(kernel.parameters.values()):
                data = data.ljust(offset, b"\0") + ctypes.string_at(parameters[k], size)
            run(kernel, (x, y, z), shared, data, tensors)
        except BaseException as error:  # raised again after the launcher in C returns
            errors.append(error)
            return 999
        return 0

    class Launcher(theirs.CudaLauncher):  # type: ignore[misc]
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self._name, self._arguments, self._ptx = metadata.name, Arguments(source), runtime.active.assembly["ptx"]

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            self._arguments.check(rest[4:])
            kernels[function] = self._name, self._ptx
            tensors[:] = tensors_in(rest[4:])
            with _seen_allocations(tensors) if self.global_scratch_size else contextlib.nullcontext():
                try:
                    super().__call__(x, y, z, stream, function, *rest)
                except RuntimeError as error:
                    raise (errors.pop() if errors else error) from None

    made = _Driver(arch, theirs.CudaUtils())
    made.launcher_cls = Launcher
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, *[ctypes.c_uint] * 5, ctypes.POINTER(ctypes.c_void_p))
    made.callback = callback(launched)  # type: ignore[attr-defined]  # kept alive with the driver
    stub.emulator_setup(made.callback, shared, processors, arch)  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def _seen_allocations(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Allow accesses to memory that a launch allocates for descriptors."""
    before = _allocation._allocator.get()

    def allocate(size: int, align: int, stream: int) -> torch.Tensor:
        memory = before(size + ALIGNMENT, align, stream)
        tensors.append(memory)
        return memory[-memory.data_ptr() % ALIGNMENT :]

    token = _allocation._allocator.set(allocate)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def install(arch: int, shared: int, processors: int) -> None:
    """Make Triton compile for sm_`arch` and run kernels on the emulator, in this process from now on.

    Args:
        arch: 80, 86, 89 or 90.
        shared: The bytes of shared memory that a program may have.
        processors: The number of the device's processors.
    """
    nvidia.CUDABackend.make_cubin = lambda self, source, metadata, options, capability: b"not assembled"
    load = CompiledKernel._init_handles

    def load_seen(self: Any) -> None:
        runtime.active.assembly = self.asm
        load(self)

    CompiledKernel._init_handles = load_seen
    has_native = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    made = _native(arch, shared, processors) if has_native else _Driver(arch, _Utils(shared, processors))
    runtime.set_active(made)
