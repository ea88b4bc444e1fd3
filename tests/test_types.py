"""The types of the public functions, as a type checker sees them: a script with correct calls and with typos."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import pytest
from processes import python

import pc

ROOT = Path(__file__).parent.parent
FUNCTIONS = sorted(name for name in pc.triton_ops.__all__)
RESULTS = {"None": "None", "<class 'NoneType'>": "None"}


def _script() -> tuple[str, list[int]]:
    """Return a script with correct and wrong calls in turn, and the numbers of the wrong lines."""
    lines = ["from collections.abc import Sequence", "import torch", "import pc", "from typing import Any"]
    wrong = []
    for name in FUNCTIONS:
        function = getattr(pc, name)
        hints = typing.get_type_hints(function)
        result = str(hints.pop("return")).replace("<class 'torch.Tensor'>", "torch.Tensor")
        result = RESULTS.get(result, result)
        names = list(inspect.signature(function).parameters)
        kinds = [str(hints[n]).replace("<class '", "").replace("'>", "").replace("collections.abc.", "") for n in names]
        lines.append(f"def {name}({', '.join(f'{n}: {k}' for n, k in zip(names, kinds, strict=True))}) -> {result}:")
        call = ", ".join(f"{n}={n}" for n in names)
        lines.append(f"    pc.{name}({call}, no_such_argument=1)")
        wrong.append(len(lines))
        lines.append(f"    pc.{name}({call.replace(f'{names[0]}={names[0]}', f'{names[0]}={{1, 2}}', 1)})")
        wrong.append(len(lines))
        if result == "None":
            lines.append(f"    pc.{name}({call})")
        else:
            lines.append(f"    pc.{name}({call}).no_such_attribute")
            wrong.append(len(lines))
            lines.append(f"    return pc.{name}({call})")
    return "\n".join(lines) + "\n", wrong


@pytest.mark.slow
def test_every_function_has_its_signature_in_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script, wrong = _script()
    (tmp_path / "user.py").write_text(script)
    done = python("-m", "mypy", "--no-pretty", tmp_path / "user.py", cwd=ROOT, status=1)
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if "user.py:" in line and "error:" in line}
    assert found == set(wrong), done.stdout[-3000:]


def test_dir_shows_the_interface_only() -> None:
    assert dir(pc) == sorted([*pc.__all__, "cache", "flash_attn", "integrations"])
    assert not any(name.startswith("_") for name in dir(pc) if name != "__version__")
