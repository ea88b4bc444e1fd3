"""Recorded launches of calls on devices that are absent, and their digest, which says for which sources a count holds.

A kernel's work depends on its code, the code that it calls, constants, arguments, options and grid. The digest covers
all of them. It leaves out comments and module names, so moving code does not change it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.language import constexpr

from pc.triton_ops._attention.constants import Architecture, architecture
from pc.triton_ops._core.cache import forget_choices
from pc.triton_ops._core.checks import reads_values

from ..harness.tables import ROOT


class Target(NamedTuple):
    """A device that is compiled for; bytes of shared memory that one program may have, and threads of a processor."""

    gpu: GPUTarget
    architecture: Architecture
    shared: int
    threads: int = 2048


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), Architecture("sm_80", 108, False), 166_912),
    "sm_90": Target(GPUTarget("cuda", 90, 32), Architecture("sm_90", 132, True), 232_448),
    "sm_100": Target(GPUTarget("cuda", 100, 32), Architecture("sm_100", 148, True), 232_448),
    "sm_86": Target(GPUTarget("cuda", 86, 32), Architecture("sm_86", 84, False), 101_376, 1536),
    "sm_89": Target(GPUTarget("cuda", 89, 32), Architecture("sm_89", 142, True), 101_376, 1536),
    "sm_120": Target(GPUTarget("cuda", 120, 32), Architecture("sm_120", 188, True), 101_376, 1536),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), Architecture("gfx942", 304, False), 65_536),
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, its options and its programs."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    grid: Any


@contextlib.contextmanager
def recorded_for(target: str) -> Iterator[list[Launch]]:
    """Record the kernels for a target into the yielded list instead of launching them."""
    launches: list[Launch] = []
    arch = TARGETS[target].architecture

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        launches.append(Launch(kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs, options, grid))

    unmade = "pc.triton_ops._attention.checks.check_plan"  # a plan that no kernel made is refused on the CPU
    forget_choices()
    try:
        run = mock.patch.object(triton.JITFunction, "run", record)
        with run, mock.patch(unmade), patched(architecture, lambda device: arch):
            yield launches
    finally:
        forget_choices()


def on_device(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run an operator's kernel for device tensors, as the dispatcher does, on CPU tensors."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return getattr(torch.ops.pc, name).default.redispatch(cuda, *args, **kwargs)


@contextlib.contextmanager
def patched(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in all modules of the operators that import it."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("pc.triton_ops") and getattr(module, original.__name__, None) is original:
                stack.enter_context(mock.patch.object(module, original.__name__, replacement))
        yield


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Treat CPU tensors like those of a device, whose values are not read, in inference mode."""
    with patched(reads_values, lambda tensor: False), torch.inference_mode():
        yield


class Driver:
    """Enough of a triton driver for kernels to be chosen for a device that is not there, and launched into nothing."""

    def __init__(self, target: str = "sm_90") -> None:
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *arguments: None
        self._target, architecture, shared, _ = TARGETS[target]
        # Triton keeps compiled kernels by device: those of a target must not reach another one, or a real device.
        self._device = 4242 + list(TARGETS).index(target)
        self._properties = {"max_shared_mem": shared, "multiprocessor_count": architecture.num_processors}

    def load_binary(self, *arguments: object) -> tuple[object, int, int, int, int]:
        return object(), 1, 128, 0, 1024

    def unload_module(self, module: object) -> None:
        """Do nothing, since no module was loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._properties

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


def run_on_cpu(*arguments: str) -> str:
    """Return what Python prints in a new process, because `import pc` decides where kernels run."""
    environment = {**os.environ, "PC_KERNELS_ON_CPU": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def digest(launches: Iterable[Launch]) -> str:
    """Return a digest of launches that is equal if the compiled code and its work are equal."""
    parts = [
        [source(launch.kernel), launch.grid, launch.options, [(n, _describe(v)) for n, v in launch.arguments.items()]]
        for launch in launches
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _describe(value: Any) -> Any:
    """Return an argument as far as a kernel depends on it; the values of a case's tensors never change."""
    if isinstance(value, tuple):
        return tuple(map(_describe, value))
    if hasattr(value, "data_ptr"):
        return str(value.dtype), value.data_ptr() % 16 == 0
    return source(value) if isinstance(value, triton.JITFunction) else repr(value)


@functools.cache
def source(kernel: Any) -> str:
    """Return the code of a kernel and of all that it calls, without comments, docstrings and module names."""
    seen: set[Any] = set()
    parts: list[str] = []

    def visit(name: str, value: Any) -> None:
        if isinstance(value, triton.JITFunction):
            if value not in seen and not value.fn.__module__.startswith("triton."):
                seen.add(value)
                read(value)
        elif isinstance(value, (constexpr, bool, int, float, str, torch.dtype)):
            parts.append(f"{name} = {getattr(value, 'value', value)!r}")
        elif isinstance(value, type) and issubclass(value, tuple):
            parts.append(f"{name}: {getattr(value, '_fields', ())}")

    def read(function: Any) -> None:
        tree = ast.parse(function.src)
        (body,) = (node.body for node in tree.body if isinstance(node, ast.FunctionDef))
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0] = ast.Pass()
        parts.append(ast.unparse(tree))
        names = function.fn.__globals__
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in names:
                visit(node.id, names[node.id])
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = names.get(node.value.id)
                if isinstance(module, types.ModuleType) and not module.__name__.startswith("triton"):
                    visit(node.attr, getattr(module, node.attr, None))

    visit("", kernel)
    return "\n".join(parts)
