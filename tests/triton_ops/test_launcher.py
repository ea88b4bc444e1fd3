"""Launches that skip triton's work per launch pass what triton would, to the kernel that triton would choose."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels.launches import TARGETS, Driver, on_device, patched
from pc.triton_ops._attention.constants import architecture
from pc.triton_ops._copy import launch as rows
from pc.triton_ops._core.cache import forget_choices
from pc.triton_ops._core.runtime import INTERPRET

needs_compiler = pytest.mark.skipif(
    INTERPRET or torch.version.hip is not None, reason="compiles for CUDA, so not in the interpreter"
)


class _Driver(Driver):
    """A driver that records launches, each as grid, kernel and arguments."""

    hooks: ClassVar[list[object]] = []

    def __init__(self):
        super().__init__("sm_90")
        self.launches = []
        self.launcher_cls = lambda source, metadata: functools.partial(self._launch, source.fn)

    def _launch(self, function, *arguments):
        # Grid, stream, handle, metadata and hooks come before the kernel's own arguments.
        self.hooks.append(arguments[7])
        self.launches.append((arguments[:3], arguments[4], arguments[-len(function.arg_names) :]))

    def load_binary(self, name, binary, shared, device):
        return None, binary, 128, 0, 1024


@pytest.fixture
def launches():
    """Return a list that gets the launches."""
    from triton.runtime import driver

    fake, active = _Driver(), driver._active
    forget_choices()
    driver.set_active(fake)
    with patched(architecture, lambda device: TARGETS["sm_90"].architecture):
        yield fake.launches
    driver._active = active
    forget_choices()


def _same(one, other) -> bool:
    """Return whether two arguments are equal tensors or equal values."""
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "data_ptr"):
        return one.dtype == other.dtype and one.data_ptr() % 16 == other.data_ptr() % 16
    return one == other


Call = Callable[[int, torch.dtype], None]


def _tensor(offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor that begins `offset` elements after an aligned address."""
    return torch.zeros(math.prod(shape) + 8, dtype=dtype)[offset : math.prod(shape) + offset].view(shape)


def _attend(offset: int, dtype: torch.dtype) -> None:
    cache = torch.zeros(4, 16, 2, 64, dtype=dtype)
    tables, lens = torch.zeros(2, 32, dtype=torch.int32), torch.full((2,), 512, dtype=torch.int32)
    batch = (cache, cache.clone(), tables, lens, torch.arange(3, dtype=torch.int32))
    on_device("paged_attention_with_lse", _tensor(offset, dtype, 2, 8, 64), *batch, 0.125, max_query_len=1)


def _write(offset: int, dtype: torch.dtype) -> None:
    key, cache = _tensor(offset, dtype, 3, 2, 64), torch.zeros(4, 16, 2, 64, dtype=dtype)
    on_device("reshape_and_cache", key, key, cache, cache.clone(), torch.arange(3))


def _move(offset: int, dtype: torch.dtype) -> None:
    caches, outs = ([_tensor(offset * k, dtype, *shape) for _ in "ab"] for k, shape in ((1, (3, 16, 8)), (0, (5, 8))))
    rows.launch_move_rows("rows", caches, outs, (2, 1), 5, source_index=torch.arange(5))


# The plan's two kernels, the attention kernel and the merge; one kernel each for the others.
CALLS: dict[str, tuple[Call, int, int]] = {"attention": (_attend, 4, 2), "write": (_write, 1, 0), "rows": (_move, 1, 0)}


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a launch's arguments, which may be in tuples."""
    for value in values:
        if isinstance(value, tuple):
            yield from tensors_in(value)
        elif hasattr(value, "data_ptr"):
            yield value


@needs_compiler
@pytest.mark.parametrize("name", ["write", "rows", pytest.param("attention", marks=pytest.mark.slow)])
def test_a_repeated_call_launches_what_triton_would(name, launches):
    """Triton launches the first call of a kind, and later calls go around it. Other kinds get other kernels."""
    call, count, which = CALLS[name]
    kinds = [(0, torch.float16), (0, torch.float16), (1, torch.float16), (0, torch.float32), (1, torch.float16)]
    for kind in kinds:
        call(*kind)
    first, again, misaligned, other, misaligned_again = (
        launches[begin : begin + count] for begin in range(0, len(kinds) * count, count)
    )
    for one, same in ((first, again), (misaligned, misaligned_again)):
        for (grid, kernel, arguments), (same_grid, same_kernel, others) in zip(one, same, strict=True):
            assert same_grid == grid
            assert same_kernel is kernel
            assert len(arguments) == len(others)
            assert all(map(_same, arguments, others))
    assert len({id(one[which][1]) for one in (first, misaligned, other)}) == 3
    addresses = [{t.data_ptr() for t in tensors_in(one[which][2])} for one in (first, again)]
    assert not addresses[0] & addresses[1], "the second call's tensors were passed, not those of the first"


@needs_compiler
def test_a_profiler_hears_of_every_launch(launches):
    from triton import knobs

    def hear(metadata):
        raise AssertionError("the driver of this test calls no hook")

    def enter_hooks():
        key, cache = torch.zeros(3, 2, 64), torch.zeros(4, 16, 2, 64)
        on_device("reshape_and_cache", key, key.clone(), cache, cache.clone(), torch.arange(3))
        return list(getattr(_Driver.hooks[-1], "calls", []))

    assert enter_hooks() == enter_hooks() == []
    knobs.runtime.launch_enter_hook.add(hear)
    try:
        assert enter_hooks() == [hear]
    finally:
        knobs.runtime.launch_enter_hook.remove(hear)
    assert _Driver.hooks[-2] is None, "without a profiler the launch is the short one"
