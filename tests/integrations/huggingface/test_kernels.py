"""Kernels are checked once before they serve a model, and a wrong kernel serves no model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_cases import plain, prompt
from graph_double import TapeCapturer
from processes import in_threads

from pc.integrations.huggingface import UnsupportedError, enable_continuous_batching, enable_prefix_caching
from pc.integrations.huggingface.runners import graphs
from pc.triton_ops._core.runtime import INTERPRET
from pc.triton_ops._verify import Row, Shape, remembered

CPU = torch.device("cpu")
RIGHT = Row("paged_attention", "float32, decode", 1e-7, 1e-6, 0.1, "")
WRONG = Row("sliding_window_attention", "float32, chunk", 0.5, 1e-6, 0.1, "the result is off by 0.5")


@pytest.fixture
def cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache directory of the user, in a process that has checked no kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered.forget_checks()
    yield tmp_path
    remembered.forget_checks()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, cache_home: Path) -> Callable[..., list[str]]:
    """A function that lets packed passes run on the CPU. `rows` are the results of checks; it lists the checks run."""

    def make(*rows: Row) -> list[str]:
        ran: list[str] = []

        def check(device: torch.device, small: Shape, uses: tuple[str, ...]) -> list[Row]:
            ran.extend(uses)
            return list(rows)

        monkeypatch.setitem(graphs.CAPTURERS, "cpu", TapeCapturer)
        monkeypatch.setattr(remembered, "runs_kernels", lambda device: True)
        monkeypatch.setattr(remembered, "check_kernels", check)
        return ran

    return make


def engine(handle: Any) -> Any:
    return handle._engine


@pytest.mark.filterwarnings("error")
def test_right_kernels_serve_and_are_checked_once(model: Any, device: Any, cache_home: Path) -> None:
    ran = device(RIGHT)
    for _ in range(2):
        with enable_prefix_caching(model, cuda_graphs=False) as handle:
            assert engine(handle)._steps is not None
    assert ran == ["packed"]
    remembered.forget_checks()  # like another process
    with enable_prefix_caching(model, cuda_graphs=False):
        assert ran == ["packed"]
    files = list((cache_home / "pc" / "checked").iterdir())
    assert len(files) == 1
    files[0].unlink()
    remembered.forget_checks()
    with enable_prefix_caching(model, cuda_graphs=False):
        assert ran == ["packed", "packed"]


def test_a_wrong_kernel_is_named_and_pytorch_serves(model: Any, device: Any, cache_home: Path) -> None:
    ran = device(RIGHT, WRONG)
    expected = plain(model, input_ids=prompt(50), max_new_tokens=6)
    named = r"pc\.sliding_window_attention is wrong on cpu \(float32, chunk: .*off by 0\.5; run `python -m pc check`\)"
    with pytest.warns(UserWarning, match=named) as told:
        handle = enable_prefix_caching(model)
    assert len(told) == 1
    assert engine(handle)._steps is None
    assert "sliding_window_attention" in handle.graphs.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.equal(model.generate(prompt(50), max_new_tokens=6), expected)
    assert handle.last_requests[0].cached_tokens == 48
    assert handle.unsupported is None
    handle.disable()
    with pytest.warns(UserWarning, match=named):
        enable_prefix_caching(model).disable()
    assert ran == ["packed"], "a fault is remembered by this process"
    assert not (cache_home / "pc").exists(), "and by no other"


def test_batching_is_refused_by_the_kernels_name(model: Any, device: Any) -> None:
    device(WRONG)
    with pytest.raises(UnsupportedError, match=r"pc\.sliding_window_attention is wrong on cpu"):
        enable_continuous_batching(model)


def test_moved_text_and_documents_do_without_a_wrong_kernel(model: Any, device: Any) -> None:
    ran = device(WRONG)
    with pytest.warns(UserWarning, match=r'sliding_window_attention is wrong .* reuse="gap"'):
        handle = enable_prefix_caching(model, reuse="anywhere")
    expected = plain(model, input_ids=prompt(50), max_new_tokens=6)
    assert torch.equal(model.generate(prompt(50), max_new_tokens=6), expected)
    with pytest.raises(ValueError, match=r"cannot read documents, because .*sliding_window_attention is wrong"):
        handle.compress(prompt(40))
    assert ran == ["moved", "documents"]
    handle.disable()


@pytest.mark.filterwarnings("error")
def test_only_what_is_used_is_checked(model: Any, device: Any) -> None:
    ran = device(WRONG)
    for options in ({"reuse": "gap"}, {"deterministic": True}):
        enable_prefix_caching(model, **options).disable()
    assert ran == []


def test_without_kernels_nothing_runs(model: Any, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRET:
        pytest.skip("kernels run here")
    monkeypatch.setitem(graphs.CAPTURERS, "cpu", TapeCapturer)
    monkeypatch.setattr(remembered, "check_kernels", lambda *args, **given: pytest.fail("nothing to check"))
    with enable_prefix_caching(model, cuda_graphs=False) as handle:
        assert engine(handle)._steps is not None
    assert list(cache_home.iterdir()) == []


def test_the_result_holds_for_versions_device_and_layers(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = device(RIGHT)
    for shape, use in ((Shape(), "packed"), (Shape(head_dim=64), "packed"), (Shape(), "moved")):
        for _ in range(2):
            assert remembered.first_fault(CPU, shape, use) is None
    assert len(ran) == 3
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert remembered.first_fault(CPU, Shape(), "packed") is None
    monkeypatch.setattr(remembered, "_code", lambda: "another")
    assert remembered.first_fault(CPU, Shape(), "packed") is None
    assert len(ran) == 5


@pytest.mark.parametrize("home", ["/proc/none", "relative", ""])
def test_a_directory_that_cannot_be_written_is_no_error(
    home: str, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = device(RIGHT)
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", "/proc/none")
    for _ in range(2):
        assert remembered.first_fault(CPU, Shape(), "packed") is None
    assert ran == ["packed"]


def test_threads_check_once(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device(RIGHT)
    ran: list[int] = []

    def slowly(*args: object, **given: object) -> list[Row]:
        time.sleep(0.05)
        ran.append(1)
        return [RIGHT]

    monkeypatch.setattr(remembered, "check_kernels", slowly)
    assert in_threads(lambda shape: remembered.first_fault(CPU, shape, "packed"), *[Shape()] * 8) == [None] * 8
    assert ran == [1]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRET, reason="starts processes of its own")
def test_kernels_run_in_the_interpreter_and_other_processes_remember(tmp_path: Path) -> None:
    """Run packed passes in Triton's interpreter in two processes, of which only the first checks kernels."""
    code = """
import warnings
warnings.simplefilter("error")
from generate_cases import LLAMA
from graph_double import TapeCapturer
from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.runners import graphs
from pc.triton_ops._verify import remembered
graphs.CAPTURERS["cpu"] = TapeCapturer
check, ran = remembered.check_kernels, []
remembered.check_kernels = lambda *args, **given: ran.extend(check(*args, **given)) or ran
model = LLAMA.build()
with enable_prefix_caching(model, cuda_graphs=False) as handle:
    print(handle._engine._steps is not None, len(ran), all(row.ok for row in ran))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(["tests/support", *sys.path])
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said == [["True", "4", "True"], ["True", "0", "True"]]
