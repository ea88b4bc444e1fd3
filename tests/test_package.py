"""The package as a whole: what its import does, and in which direction its modules import each other."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from processes import python

import pc
from pc.triton_ops._core.runtime import HAS_TRITON

pytestmark = pytest.mark.quick  # each page, name and command

ROOT = Path(__file__).parent.parent
FOLDERS = {"pc": "src/pc", "pc.triton_ops": "triton_ops", "pc.cache": "cache", "pc.integrations": "integrations"}
LAYERS = ("triton_ops", "cache", "integrations")  # each may import the ones before it


# Threads load the first kernel, and with it triton: one kernel for all, unless the interpreter was switched meanwhile.
LOAD = "importlib.import_module('pc.triton_ops.kernels.attention')._attention_kernel"
THREADS = f"""
import importlib
from concurrent.futures import ThreadPoolExecutor
os.environ['TRITON_INTERPRET'] = '1'
try: {LOAD}
except RuntimeError as error: print(error)
os.environ['TRITON_INTERPRET'] = '0'
with ThreadPoolExecutor(8) as pool: found = [*pool.map(lambda _: {LOAD}, range(8))]
print(len({{*map(id, found)}}), found[0].arg_names[0], type(found[0]).__name__)
"""
SWITCHED = "TRITON_INTERPRET: was 0 when pc was imported and is 1 now that its first kernel runs; set it before"


def test_a_part_is_imported_when_it_is_used() -> None:
    # These are after torch, which imports some of them itself in some versions.
    heavy = """transformers sglang vllm typer rich matplotlib zmq prometheus_client safetensors mooncake xxhash triton
        torch._dynamo torch._inductor torch.onnx sympy pc.cache.replay pc.cache.policies.hazard
        pc.integrations.huggingface pc.integrations.sglang pc.integrations.vllm pc.demo pc.__main__ pc.bench"""
    done = python(
        "-c",
        "import sys, torch\nbefore = {*sys.modules}\nimport pc\n"
        f"print(sorted(m for m in {{*sys.modules}} - before if m in {heavy.split()!r}))\n"
        "pc.cache.replay.Trace\n"
        "cache = torch.zeros(4, 8, 1, 16)\n"
        "pc.reshape_and_cache(kv := torch.ones(1, 1, 16), kv, cache, cache.clone(), torch.tensor([8]))\n"
        "one = lambda *x: torch.tensor(x, dtype=torch.int32)\n"
        "plan = pc.attention_plan(one(1)[None], one(8), one(0, 1), 8)\n"
        "pc.paged_attention(torch.ones(1, 1, 16), cache, cache, one(1)[None], one(8), one(0, 1), 0.25, plan=plan)\n"
        "print(dir(pc.integrations), {'triton', 'transformers', 'vllm'} & ({*sys.modules} - before))\n"
        "print(pc.integrations.vllm.register.__name__, hasattr(pc.integrations, 'jax'))\n"
        "import os\n"  # plugins that the environment asks for nothing
        "for name in ('PC_VLLM', 'PC_SGLANG'): os.environ.pop(name, None)\n"
        "pc.integrations.vllm.register(), pc.integrations.sglang.register()\n"
        "print({'transformers', 'sglang', 'vllm'} & {*sys.modules})\n" + (THREADS if HAS_TRITON else ""),
        TRITON_INTERPRET="0",
    )
    said = ["[]", "['huggingface', 'sglang', 'vllm'] set()", "register False", "set()"]
    assert done.stdout.splitlines() == said + ([SWITCHED, "1 query_ptr JITFunction"] if HAS_TRITON else [])


@pytest.mark.slow
def test_operators_run_without_docstrings() -> None:
    """`python -OO` removes docstrings, from which those of variants of an operator are made, so the import failed."""
    code = "import torch, pc; print(pc.gather_blocks(torch.ones(1, 2), torch.tensor([0])), pc.paged_attention.__doc__)"
    assert python("-OO", "-c", code).stdout == "tensor([[1., 1.]]) None\n"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_the_interpreter_is_chosen_when_pc_is_imported() -> None:
    code = f"import importlib, os, pc.triton_ops\ndel os.environ['TRITON_INTERPRET']\nprint(type({LOAD}).__name__)"
    assert python("-c", code, TRITON_INTERPRET="1").stdout == "InterpretedFunction\n"


def test_works_without_other_packages_or_names_what_it_lacks() -> None:
    # A None entry in sys.modules makes the import fail, as on a machine that lacks the package.
    done = python(
        "-c",
        "import importlib, sys\n"
        "for name in ('triton', 'transformers', 'vllm', 'typer', 'xxhash'): sys.modules[name] = None\n"
        "import torch, pc\n"
        "cache = torch.zeros(4, 8, 1, 16)\n"
        "kv = torch.ones(3, 1, 16)\n"
        "torch.ops.pc.reshape_and_cache(kv, kv, cache, cache.clone(), torch.tensor([8, 9, -1]))\n"
        "one = lambda *x: torch.tensor(x, dtype=torch.int32)\n"
        "out = pc.paged_attention(kv[:1], cache, cache, one(1)[None], one(2), one(0, 1), 1.0)\n"
        "print(cache.sum().item(), out.mean().item())\n"
        "for part in ('pc.__main__', 'pc.integrations.huggingface'):\n"
        "    try: importlib.import_module(part)\n"
        "    except (SystemExit, ImportError) as error: print(error)\n",
    )
    numbers, command, adapter = done.stdout.splitlines()
    assert numbers == "32.0 1.0"
    assert command.endswith("pip install typer rich matplotlib")
    assert "pip install 'transformers>=" in adapter


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--device", "gpu"], "--device: got 'gpu', needs cpu or cuda"),
        (["demo", "--dtype", "int"], "--dtype: got 'int', needs float32"),
        (["demo", "--block-size", "0"], "block_size: got 0, needs at least 1"),
        (["demo", "--output", "/proc/none"], "/proc/none"),
        (["bench", "--device", "gpu"], "--device: got 'gpu', needs cpu or cuda"),
        (
            ["bench", "copy_blocks", "--quick", "--device", "cpu", "--output", "/proc/none"],
            "--output: /proc/none: No such",
        ),
        (["replay", "TRACE", "--csv", "/proc/none/rows.csv"], "--csv: /proc/none: No such"),
        (["replay", "TRACE", "--plot", "/proc/none/rates.png"], "--plot: /proc/none: No such"),
        (["bench", "copy_blocks", "--quick", "--device", "cpu", "--case", "one"], "--case: got 'one', needs a part of"),
        (["bench", "copy_blocks", "--device", "cpu", "--provider", "vLLM"], "--provider: got 'vLLM', needs a part of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_command_cannot_do_is_said_in_a_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from pc.__main__ import app

    (trace := tmp_path / "trace.jsonl").write_text('{"hash_ids": [1, 2]}\n')
    arguments = [str(trace) if argument == "TRACE" else argument for argument in arguments]
    done = testing.CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == 2, done.output
    assert said in done.output


def hints() -> list[tuple[str, str]]:
    """Return every `pip install` that an error names: the file, and the packages."""
    found = []
    for folder in FOLDERS.values():
        for path in sorted((ROOT / folder).rglob("*.py")):
            for text in re.findall(r"pip install ([^\"\n]+)", path.read_text(encoding="utf-8")):
                for command in text.rstrip(")").split("&&"):
                    words = shlex.split(command.removeprefix(" pip install"))
                    found += [(path.name, word) for word in words if not word.startswith("--")]
    return [hint for hint in found if not hint[1].startswith("{")]  # named by the code beside it


def test_errors_name_an_install_that_works_today() -> None:
    # The package is on no index, so a hint names what an extra would install, written as in the extra.
    tomllib = pytest.importorskip("tomllib")
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    lists = (project["dependencies"], *project["optional-dependencies"].values())
    known = {requirement for requirements in lists for requirement in requirements}
    known |= {re.split(r"[<>=\[]", requirement)[0] for requirement in known} - {"pc-kernels"}
    known |= set(re.findall(r"^MODEL := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(hints()) > 8
    assert [hint for hint in hints() if hint[1] not in known] == []


def test_the_changelog_has_a_dated_entry_for_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(pc.__version__)} \(\d{{4}}-\d{{2}}-\d{{2}}\)$", text, re.MULTILINE)


def test_every_package_is_in_the_wheel() -> None:
    setuptools = pytest.importorskip("setuptools")
    listed = set(setuptools.find_packages(str(ROOT / "src")))
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):  # rglob follows no links
            found.add(".".join((package, *path.parent.relative_to(ROOT / folder).parts)))
    assert found == listed


def imported_layers(path: Path) -> set[str]:
    """Return the layers that a module imports by relative imports."""
    package = ("pc", *path.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module or "").split("."))
            targets = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        for target in targets:
            parts = [part for part in target if part]  # `from .. import x` has an empty part
            # The first part is a layer in an absolute import of a second copy.
            names |= {*(parts[1:2] if parts[0] == "pc" else parts[:1])} & {*LAYERS}
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    for path in (ROOT / layer).rglob("*.py"):
        assert imported_layers(path) <= allowed, path


def test_importing_a_folder_by_its_bare_name_fails() -> None:
    for layer in LAYERS:
        done = python("-c", f"import {layer}", cwd=ROOT, status=1)
        assert f"import pc.{layer}" in done.stderr
