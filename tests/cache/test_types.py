"""The manager's types as a user's type checker sees them. There is no Any, so a typo in a result's field is an error.

`make wheel-test` checks them for the wheel and for an editable install.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import typos
from processes import python

pytest.importorskip("mypy")


@pytest.mark.slow
def test_typos_are_errors_and_right_code_is_not(tmp_path):
    (tmp_path / "script.py").write_text(typos.SCRIPT)
    root = Path(__file__).parents[2]
    options = ("--strict", "--no-color-output", "script.py")
    done = python("-m", "mypy", *options, cwd=tmp_path, status=1, MYPYPATH=str(root / "src"))
    assert typos.found(done.stdout) == typos.WRONG, done.stdout
