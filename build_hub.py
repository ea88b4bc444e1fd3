"""A package for HuggingFace's kernels library, made from this tree: `make hub` writes build/hub.

A hub page is a folder of variants, one a kind of device, whose code imports itself by relative imports alone and
registers its operators under the package's own name. Ours is triton_ops as it is, and a front door.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent
BACKENDS = ("cpu", "cuda", "rocm")
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
FRONT = f'''"""FlashAttention's functions on paged attention of `pc`."""

from .triton_ops.flash_attn import {", ".join(FUNCTIONS)}

__all__ = {list(FUNCTIONS)}
'''
OPS = '''"""The namespace of this package's operators."""

import torch

from .triton_ops._core.operator import NAMESPACE

ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    """An operator's name with its namespace."""
    return f"{NAMESPACE}::{name}"
'''


def sources() -> dict[str, str]:
    """Files of a variant by name: the operators as they are, which import nothing above them, and the front door."""
    found = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "triton_ops").rglob("*.py"))}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()} | {
        "__init__.py": FRONT,
        "_ops.py": OPS,
    }


def card() -> str:
    """The page that the hub shows: what docs/hub.md has between its markers."""
    text = (ROOT / "docs" / "hub.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- card -->\n")[2].partition("<!-- /card -->")[0]
    header = {"license": "apache-2.0", "library_name": "kernels", "tags": "[kernels]"}
    lines = [f"{name}: {value}" for name, value in header.items()]
    return "\n".join(["---", *lines, "---", "", "# pc", "", shown.strip(), ""])


def build(folder: Path) -> list[Path]:
    """Writes the package into `folder`, in place of what an earlier call wrote; the variants."""
    files, variants = sources(), []
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10]
    shutil.rmtree(folder / "build", ignore_errors=True)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        for name, text in files.items():
            (variant / name).parent.mkdir(parents=True, exist_ok=True)
            (variant / name).write_text(text, encoding="utf-8")
        hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
        metadata = {
            "id": f"pc_{backend}_{digest}",
            "name": "pc",
            "version": 1,
            "license": "Apache-2.0",
            "backend": {"type": backend},
            "python-depends": [],
            "digest": {"algorithm": "sha256", "files": hashes},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        variants.append(variant)
    (folder / "README.md").write_text(card(), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    return variants


def main() -> None:
    """Builds and says where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "hub")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    names = ", ".join(variant.name for variant in build(folder))
    print(f"{folder}: {names}")


if __name__ == "__main__":
    main()
