"""The manager's core is small enough to read in an afternoon, and imports nothing optional."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

import pc
from pc.cache.hashing import feed_all, split_digests

CACHE = Path(pc.cache.__file__).resolve().parent
OBSERVE = ("observe.check", "observe.explain", "observe.stats")
OPTIONAL = (*OBSERVE, "reuse", "replay", "tensors", "tiers", "policies.hazard")
BUDGET = 2300


def code_lines(path: Path) -> int:
    """Return the number of lines with code, without docstrings, comments and blank lines."""
    text = path.read_text(encoding="utf-8")
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docs.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if line.strip() and not line.strip().startswith("#") and number not in docs)


def imports_of(name: str) -> set[str]:
    """Return the cache's modules that a module imports when it is imported itself."""
    path = path_of(name)
    package = (*name.split("."), "__init__")[:-1] if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(package) + 1:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            names = [".".join(filter(None, [*base, alias.name])) for alias in node.names]
            found |= {each for each in [*names, ".".join(filter(None, base))] if each and path_of(each).exists()}
    return found


def path_of(name: str) -> Path:
    path = CACHE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def core() -> set[str]:
    """Return the modules that the manager's import imports, of policies only their interface."""
    seen: set[str] = set()
    left = {"manager"}
    while left:
        name = left.pop()
        seen.add(name)
        left |= imports_of(name) - seen
    return {name for name in seen if not name.startswith("policies.") or name == "policies.base"}


def test_the_core_keeps_to_its_budget():
    sizes = {name: code_lines(path_of(name)) for name in core()}
    assert {"state", "pool", "table", "append", "observe.history"} <= set(sizes)
    assert sum(sizes.values()) <= BUDGET, sizes


def test_the_core_imports_nothing_optional():
    assert not {name for name in core() if name.startswith(OPTIONAL)}


WINDOW = {"groups": [pc.FullAttention(), pc.SlidingWindow(9)]}


@pytest.mark.parametrize("options", [{}, WINDOW, {"partial_reuse": True}], ids=["full", "window", "partial"])
def test_without_remembered_hashes_all_is_the_same(options):
    """Without remembered hashes, everything is right but slower: prompts get the same blocks and hashes."""
    managers = [pc.CacheManager(256, block_size=4, policy="lru", **options) for _ in range(2)]
    managers[1]._state.hasher.begin = feed_all
    r = random.Random(0)
    texts = [[r.randrange(99) for _ in range(600)] for _ in range(3)]
    for i in range(150):
        prompt = r.choice(texts)[: r.randrange(600)] + [r.randrange(99) for _ in range(r.randrange(9))]
        asked = {
            "extra_keys": r.choice([None, None, "adapter", pc.KeyAt(r.randrange(200), "image")]),
            "salt": r.choice([None, "tenant"]),
            "reuse": r.choice(["prefix", "gap", *["anywhere"] * (not options)]),
        }
        same = [(str(m.allocate(i, prompt, **asked)), m.commit(i, len(prompt)), m.block_hashes(i)) for m in managers]
        assert same[0] == same[1]
        for manager in managers:
            manager.free(i)
    assert managers[0].stats().hit_tokens == managers[1].stats().hit_tokens > 0
    assert managers[0]._state.memory.nbytes > managers[1]._state.memory.nbytes == 0


def test_remembered_chunks_with_equal_last_blocks_are_not_confused():
    """The key of a chunk has only the tokens of its last block, so the others must be compared."""
    manager, plain = (pc.CacheManager(64, block_size=4) for _ in range(2))
    plain._state.hasher.begin = feed_all
    for i, middle in enumerate([1, 2, 1, 2, 2]):
        prompt = [7] * 4 + [middle] * 56 + [8] * 4 + [9] * 64
        hashes = []
        for each in (manager, plain):
            each.allocate(i, prompt)
            hashes.append(split_digests(each._state.running[i].digests))
            each.free(i)
        assert hashes[0] == hashes[1]
    memory = manager._state.memory
    assert memory.nbytes == sum(entry[3] for entry in memory._chunks.values())
