"""Replacements of two packages that SGLang imports but a CPU does not need.

If this folder is on PYTHONPATH, Python imports this file in every process that SGLang starts. If `torchvision` or
`sgl_kernel` is not installed, each of its attributes is a class of that name. It can be subclassed, be used in an
annotation, and decorate a function. Any other call raises an error with its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision")


class Absence(type):
    """The class of absent names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        raise NotImplementedError(f"{cls.__qualname__}: called, and its package is not installed")


def absent(path: str) -> Absence:
    return Absence(path.rpartition(".")[2], (), {"__qualname__": path})


class AbsentModule(ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder of all, so that a package that is installed is imported itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(AbsentFinder())


def lack(paths: list[str]) -> None:
    """Make these names of SGLang's missing for the adapter, in every process."""
    from pc.integrations import seam

    find = seam.find

    def without(path: str) -> Any:
        if path in paths:
            raise AttributeError(path)
        return find(path)

    seam.find = without


if os.environ.get("SGLANG_LACKS"):
    lack(os.environ["SGLANG_LACKS"].split(","))
