"""A Mooncake store on this machine, with its master and its metadata server, if they are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.engines.vllm_server import free_port


def wait_for(port, process):
    for _ in range(200):
        if process.poll() is not None:
            pytest.skip("the Mooncake master or its metadata server cannot be started here")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    pytest.skip("the Mooncake master or its metadata server does not answer here")


def kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running(folder):
    """Yield the addresses of the metadata server and of the master, and the master's process. Skip without Mooncake."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(f"mooncake is not importable: {error}")
    commands = [shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name) for name in
                ("mooncake_http_metadata_server", "mooncake_master")]  # fmt: skip
    if None in commands:
        pytest.skip("mooncake_master is not installed")
    metadata, master, metrics = free_port(), free_port(), free_port()
    arguments = [
        [commands[0], "--host", "127.0.0.1", "--port", str(metadata)],
        [commands[1], "--rpc_address=127.0.0.1", "--rpc_port", str(master), "--metrics_port", str(metrics)],
    ]
    with (folder / "log").open("w") as log:
        started = [subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True) for line in arguments]
        try:
            for port, process in zip((metadata, master), started, strict=True):
                wait_for(port, process)
            yield f"http://127.0.0.1:{metadata}/metadata", f"127.0.0.1:{master}", started[1]
        finally:
            for process in started:
                kill(process)
