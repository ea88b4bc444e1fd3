"""Install what a user gets today, as README says: the demo must reuse tokens, and the adapter's tests must pass.

The environment is bare and the checkout a copy, so that nothing that is not in README helps. torch is pinned to a build
for CPUs; pip resolves everything else, to the newest releases within the bounds of the extras.

If pip resolves the transformers of constraints.txt, `make test` runs all of the adapter's tests with it. Then only a
few of them run here, because what is left to find is a package or a file that README's commands do not bring.

Then the oldest releases that we allow of small packages must serve too.

Behind it a table shows the newest releases that exist, whatever our bounds say. It informs and fails nothing. A newer
transformers is installed beside the environment and tried.

Run by `make newest`: python tests/check_newest.py ENVIRONMENT. Not collected by pytest, because it installs torch.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TESTS = ["tests/integrations/test_tested.py", "tests/test_demo.py"]
ADAPTER = "tests/integrations/huggingface"
OLDEST = ["tests/cache", "tests/test_cli.py", "tests/test_package.py", "tests/test_demo.py"]
SMALL = ["numpy", "einops", "typer", "rich", "matplotlib", "gguf", "xxhash", "pyzmq", "msgpack", "prometheus_client"]
TRIED = [f"{ADAPTER}/test_serving.py", f"{ADAPTER}/test_enable.py"]
MADE_HERE = ("git clone", "python3 -m venv")
"""Commands of README that this script replaces by its own."""


def commands() -> list[str]:
    """Return the commands of README's section on installation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## Install\n\n```sh\n(.*?)```", text, re.DOTALL)
    found = [line.split("  #")[0].strip() for line in block.splitlines()]
    kept = [line for line in found if line and not line.startswith(MADE_HERE)]
    assert any("pip install" in line for line in kept), kept
    assert "python -m pc demo" in kept, kept
    return kept


def copy_checkout(target: Path) -> None:
    """Copy the files that git knows, as a fresh clone has them."""
    names = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, names):
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


class Environment:
    """A bare environment, and commands that run in it as in a user's shell."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.bin, self.checkout = folder / "bin", folder / "checkout"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        copy_checkout(self.checkout)
        pins = folder / "pins.txt"
        pins.write_text(f"{TORCH}\n")
        dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRITON_INTERPRET")
        self.variables = {name: value for name, value in os.environ.items() if name not in dropped}
        self.variables |= {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}
        self.variables |= {"PIP_CONSTRAINT": str(pins), "PIP_QUIET": "1"}

    def run(self, command: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy. If it fails and `check` is set, raise SystemExit with its output."""
        begin = time.monotonic()
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.checkout, env=self.variables | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        print(f"  status {done.returncode}, {time.monotonic() - begin:.0f} s", flush=True)
        if check and done.returncode:
            raise SystemExit(f"{done.stdout}\nnewest: `{command}` failed")
        return done


def check_demo(folder: Path) -> None:
    """Exit if the demo reused nothing."""
    with (folder / "demo_output" / "demo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    later = [row for row in rows if row["request"] != "1"]
    reused = sum(int(row["reused_tokens"]) for row in later)
    print(f"  {len(rows)} requests, {reused:,} of {sum(int(r['prompt_tokens']) for r in later):,} later tokens reused")
    if not later or not all(int(row["reused_tokens"]) for row in later):
        raise SystemExit("newest: a later request of the demo reused nothing")


def oldest() -> list[str]:
    """Return the oldest releases that pyproject.toml allows of small packages, as `name==version`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = [(name, set(re.findall(rf'"{name}>=([\d.]+)"', text))) for name in SMALL]
    assert all(len(found) == 1 for _, found in bounds), bounds
    return [f"{name}=={found.pop()}" for name, found in bounds]


def try_oldest(environment: Environment) -> None:
    """Install the oldest releases beside the environment, and run tests of the cache and of the commands with them."""
    beside = environment.checkout.parent / "oldest"
    environment.run(f"pip install hypothesis && pip install --target {beside} {' '.join(oldest())}")
    workers, tests = os.environ.get("WORKERS", "2"), " ".join(OLDEST)
    done = environment.run(f"python -m pytest -q -n {workers} -m 'not slow' {tests}", PYTHONPATH=str(beside))
    print(f"  {done.stdout.strip().splitlines()[-1]}")


def adapter_tests(environment: Environment) -> list[str]:
    """Return all tests of the adapter, or a few if `make test` has the same transformers."""
    shown = environment.run("pip show transformers", PIP_QUIET="0").stdout
    (version,) = re.findall(r"^Version: (\S+)$", shown, re.MULTILINE)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^transformers==([^;\s]+)", constraints, re.MULTILINE)
    print(f"  transformers {version}; constraints.txt has {', '.join(pinned) or 'none'}")
    return TRIED if pinned == [version] else [ADAPTER]


def tested_versions() -> ModuleType:
    """Return the table of tested versions, without importing torch."""
    spec = importlib.util.spec_from_file_location("tested", ROOT / "integrations" / "tested.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tested"] = module
    spec.loader.exec_module(module)
    return module


def show_newest(environment: Environment) -> None:
    """Print a table of the newest releases that exist, and what a newer transformers does to the tests."""
    tested = tested_versions()
    table = []
    for package in tested.TESTED:
        found = environment.run(f"pip index versions {package}", check=False, PIP_CONSTRAINT="", PIP_QUIET="0").stdout
        version = (re.findall(rf"^{package} \((\S+)\)", found, re.MULTILINE) or [""])[0]
        verdict = "tested" if version else "the index does not say"
        if version and tested.untested(package, version):
            verdict = try_newer(environment, package) if package == "transformers" else "newer than what was tested"
        table.append((package, str(tested.TESTED[package]), version or "-", verdict))
    print(f"\n{'framework':14} {'tested':18} {'newest':12} verdict")
    for row in table:
        print("{:14} {:18} {:12} {}".format(*row))


def try_newer(environment: Environment, package: str) -> str:
    """Install a package beside the environment, whatever our bounds say, and return how tests of the adapter end."""
    beside = environment.checkout.parent / "beside"
    if environment.run(f"pip install --target {beside} {package}", check=False).returncode:
        return "newer than what was tested; it cannot be installed"
    done = environment.run(f"python -m pytest -q -m 'not slow' {' '.join(TRIED)}", check=False, PYTHONPATH=str(beside))
    return f"newer than what was tested; tests: {done.stdout.strip().splitlines()[-1]}"


def main(folder: str) -> None:
    """Check the commands of README, then the adapter, then print the newest releases."""
    environment = Environment(Path(folder).resolve())
    for command in commands():
        done = environment.run(command)
        if command == "pc info":
            print(done.stdout.partition("\ncpu")[0])
        if command == "python -m pc demo":
            check_demo(environment.checkout)
    environment.run("pip install pytest pytest-xdist")
    workers, tests = os.environ.get("WORKERS", "2"), " ".join([*adapter_tests(environment), *TESTS])
    done = environment.run(f"python -m pytest -q -n {workers} -m 'not slow' {tests}")
    print(f"  {done.stdout.strip().splitlines()[-1]}")
    if sys.version_info < (3, 13):  # numpy 1.26 has no builds for newer ones
        try_oldest(environment)
    try:
        show_newest(environment)
    except Exception as error:
        print(f"newest: no table of newer releases: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
