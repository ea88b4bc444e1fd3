"""The one place that imports triton: when a kernel is first run, and at import only for triton's interpreter.

Triton takes a quarter of a second to import and its decorators nearly as long for all kernels, which a process that
stays on CPU tensors never needs; and `import pc` has to work where triton does not exist. A kernel module begins with
`from ._triton import tl, triton`, as if these were the modules. Until triton is loaded they are stand-ins, and what
`@triton.jit` or `tl.constexpr` would make is `Deferred`. `load` puts the modules, the kernels and the constants in the
place of them in every module that holds one: triton compiles a kernel by what its globals are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["HAS_TRITON", "INTERPRET", "KERNELS_ON_CPU", "deferred", "load", "require_triton", "tl", "triton"]


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "yes", "on")


HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether triton is installed: not on Windows and macOS, and not with every torch."""

INTERPRET = HAS_TRITON and _is_set("TRITON_INTERPRET")
"""Whether kernels run in triton's interpreter. Fixed at import, as `triton.jit` fixes it."""

KERNELS_ON_CPU = INTERPRET or (HAS_TRITON and _is_set("PC_KERNELS_ON_CPU"))
"""Whether operators on CPU tensors launch kernels: in the interpreter, and with PC_KERNELS_ON_CPU=1 in whatever Triton
driver is active, which then runs compiled kernels on host memory (tests/emulator). Fixed at import."""


class Deferred:
    """What `make` will make of triton, at its first use or when triton is loaded for another, in a module's globals."""

    def __init__(self, make: Callable[[Any], Any], names: dict[str, Any]) -> None:
        self._make, self._names = make, names
        self._made: Any = None

    def __getitem__(self, grid: Any) -> Any:
        load()
        return self._made[grid]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # who only looks at the names of a module does not load triton
            raise AttributeError(name)
        load()
        return getattr(self._made, name)


class _DeferredNumber(Deferred):
    """A constant of kernels, which the host reads as `int(...)` without triton."""

    def __init__(self, value: int, names: dict[str, Any]) -> None:
        super().__init__(lambda triton: triton.language.constexpr(value), names)
        self._value = value

    def __int__(self) -> int:
        return self._value


class _Triton:
    """Stands in for the module `triton`."""

    def jit(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(self.jit, **options)
        return deferred(lambda triton: triton.jit(function, **options), function)

    def __getattr__(self, name: str) -> Any:
        return getattr(load(), name)


class _Language:
    """Stands in for the module `triton.language`."""

    def constexpr(self, value: Any) -> Any:
        return _wait(_DeferredNumber(value, sys._getframe(1).f_globals))

    def __getattr__(self, name: str) -> Any:
        return getattr(load().language, name)


triton: Any = _Triton()
tl: Any = _Language()

_STAND_INS = triton, tl
_lock = threading.RLock()
_waiting: list[Deferred] = []
_loaded: Any = None


def deferred(make: Callable[[Any], Any], function: Callable[..., Any]) -> Any:
    """What `make` makes of the module `triton` and a function: at once if triton is loaded, else `Deferred`."""
    return _wait(functools.update_wrapper(Deferred(make, function.__globals__), function))  # type: ignore[arg-type]


def _wait(made: Deferred) -> Any:
    with _lock:
        if _loaded is not None:
            return made._make(_loaded)
        _waiting.append(made)
        return made


def load() -> Any:
    """Imports triton, once, for what stands in for it; RuntimeError where TRITON_INTERPRET was another at import."""
    global _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
        if HAS_TRITON and _is_set("TRITON_INTERPRET") != INTERPRET:
            raise RuntimeError(
                f"TRITON_INTERPRET: was {int(INTERPRET)} when pc was imported and is {int(not INTERPRET)} now that its "
                "first kernel runs; set it before"
            )
        module = importlib.import_module("triton")
        if INTERPRET:
            _mend_interpreter(module)
        for made in _waiting:
            made._made = made._make(module)
        # Other threads run a kernel as soon as its module has the real one. By then what it calls has to be real, so
        # the modules take their turns in the order of their first kernels: what a kernel calls was imported before.
        places = [made._names for made in _waiting]
        places += [vars(m) for name, m in [*sys.modules.items()] if f"{name}.".startswith(f"{__package__}.")]
        for names in places:
            names.update({name: _real(value, module) for name, value in [*names.items()] if _stands_in(value)})
        _waiting.clear()
        _loaded = module
        return module


def _stands_in(value: object) -> bool:
    return isinstance(value, Deferred) or value is _STAND_INS[0] or value is _STAND_INS[1]


def _real(value: Any, module: Any) -> Any:
    if isinstance(value, Deferred):
        return value._made
    return module if value is _STAND_INS[0] else module.language


def _mend_interpreter(module: Any) -> None:
    if tuple(map(int, module.__version__.split(".")[:2])) >= (3, 9):
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # The interpreter calls int() on an array of one element, which numpy refuses from 2.5 on.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy


def require_triton(op: str) -> None:
    """Loads triton for `op`, whose launch is chosen by kernels' constants; RuntimeError where it is not installed."""
    if not HAS_TRITON:
        raise RuntimeError(f"pc.{op}: tensors on an accelerator need triton; pip install triton")
    load()


if INTERPRET:
    load()
