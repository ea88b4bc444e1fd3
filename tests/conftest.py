"""Shared fixtures: seeds, NaN-filled `torch.empty`, and skips for missing packages and devices."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import logging
import os
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import pc  # noqa: F401  registers torch.ops.pc
from pc.triton_ops._core.runtime import HAS_TRITON, INTERPRET, KERNELS_ON_CPU

HAS_GPU = torch.cuda.is_available()
for _kind in (torch.cuda, torch.xpu, torch.mtia):
    if not _kind.is_available():  # `torch.manual_seed` would keep a traceback for each, which takes milliseconds
        _kind.manual_seed_all = lambda seed: None
gc.disable()  # until all modules are imported


def pytest_collection_finish() -> None:
    """Leave the million objects of imported modules out of garbage collections, which frameworks ask for often."""
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


# Packages that tests import and this machine lacks. `make gpu` reads them and runs the other tests.
ABSENT = [
    name
    for name in ("hypothesis", "zmq", "msgpack", "prometheus_client", "matplotlib", "mkdocs", "xxhash", "transformers")
    if os.environ.get("PC_BARE") and not importlib.util.find_spec(name)
]


class _LeftOut(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Leave out modules that import a missing package, also files that the command line names."""
    needs = re.compile(rf"^(?:from|import) (?:{'|'.join(ABSENT)})\b", re.MULTILINE)
    left_out = bool(ABSENT) and needs.search(module_path.read_text(encoding="utf-8"))
    return _LeftOut.from_parent(parent, path=module_path) if left_out else None


def pytest_report_header() -> str | None:
    return f"files that import {', '.join(ABSENT)} are left out" if ABSENT else None


_QUICK: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()


def _mark_cases_slow(items: list[pytest.Item]) -> None:
    """Mark the cases of a test slow, except the first and the last.

    Tests that mark their cases themselves, or are marked `quick`, stay as they are. In Triton's interpreter, which
    takes a hundred times as long, only the first case is quick. A test with a parameter `operator` counts as a test of
    each operator.
    """
    cases: dict[tuple[str, str, str], list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("quick"):
            operator = str(item.callspec.params.get("operator"))
            cases.setdefault((item.parent.nodeid, item.originalname, operator), []).append(item)
    for group in cases.values():
        if not any(item.get_closest_marker("slow") for item in group):
            for item in group[1:] if INTERPRET else group[1:-1]:
                item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="files in random order, and the tests of each")


def _shuffle(items: list[pytest.Item], seed: str) -> None:
    """Shuffle files and the tests in them.

    A file's tests stay together, because they share objects made once a file.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    chance = random.Random(seed)
    groups = list(files.values())
    chance.shuffle(groups)
    for group in groups:
        chance.shuffle(group)
    items[:] = [item for group in groups for item in group]


@pytest.hookimpl(tryfirst=True)  # before pytest applies `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_cases_slow(items)
    config.stash[_QUICK] = [item for item in items if not item.get_closest_marker("slow")]
    share, count = map(int, os.environ.get("PC_SHARE", "0/1").split("/"))
    items[:] = items[share::count]
    if config.getoption("--shuffle"):
        _shuffle(items, config.getoption("--shuffle"))
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    no_kernel = pytest.mark.skip(reason="needs a GPU or TRITON_INTERPRET=1")
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(no_gpu)
        if item.get_closest_marker("interpreter") and not (KERNELS_ON_CPU or (HAS_GPU and HAS_TRITON)):
            item.add_marker(no_kernel)


@pytest.fixture
def quick_tests(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """The tests of `make test`, if all tests were collected."""
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        pytest.skip("asks about all tests")
    return pytestconfig.stash[_QUICK]


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


_MODES = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
)


@pytest.fixture(autouse=True)
def _torch_modes():
    """Restore torch's modes: an interrupt in the exit of `torch.no_grad` would leave its mode to later tests."""
    before = [get() for get, _ in _MODES]
    yield
    for (get, restore), mode in zip(_MODES, before, strict=True):
        if get() != mode:
            restore(mode)


_set_deterministic = torch._C._set_deterministic_algorithms  # torch's own function imports its compiler, for 2 s


@pytest.fixture(autouse=True)
def _nan_filled_empty():
    """Fill the tensors of `torch.empty` with NaN (integers: the largest value), so that reads of them show."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    _set_deterministic(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    _set_deterministic(deterministic)


@pytest.fixture
def plain_empty(_nan_filled_empty):
    """Leave `torch.empty` and its speed as they are, for tests of benchmarks."""
    _set_deterministic(False)


class _Errors(logging.Handler):
    """Collects the messages that are logged as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def _cache_errors(request: pytest.FixtureRequest):
    """Fail a test in which the manager logged an error of a policy or listener, since the manager continues then."""
    handler, log = _Errors(), logging.getLogger("pc.cache")
    log.addHandler(handler)
    yield handler.messages
    log.removeHandler(handler)
    if "cache_errors" not in request.fixturenames:
        assert not handler.messages, "an error was logged that the test did not ask for (fixture cache_errors)"


@pytest.fixture
def cache_errors(_cache_errors: list[str]) -> list[str]:
    """The cache's logged errors, for a test that makes a policy or listener fail on purpose."""
    return _cache_errors


@pytest.fixture(scope="session")
def trained_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, for `from_pretrained`. Skips if it is not available."""
    pytest.importorskip("transformers")
    from pc.demo import NoTrainedModelError, trained_model_folder

    try:
        return trained_model_folder()
    except NoTrainedModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of kernels in this session: the GPU, or the CPU (interpreter or reference)."""
    return torch.device("cuda" if HAS_GPU and not INTERPRET else "cpu")


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers already fill the cores

if importlib.util.find_spec("hypothesis"):  # a machine lent for its GPU may lack it
    from hypothesis import settings

    # CI uses the same examples each time; a developer's runs search for new ones.
    settings.register_profile("ci", derandomize=True)
    if os.environ.get("CI"):
        settings.load_profile("ci")
