"""Guarded memory for kernels; for operators that move bytes: random bits, caches of odd strides, bitwise comparison."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pc.triton_ops._attention import build
from pc.triton_ops._attention.build import AttentionLaunch
from pc.triton_ops._core.cache import forget_choices
from pc.triton_ops._core.checks import debug_mode_enabled, set_debug_mode
from pc.triton_ops._core.runtime import INTERPRET

if INTERPRET:
    from guarded import guarded_memory

FOLDER = Path(__file__).parent
COMPILES = ("test_compile", "test_export", "test_inductor")
LAYOUTS = ("contiguous", "padded_features", "padded_blocks", "head_major", "every_second", "offset", "permuted")


def _random_bits(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).view(tuple(shape)).to(device)


def _strided(layout: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    num_blocks, block_size, *features = shape
    if layout == "contiguous":
        return _random_bits(shape, dtype, device)
    if layout == "padded_features":
        wide = _random_bits((num_blocks, block_size, *features[:-1], features[-1] + 3), dtype, device)
        return wide[..., : features[-1]]
    if layout == "padded_blocks":
        return _random_bits((num_blocks, block_size + 1, *features), dtype, device)[:, :block_size]
    if layout == "head_major":
        return _random_bits((num_blocks, features[0], block_size, *features[1:]), dtype, device).transpose(1, 2)
    if layout == "every_second":
        wide = _random_bits((num_blocks, block_size, *features[:-1], 2 * features[-1]), dtype, device)
        return wide[..., ::2]
    if layout == "offset":
        flat = _random_bits((math.prod(shape) + 1,), dtype, device)[1:]
        return flat.view(tuple(shape))
    assert layout == "permuted"
    order = list(range(len(shape)))[::-1]
    return _random_bits([shape[axis] for axis in order], dtype, device).permute(order)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` names
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the interpreter, mark tests slow that compile or export graphs, because operators' calls take long there."""
    for item in items if INTERPRET else ():
        if item.path.parent == FOLDER and getattr(item, "originalname", "").startswith(COMPILES):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _guarded_memory() -> Iterator[None]:
    """In the interpreter every access of a kernel is checked, and the programs of a launch run in random order."""
    with guarded_memory(0) if INTERPRET else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _forget_choices() -> Iterator[None]:
    """Forget launches before and after a test, so that its changes apply to all its calls and to no other test's."""
    forget_choices()
    yield
    forget_choices()


@pytest.fixture(autouse=True)
def _debug_mode_as_before() -> Iterator[None]:
    """Restore debug mode after a test."""
    before = debug_mode_enabled()
    yield
    set_debug_mode(before)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[AttentionLaunch]:
    """Return a list that gets the launches of attention calls, one for each kind."""
    found: list[AttentionLaunch] = []
    own = build._build_table_launch
    monkeypatch.setattr(build, "_build_table_launch", lambda *given: found.append(own(*given)) or found[-1])
    return found


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def random_bits(device: torch.device) -> Callable[..., torch.Tensor]:
    """random_bits(shape, dtype): a tensor of random bytes, NaN patterns included."""
    return lambda shape, dtype: _random_bits(shape, dtype, device)


@pytest.fixture
def strided(device: torch.device) -> Callable[..., torch.Tensor]:
    """strided(layout, shape, dtype): random bytes in one of LAYOUTS."""
    return lambda layout, shape, dtype: _strided(layout, shape, dtype, device)
