"""`python -m pc info`, which prints the facts that a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

from .integrations.tested import TESTED, installed, text_of, untested
from .triton_ops._attention.constants import PROGRAMS, Tiles, architecture, decode_tiles, prefill_tiles
from .triton_ops._core.runtime import HAS_TRITON, INTERPRET

PACKAGES = ("torch", "triton", "numpy", "einops", "xxhash")
VARIABLES = (
    "TRITON_INTERPRET", "PC_DEBUG", "PC_VLLM", "PC_SGLANG", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
)  # fmt: skip

Sections = dict[str, dict[str, str]]


def collect_info() -> Sections:
    """Return versions, devices, their kernels and cache directories as sections of names and values."""
    sections = {
        "versions": {
            "pc": f"{_version('pc-kernels') or 'not installed'} in {Path(__file__).resolve().parent}",
            "python": f"{platform.python_version()}, {sys.executable}",
            **{name: _version(name) or "not installed" for name in PACKAGES},
            "platform": platform.platform(),
        },
        "frameworks": {name: _framework(name) for name in TESTED},
        "cpu": _cpu(),
    }
    count = torch.cuda.device_count()
    for index in range(count):
        sections[f"cuda:{index}"] = _gpu(torch.device("cuda", index))
    if count == 0:
        sections["gpu"] = {"device": "none that PyTorch can use"}
    sections["caches"] = _cache_directories()
    sections["environment"] = {name: os.environ.get(name, "not set") for name in VARIABLES}
    return sections


def format_info(sections: Sections) -> str:
    """Return the sections as aligned lines of text."""
    width = max(len(name) for values in sections.values() for name in values)
    lines = []
    for title, values in sections.items():
        lines += [title, *(f"  {name:{width}}  {value}" for name, value in values.items())]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    # torch's own version names the build, such as "+cu130"; the package's metadata does not
    return torch.__version__ if package == "torch" else installed(package)


def _framework(package: str) -> str:
    """Return a text with the installed version of a framework and the tested versions."""
    tested, version = TESTED[package], _version(package)
    mark = " (UNTESTED)" if version is not None and untested(package, version) else ""
    return f"{version or 'not installed'}{mark}; tested: {tested}; newest tested: {text_of(tested.newest)}"


def _cpu() -> dict[str, str]:
    """Return the processor, its threads, and the implementation of operators on CPU tensors."""
    serves = "triton kernels in the interpreter (TRITON_INTERPRET was set at import)" if INTERPRET else "PyTorch"
    return {
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors",
        "threads": f"{torch.get_num_threads()} of PyTorch, {torch.backends.cpu.get_cpu_capability()}",
        "operators": serves,
    }


def _gpu(device: torch.device) -> dict[str, str]:
    """Return facts about a GPU, and the tile sizes that attention kernels use on it."""
    properties = torch.cuda.get_device_properties(device)
    arch = architecture(device)
    found = {
        "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {arch.num_processors} processors",
        "architecture": arch.name,
        "runtime": f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "operators": "triton kernels" if HAS_TRITON else "none: triton is not installed",
        "float8 e4m3": "read natively" if arch.has_e4m3 else "converted by bit operations",
    }
    for head_dim in (64, 128, 256):
        decode, prefill = decode_tiles(arch.name, head_dim, 2, 16, False), prefill_tiles(arch.name, head_dim, 2, False)
        found[f"decode {head_dim}"], found[f"prefill {head_dim}"] = _tiles(decode), _tiles(prefill)
    if arch.name not in PROGRAMS:
        return found | {"tuned": "nothing for this architecture; the rules above serve"}
    programs, why = PROGRAMS[arch.name]
    return found | {"tuned decode": f"{programs} programs a processor: {why}"}


def _tiles(tiles: Tiles) -> str:
    return f"tiles of {tiles.block_m}x{tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages"


def _cache_directories() -> dict[str, str]:
    """Return the folders of compiled kernels and of models. The keys are the environment variables that set them."""
    home = Path.home()
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER', 'root')}"
    defaults = {
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": inductor,
        "HF_HOME": home / ".cache" / "huggingface",
    }
    found = {}
    for name, default in defaults.items():
        path = Path(os.environ.get(name, default))
        found[name] = f"{path}{'' if path.exists() else ' (not there yet)'}"
    return found
