"""The command line as a shell sees it: its version, and the completion scripts run in the shells they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import pc
from pc.cli import app
from pc.completion import SHELLS, VALUES, script


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "pc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pc {pc.__version__}\n"


def candidates(shell: str, line: str, tmp_path: Path) -> set[str]:
    """What a shell offers for the last word of a line."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(script(shell, app))
    words = line.split(" ")
    if shell == "bash":
        code = (
            f"source ./script; COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}; "
            'complete -p pc >/dev/null && _pc && printf "%s\\n" "${COMPREPLY[@]}"'
        )
    elif shell == "fish":
        code = f"source ./script; complete -C '{line}'"
    else:  # what zsh would be told to offer, before it draws
        code = (
            "compdef() { }; _describe() { for each in $commands; do print -r -- ${each%%:*}; done }; "
            "_arguments() { for each in $@; do print -r -- ${each%%\\[*}; done }; "
            f"source ./script; words=({' '.join(words)}); CURRENT={len(words)}; _pc"
        )
    done = subprocess.run([shell, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr, done.stderr
    return {found.split("\t")[0] for found in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_are_completed(shell: str, tmp_path: Path) -> None:
    assert {"demo", "replay", "bench", "info"} <= candidates(shell, "pc ", tmp_path)


@pytest.mark.parametrize("shell", SHELLS)
def test_options_are_those_of_the_command(shell: str, tmp_path: Path) -> None:
    found = candidates(shell, "pc replay --", tmp_path)
    assert {"--policies", "--plot", "--csv"} <= found
    assert "--quick" not in found
    assert "--quick" in candidates(shell, "pc bench --", tmp_path)


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_values_of_an_option_are_completed(shell: str, tmp_path: Path) -> None:
    assert candidates(shell, "pc demo --device ", tmp_path) == set(VALUES["--device"])


def test_the_options_with_known_values_exist() -> None:
    options = set(re.findall(r"--[\w-]+", script("bash", app).replace('words="', " ").partition('"$COMP_CWORD"')[2]))
    assert set(VALUES) <= options


def test_another_shell_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pc", "completion", "tcsh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "shell: got 'tcsh', needs one of bash, zsh, fish" in re.sub(r"\s+", " ", done.stderr.replace("│", ""))
