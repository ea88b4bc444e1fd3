"""What a user's type checker sees of the manager: no Any, so that a typo in a field of a result is an error.

From the wheel and from an editable install: `make wheel-test`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typos

pytest.importorskip("mypy")


@pytest.mark.slow
def test_typos_are_errors_and_right_code_is_not(tmp_path):
    (tmp_path / "script.py").write_text(typos.SCRIPT)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "script.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(root / "src")},
        check=False,
    )
    assert typos.found(done.stdout) == typos.WRONG, done.stdout
