"""The conditions of a measurement: machine, versions, commit, date."""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from .tables import ROOT

ADAPTERS = ("huggingface", "vllm", "sglang")
FOLDERS = ("triton_ops", "cache", "integrations", *(f"integrations/{adapter}" for adapter in ADAPTERS))
SOURCES = ("triton_ops", "cache", "integrations", "src", "benchmarks/*.py")


def version(package: str) -> str:
    """Return the version of an installed distribution; raises ImportError if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{package} is not installed") from error


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@functools.cache
def commit() -> str:
    """Return the checkout's short hash, with a plus if sources differ from it."""
    known = _output("git", "rev-parse", "--short", "HEAD")
    if not known:
        return os.environ.get("PC_COMMIT", "unknown")
    return known + ("+" if _output("git", "status", "--porcelain", "--", *SOURCES) else "")


def _code(path: Path) -> str:
    """Return a module's code without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree).replace(", type_params=[]", "")  # which Python 3.12 adds


@functools.cache
def sources() -> str:
    """Return a digest of the code in each folder, with those of adapters apart: "cache:77ab integrations/vllm:e01d"."""
    found = []
    for folder in FOLDERS:
        codes = sorted(map(_code, (ROOT / folder).glob("*.py" if folder == "integrations" else "**/*.py")))
        found.append(f"{folder}:{hashlib.sha256(''.join(codes).encode()).hexdigest()[:8]}")
    return " ".join(found)


def has_changed(row: Mapping[str, str], folders: Collection[str] = FOLDERS) -> bool:
    """Return whether the code in these folders has changed since a row was measured."""
    return not set(row.get("sources", "").split()) >= {n for n in sources().split() if n.split(":")[0] in folders}


def device_name(kind: str) -> str:
    """Return the maker's name of a device; for a CPU also the number of threads that PyTorch uses."""
    if kind == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as file:
            model = re.search(r"model name\s*:\s*(.+)", file.read())
    except OSError:
        model = None
    name = model[1] if model else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def device_folder(kind: str) -> str:
    """Return the name of the folder of a device's results: "cpu", "nvidia-h200"."""
    return "cpu" if kind == "cpu" else re.sub(r"[^a-z0-9]+", "-", device_name(kind).lower()).strip("-")


@functools.cache
def driver(kind: str) -> str:
    """Return the version of the GPU's driver; a CPU has none."""
    if kind == "cpu":
        return ""
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return found[0] if found else f"runtime {torch.version.cuda or torch.version.hip}"


def use_threads() -> None:
    """Let PyTorch use OMP_NUM_THREADS threads, one if the variable is not set."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def conditions(kind: str, *packages: str) -> dict[str, str]:
    """Return the last columns of every row, with the versions of further packages first."""
    try:
        triton = version("triton")
    except ImportError:
        triton = ""
    return {package: version(package) for package in packages} | {
        "device": device_name(kind),
        "driver": driver(kind),
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "commit": commit(),
        "sources": sources(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
