"""Build a wheel, install it into a clean environment and use it there, beside a user's own cache.py.

Then mypy must find the errors of a script with typos, with the wheel and with an editable install.

`make wheel-test` runs it: python tests/check_wheel.py ENVIRONMENT. pytest does not collect it, because it installs
torch.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import typos  # noqa: E402
from check_newest import copy_checkout  # noqa: E402

USE = """
import cache, pc, torch
assert cache.MINE, cache
assert "site-packages" in pc.__file__, pc.__file__
kv = torch.randn(20, 2, 64)
keys, values = torch.empty(4, 16, 2, 64), torch.empty(4, 16, 2, 64)
manager = pc.CacheManager(num_blocks=4, block_size=16)
allocation = manager.allocate("a", list(range(20)))
pc.reshape_and_cache(kv, kv, keys, values, torch.from_numpy(allocation.slot_mapping))
table = torch.from_numpy(manager.block_table("a"))[None]
lens, starts = torch.tensor([20], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
out = pc.paged_attention(kv.repeat(1, 2, 1), keys, values, table, lens, starts, 64**-0.5)
q, k = kv.repeat(1, 2, 1).transpose(0, 1), kv.repeat_interleave(2, 1).transpose(0, 1)
want = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(0, 1)
torch.testing.assert_close(out, want)
from importlib.resources import files
assert len(files("pc.demo").joinpath("constitution.txt").read_text().split()) > 6000
print("the wheel works:", pc.__version__, torch.__version__)
"""


def check_page(wheel: Path) -> None:
    """Check the page that an index would show: no rendering warning, an author, and no link into the repository."""
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True)
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        page = email.message_from_bytes(files.read(name))
    for field in ("Author", "Summary", "Keywords", "License-Expression", "Requires-Python", "Classifier"):
        assert page[field], field
    description = str(page.get_payload())
    dead = [link for link in re.findall(r"\]\(([^)]+)\)", description) if not link.startswith("https://")]
    assert not dead, dead
    assert "pip install" in description


def check_types(python: Path, folder: Path) -> None:
    """Check the errors that mypy finds, with the package as `python` has it installed."""
    (folder / "script.py").write_text(typos.SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--python-executable", python]
    done = subprocess.run([*command, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert typos.found(done.stdout) == typos.WRONG, done.stdout


def main(environment: Path) -> None:
    """Build, install and use the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # Build in a copy, because setuptools leaves build/ there and packs what an earlier build left.
        copy_checkout(work / "tree")
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", work, work / "tree"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (wheel,) = work.glob("*.whl")
        check_page(wheel)
        python = environment / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([*install, wheel], check=True)
        subprocess.run([*install, "--force-reinstall", "--no-deps", wheel], check=True)
        user = work / "user"
        user.mkdir()
        (user / "cache.py").write_text("MINE = True\n")
        (user / "use.py").write_text(USE)
        subprocess.run([python, "use.py"], cwd=user, check=True)
        # The command exists and says what it lacks, because the extras are not installed.
        done = subprocess.run([environment / "bin" / "pc"], cwd=user, capture_output=True, text=True, check=False)
        assert "pip install typer rich" in done.stderr, done
        (user / "cache.py").unlink()
        check_types(python, user)
        subprocess.run([*install, "--no-deps", "--editable", work / "tree"], check=True)
        check_types(python, user)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
