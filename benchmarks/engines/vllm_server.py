"""vLLM's OpenAI server in a separate process, for benchmarks and tests: start it, ask it over HTTP, end it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pc.demo import trained_model_folder

NEEDED = (
    *("fastapi", "uvicorn", "watchfiles", "prometheus_fastapi_instrumentator", "model_hosting_container_standards"),
    "setproctitle",
)
"""Packages that the server imports beside the engine, and the one that names its processes (`Server.processes`)."""
MODEL = "SmolLM2-135M-Instruct"
"""Name of the trained model in requests."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
START_SECONDS, ANSWER_SECONDS = 900, 3600


class Server:
    """A running server.

    Attributes:
        url: The server's address, without a path.
        log: File of its output so far.
        process: The API server's process; the engine and its workers are below it.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        """Return the server's answer to GET."""
        with urllib.request.urlopen(self.url + path, timeout=600) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: Mapping[str, Any] | None = None, **headers: str) -> Any:
        """Return the server's answer to POST, decoded from JSON, or None if it is empty; raises HTTPError."""
        head = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, json.dumps(body or {}).encode(), head)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; `vllm:` may be left out of its name."""
        found = re.findall(rf"^(?:vllm:)?{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics"), re.M)
        if not found:
            raise ValueError(f"name: got {name!r}, needs one of the server's metrics")
        return sum(map(float, found))

    def processes(self) -> dict[str, int]:
        """Return the ids of the processes below the API server, by the names that vLLM gives them."""
        found: dict[str, int] = {}
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        known = {self.process.pid}
        for line in sorted(listed.splitlines()[1:], key=lambda line: int(line.split()[0])):
            pid, parent, name = line.split(None, 2)
            if int(parent) in known:
                known.add(int(pid))
                found[name.split()[0].removeprefix("VLLM::")] = int(pid)
        return found

    def end(self) -> None:
        """End the server and all processes that it started."""
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Return a port of this machine that nothing listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(model: str, options: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it when the block is left.

    Args:
        model: Folder of the model.
        options: Options of vLLM's command line.
        variables: Variables of the environment, added to this process's own without `PC_VLLM*`. By default the server
            has this process's number of threads.

    Raises:
        RuntimeError: The server ended, or did not answer within some minutes; the message has the end of its log.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PC_VLLM")}
    own |= ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    own |= {"OMP_NUM_THREADS": str(torch.get_num_threads())} | dict(variables or {})  # as the rows say
    # The `vllm` command looks for a distribution of that name. CPU builds by other projects have another name.
    with started("vllm.entrypoints.openai.api_server", ["--model", model, *options], own) as server:
        yield server


@contextlib.contextmanager
def started(module: str, options: Sequence[str], variables: Mapping[str, str]) -> Iterator[Server]:
    """Start the server of a Python module with these variables as its environment; otherwise as `serving`."""
    port = free_port()
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True, cwd=folder
            )
        server = Server(process, port, log)
        try:
            _wait_until_it_answers(server)
            yield server
        finally:
            server.end()


@contextlib.contextmanager
def serving_all(variables: Mapping[str, Mapping[str, str]], **options: object) -> Iterator[dict[str, Server]]:
    """Start servers of the trained model side by side.

    Args:
        variables: Variables of the environment, by the name of a server.
        options: Options of all servers' command lines, such as `max_num_seqs=4`.

    Raises:
        RuntimeError: A server does not answer; or our eviction is not on where `PC_VLLM` is set, or on elsewhere.
    """
    common = ["--served-model-name", MODEL, "--enforce-eager", "--disable-uvicorn-access-log"]
    for option, value in options.items():
        common += [f"--{option.replace('_', '-')}", str(value)]
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, given in variables.items():
            servers[name] = stack.enter_context(serving(str(trained_model_folder()), common, given))
            if ("eviction (" in servers[name].log.read_text()) != ("PC_VLLM" in given):
                raise RuntimeError("PC_VLLM: the server's log does not name the features that were set")
        yield servers


def _wait_until_it_answers(server: Server) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server does not answer:\n{server.log.read_text(errors='replace')[-4000:]}")
