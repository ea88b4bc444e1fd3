"""docs/environment.md lists every variable of ours and of Triton that code reads, and no other of ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "cache", "integrations", "triton_ops", "benchmarks", "tests", "docs")
NAME = re.compile(r"(?:PC|TRITON)_(?!ATTN)[A-Z_]+")  # TRITON_ATTN is a backend of vLLM's
PAGE = set(re.findall(r"`([A-Z_]{4,})`", (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")))


def read_by(path: Path) -> set[str]:
    """Return the variables that a file names as a whole string, to read, set or list them."""
    text = path.read_text(encoding="utf-8")
    if not NAME.search(text):
        return set()
    tree = ast.parse(text)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    return {name for name in strings | keywords if NAME.fullmatch(name)}


def test_the_page_has_every_variable() -> None:
    found = {name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") for name in read_by(path)}
    assert {"PC_DEBUG", "PC_VLLM", "TRITON_INTERPRET"} <= found
    assert found <= PAGE, f"add to docs/environment.md: {sorted(found - PAGE)}"
    assert {name for name in PAGE if name.startswith("PC_")} <= found
