"""Launches that skip triton's work per launch pass what triton would, to the kernel that triton would choose."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch

from pc.triton_ops._attention import build
from pc.triton_ops._attention.constants import Architecture
from pc.triton_ops._copy import launch as rows
from pc.triton_ops._core.cache import forget_choices
from pc.triton_ops._core.runtime import HAS_TRITON, INTERPRET

needs_compiler = pytest.mark.skipif(
    INTERPRET or not HAS_TRITON or torch.version.hip is not None, reason="compiles for CUDA, so not in the interpreter"
)


class _Driver:
    """The part of a Triton driver that compiles for an H100 and records launches."""

    hooks: ClassVar[list[object]] = []

    def __init__(self):
        self.launches = []
        self.launcher_cls = lambda source, metadata: functools.partial(self._launch, source.fn)
        self.utils = self

    def _launch(self, function, *arguments):
        # Grid, stream, handle, metadata and hooks come before the kernel's own arguments.
        self.hooks.append(arguments[7])
        self.launches.append((arguments[:3], arguments[4], arguments[-len(function.arg_names) :]))

    def load_binary(self, name, binary, shared, device):
        return None, binary, 128, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232_448}

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 4242  # Triton caches kernels by device; this is no real one

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def launches(monkeypatch):
    """Return a list that gets the launches, each as grid, kernel and arguments."""
    from triton.runtime import driver

    fake, active = _Driver(), driver._active
    monkeypatch.setattr(build, "architecture", lambda device: Architecture("sm_90", 132, True))
    forget_choices()
    driver.set_active(fake)
    yield fake.launches
    driver._active = active
    forget_choices()


def on_device(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run an operator's kernel for device tensors, as the dispatcher does, on CPU tensors."""
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return getattr(torch.ops.pc, name).default.redispatch(cuda, *args, **kwargs)


def _attention_call(misaligned: bool = False, num_seqs: int = 2, head_dim: int = 64) -> dict[str, Any]:
    elements = torch.zeros(num_seqs * 8 * head_dim + 8, dtype=torch.float16)[misaligned:]
    cache = torch.zeros(4, 16, 2, head_dim, dtype=torch.float16)
    return {
        "query": elements[: num_seqs * 8 * head_dim].view(num_seqs, 8, head_dim),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "block_tables": torch.zeros(num_seqs, 32, dtype=torch.int32),
        "seq_lens": torch.full((num_seqs,), 512, dtype=torch.int32),
        "query_start_loc": torch.arange(num_seqs + 1, dtype=torch.int32),
        "scale": 0.125,
        "max_query_len": 1,
    }


def _same(one, other) -> bool:
    """Return whether two arguments are equal tensors or equal values."""
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "data_ptr"):
        return one.dtype == other.dtype and one.data_ptr() % 16 == other.data_ptr() % 16
    return one == other


@needs_compiler
@pytest.mark.slow
def test_second_launch_is_that_of_triton(launches):
    """The plan's two kernels, the attention kernel and the merge are launched first by Triton, then without it."""
    for call in (_attention_call(), _attention_call()):
        on_device("paged_attention_with_lse", **call)
    first, second = launches[:4], launches[4:]
    assert len(second) == 4
    for (grid, kernel, arguments), (again, same_kernel, others) in zip(first, second, strict=True):
        assert again == grid
        assert same_kernel is kernel
        assert len(arguments) == len(others)
        assert all(map(_same, arguments, others))
    # The second call's tensors were passed, not those of the first.
    assert not {t.data_ptr() for t in first[2][2][:3]} & {t.data_ptr() for t in second[2][2][:3]}


@needs_compiler
@pytest.mark.slow
def test_addresses_that_are_not_aligned_get_another_kernel(launches):
    for misaligned in (False, True, False, True):
        on_device("paged_attention_with_lse", **_attention_call(misaligned))
    kernels = [kernel for _, kernel, _ in launches[2::4]]
    assert kernels[0] is kernels[2]
    assert kernels[1] is kernels[3]
    assert kernels[0] is not kernels[1]


@needs_compiler
def test_cache_write_reuses_its_kernel_for_the_same_metadata_only(launches):
    key = torch.zeros(3, 2, 64, dtype=torch.float16)
    cache = torch.zeros(4, 16, 2, 64, dtype=torch.float16)
    slots = torch.arange(3)
    for new in (key, key.clone(), key.bfloat16()):
        caches = cache.to(new.dtype), cache.to(new.dtype).clone()
        on_device("reshape_and_cache", new, new, *caches, slots)
        assert launches[-1][2][2] is caches[0]
    kernels = [kernel for _, kernel, _ in launches]
    assert kernels[0] is kernels[1]
    assert kernels[0] is not kernels[2]


@needs_compiler
def test_moved_rows_reuse_their_kernel_for_addresses_aligned_alike(launches):
    def move(offset, dtype=torch.int16):
        caches = [
            torch.zeros(4 * 16 * 8 + 8, dtype=dtype)[offset:-8].view(-1)[: 3 * 16 * 8].view(3, 16, 8) for _ in "ab"
        ]
        outs = [torch.empty(5, 8, dtype=dtype) for _ in caches]
        rows.launch_move_rows("rows", caches, outs, (2, 1), 5, source_index=torch.arange(5))
        grid, kernel, arguments = launches[-1]
        assert [t.data_ptr() for t in arguments[0]] == [t.data_ptr() for t in caches]
        assert [t.data_ptr() for t in arguments[2]] == [t.data_ptr() for t in outs]
        return grid, kernel, arguments

    first, again, other = move(0), move(0), move(1)
    assert first[:2] == again[:2]
    assert all(map(_same, first[2], again[2]))
    assert other[1] is not first[1]
    assert [str(t.dtype) for t in other[2][0]] == ["int16", "int16"]
    assert move(1)[1] is other[1]


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
