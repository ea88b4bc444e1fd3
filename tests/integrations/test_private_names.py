"""Each adapter has one file, `api.py`, that imports its framework and names what is private there. No engine runs."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pc import integrations
from pc.integrations import seam

FOLDER = Path(integrations.__file__).parent
FORBIDDEN = {"huggingface": "transformers.", "sglang": "sglang", "vllm": "vllm"}
"""How names of imported modules must not begin; transformers itself may be imported, as a module."""
KNOWN = {
    "huggingface": {"_sample", "_status"},
    "sglang": {"_split_node"},
    "vllm": {"_block_hash", "_free_blocks", "_pool"},
}
OWN = {"self", "cls", "torch.cpu"}
"""Objects whose private attributes vLLM's adapter may read."""
FURTHER = {
    "_eos_token_tensor", "_attn_implementation", "_attn_implementation_internal", "_status", "_use_prefix_sharing",
    "_cached_continuous_batching_manager", "_local_mapping", "_global_mapping", "_is_user_defined",
}  # fmt: skip
"""Private names of transformers that its tables do not check."""


def files(adapter: str) -> Iterator[tuple[Path, list[ast.AST]]]:
    """Yield the files of an adapter besides `api.py`, with the nodes of their code."""
    for path in sorted((FOLDER / adapter).rglob("*.py")):
        if path != FOLDER / adapter / "api.py":
            yield path, list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def private_names(adapter: str) -> set[str]:
    """Return the private names of a framework: those in its adapter's tables, and `FURTHER`.

    SGLang's adapter has none, because it overrides methods of SGLang.
    """
    api: Any = importlib.import_module(f"pc.integrations.{adapter}.api")
    tables = [*api.NAMES.values(), *([api.BATCHING_NAMES] if adapter == "huggingface" else [])]
    names = [name for table in tables for name in seam.names(table)]
    found = {name.path.rpartition(".")[2] for name in names}
    if adapter == "huggingface":
        found |= FURTHER
    else:
        found |= {word for name in names for word in name.parameters or ()}
        found |= {word for table in api.ATTRIBUTES.values() for text in table.values() for word in text.split()}
    found = {name for name in found if name.startswith("_") and not name.endswith("__")}
    assert KNOWN[adapter] <= found
    return found if adapter != "sglang" else set()


@pytest.mark.quick
@pytest.mark.parametrize("adapter", FORBIDDEN)
def test_no_other_file_imports_the_framework_or_names_what_is_private(adapter: str) -> None:
    private, begin = private_names(adapter), FORBIDDEN[adapter]
    for path, nodes in files(adapter):
        for node in nodes:
            where = f"{path.relative_to(FOLDER)}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith(begin) for name in node.names), where
            elif isinstance(node, ast.ImportFrom):
                assert node.level or not str(node.module).startswith(begin.rstrip(".")), where
            elif isinstance(node, ast.ClassDef):
                assert not private.intersection(getattr(member, "name", "") for member in node.body), where
            elif isinstance(node, ast.FunctionDef):
                assert adapter == "huggingface" or node.name not in private, where
            elif isinstance(node, ast.Attribute) and adapter == "vllm":
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                assert not is_private or ast.unparse(node.value) in OWN, where
            elif isinstance(node, ast.Attribute):
                assert node.attr not in private, where
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(("vllm.v1", "vllm_omni.")), where
                assert node.value not in private, where


def test_what_other_files_of_vllms_adapter_import_from_the_seam_is_there() -> None:
    from pc.integrations.vllm import api

    known = {*vars(api), *api.PATHS, *api.BY_PLATFORM, "logger"}
    for path, nodes in files("vllm"):
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "api"]
        names = {each.name for node in imports for each in node.names}
        names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "api"}
        assert names <= known, path
