"""`make test` omits no operator, verb, adapter or page completely."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pc

ROOT = Path(__file__).parent.parent


def sources(tests: list[pytest.Item], folder: str = "") -> str:
    """Return the code of the tests in a folder of tests/."""
    inside = [test for test in tests if test.path.is_relative_to(ROOT / "tests" / folder)]
    functions = {test.function for test in inside if hasattr(test, "function")}
    return "\n".join(inspect.getsource(function) for function in functions)


def test_quick_tests_reach_every_operator(quick_tests: list[pytest.Item]) -> None:
    files = {test.path.stem for test in quick_tests}
    rows = [test.callspec.params for test in quick_tests if hasattr(test, "callspec")]
    files |= {f"test_{row[name]}" for row in rows for name in ("op", "operator") if name in row}
    names = {name.removesuffix("_list").removesuffix("_with_lse") for name in pc.triton_ops.__all__}
    assert {f"test_{name}" for name in names} - {"test_set_debug_mode"} <= files


def test_quick_tests_call_every_verb(quick_tests: list[pytest.Item]) -> None:
    called = set(re.findall(r"\.(\w+)\(", sources(quick_tests, "cache")))
    verbs = {name for name, value in vars(pc.CacheManager).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {"allocate", "checkpoint", "resume"} <= verbs
    assert verbs - called == set()
    commands = {match.stem for match in (ROOT / "src" / "pc").glob("*.py")} & {"bench", "info", "replay"}
    text = "\n".join(test.path.read_text(encoding="utf-8") for test in {t.path: t for t in quick_tests}.values())
    assert [name for name in sorted(commands | {"demo"}) if not re.search(rf"run_{name}|\"{name}\"", text)] == []


def test_quick_tests_reach_every_adapter(quick_tests: list[pytest.Item]) -> None:
    folders = {test.path.relative_to(ROOT).parts[:3] for test in quick_tests}
    adapters = [folder for folder in sorted((ROOT / "tests" / "integrations").iterdir()) if [*folder.glob("test_*.py")]]
    assert adapters
    assert {("tests", "integrations", folder.name) for folder in adapters} <= folders


def test_quick_tests_run_every_page(quick_tests: list[pytest.Item]) -> None:
    tests = [test for test in quick_tests if getattr(test, "originalname", "") == "test_snippets_run"]
    read = {test.callspec.params["page"] for test in tests}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert {page for page in pages if re.search(r"(?<!-->\n)```python", page.read_text(encoding="utf-8"))} == read
