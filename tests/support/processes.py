"""Programs and functions that tests run in processes and in threads of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def python(*arguments: str | Path, status: int = 0, cwd: Path | None = None, **environment: str) -> Any:
    """Run Python in another process, which must end with `status`; return the process with its output as text.

    Args:
        arguments: Arguments of the interpreter, such as `-c` and code.
        status: The exit status.
        cwd: The folder to run in.
        environment: Variables that are added to this process's environment.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def in_threads(work: Callable[[Any], Any], *arguments: Any) -> list[Any]:
    """Call a function with each argument in a thread of its own, and return the results."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))


def exit_status_of_child(function: Callable[[], Any]) -> int:
    """Run a function in a forked process, for at most 20 seconds; return its exit status, 0 if the function returns."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
