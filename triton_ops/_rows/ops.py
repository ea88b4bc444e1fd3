"""Gather and scatter by block number or slot, which differ in nothing but how many dimensions an index counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from .._debug import reads_values
from .._library import define
from .._triton import KERNELS_ON_CPU
from . import cpu, memory
from .checks import check_caches, check_index, check_range, check_reach, check_rows
from .transfer import move_rows

BLOCKS, SLOTS = 1, 2
_INDEX = {BLOCKS: ("block_ids", "[n]"), SLOTS: ("slot_mapping", "[num_tokens]")}


def on_host(*tensors: torch.Tensor) -> bool:
    """Whether PyTorch on the CPU serves these tensors."""
    return not KERNELS_ON_CPU and not any(t.is_cuda for t in tensors)


_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)


def is_plain(*tensors: object) -> bool:
    """Whether the CPU's function may be called without the dispatcher, whose way to it costs as much as a few rows.

    Not under a compiler or a mode that looks on, nor for tensors that are another class's or on a device.
    """
    if KERNELS_ON_CPU or torch.compiler.is_compiling() or _modes is None or _modes():
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator costs as much as the rest
        if type(tensor) is not torch.Tensor or not tensor.is_cpu:
            return False
    return True


def lowest_entry(name: str, index: torch.Tensor, limit: int) -> int:
    """Checks the range of an index and gives its lowest entry; 0 on a device, where that waits, but in debug mode."""
    if not reads_values(index):
        return 0
    return check_range(name, index, limit)


def new_rows(cache: torch.Tensor, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """An empty result on `device`; pinned host memory when it is a device that will write it."""
    if device.type == "cpu" and cache.is_cuda:
        return torch.empty(tuple(shape), dtype=cache.dtype, pin_memory=True)
    return memory.empty(shape, cache.dtype, device)


def result_device(cache: torch.Tensor, index: torch.Tensor, device: torch.device | None) -> torch.device:
    """Where gathered rows go: as asked, else to the index's accelerator, else to the cache's device."""
    if device is not None:
        return device
    return index.device if index.is_cuda else cache.device


def _gather(
    op: str, name: str, caches: Sequence[torch.Tensor], index: torch.Tensor, leading: int, device: torch.device | None
) -> list[torch.Tensor]:
    check_caches(name, caches)
    index_name, layout = _INDEX[leading]
    check_index(index_name, index, layout)
    check_reach(name, caches[0], index, index_name)
    lowest = lowest_entry(index_name, index, math.prod(caches[0].shape[:leading]))
    device = result_device(caches[0], index, device)
    targets = [new_rows(cache, (index.shape[0], *cache.shape[leading:]), device) for cache in caches]
    if on_host(caches[0], index, targets[0]):
        for cache, target in zip(caches, targets, strict=True):
            cpu.gather_rows(cache, leading, index, target, lowest)
    else:
        move_rows(op, targets, caches, leading, index, to_cache=False)
    return targets


def _scatter(
    op: str,
    names: tuple[str, str],
    sources: Sequence[torch.Tensor],
    caches: Sequence[torch.Tensor],
    index: torch.Tensor,
    leading: int,
) -> None:
    check_caches(names[1], caches)
    index_name, layout = _INDEX[leading]
    check_index(index_name, index, layout)
    check_rows(names[0], sources, caches, index.shape[0], leading)
    check_reach(names[0], sources[0], index, index_name)
    check_reach(names[1], caches[0], index, index_name)
    lowest = lowest_entry(index_name, index, math.prod(caches[0].shape[:leading]))
    if on_host(sources[0], caches[0], index):
        for source, cache in zip(sources, caches, strict=True):
            cpu.scatter_rows(source, cache, leading, index, lowest)
    else:
        move_rows(op, sources, caches, leading, index, to_cache=True)


def _agree(caches: Sequence[torch.Tensor]) -> bool:
    """Whether there are caches, of the same blocks."""
    return len(caches) > 0 and all(cache.shape[:2] == caches[0].shape[:2] for cache in caches[1:])


def define_gather(op: str, leading: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Registers `op` and `op`_list, which gather rows of one or several caches by BLOCKS or SLOTS.

    Returns:
        What `op` runs on the CPU, for arguments that are plain.
    """
    index_name = _INDEX[leading][0]

    def run(cache: torch.Tensor, index: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        return _gather(op, "cache", [cache], index, leading, device)[0]

    def run_list(
        caches: Sequence[torch.Tensor], index: torch.Tensor, device: torch.device | None = None
    ) -> list[torch.Tensor]:
        return _gather(f"{op}_list", "caches", caches, index, leading, device)

    def run_quick(cache: torch.Tensor, index: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        rows = cpu.quick_gather(cache, leading, index) if device is None else None
        return run(cache, index, device) if rows is None else rows

    def run_list_quick(
        caches: Sequence[torch.Tensor], index: torch.Tensor, device: torch.device | None = None
    ) -> list[torch.Tensor]:
        if device is not None or not _agree(caches):
            return run_list(caches, index, device)
        found = (cpu.quick_gather(cache, leading, index) for cache in caches)
        return [run_list([caches[i]], index)[0] if rows is None else rows for i, rows in enumerate(found)]

    def fake(cache: torch.Tensor, index: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        place = result_device(cache, index, device)
        return cache.new_empty((index.shape[0], *cache.shape[leading:]), device=place)

    def fake_list(
        caches: Sequence[torch.Tensor], index: torch.Tensor, device: torch.device | None = None
    ) -> list[torch.Tensor]:
        return [fake(cache, index, device) for cache in caches]

    single, several = (
        f"(Tensor cache, Tensor {index_name}, Device? device=None) -> Tensor",
        f"(Tensor[] caches, Tensor {index_name}, Device? device=None) -> Tensor[]",
    )
    define(op, single, reference=run_quick, launcher=run, fake=fake)
    define(f"{op}_list", several, reference=run_list_quick, launcher=run_list, fake=fake_list)
    return run_quick


def define_scatter(op: str, leading: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Registers `op` and `op`_list, which scatter rows into one or several caches by BLOCKS or SLOTS.

    Returns:
        What `op` runs on the CPU, for arguments that are plain.
    """
    index_name = _INDEX[leading][0]

    def run(source: torch.Tensor, cache: torch.Tensor, index: torch.Tensor) -> None:
        _scatter(op, ("source", "cache"), [source], [cache], index, leading)

    def run_list(sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], index: torch.Tensor) -> None:
        _scatter(f"{op}_list", ("sources", "caches"), sources, caches, index, leading)

    def run_quick(source: torch.Tensor, cache: torch.Tensor, index: torch.Tensor) -> None:
        if not cpu.quick_scatter(source, cache, leading, index):
            run(source, cache, index)

    def run_list_quick(sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], index: torch.Tensor) -> None:
        pairs = list(zip(sources, caches, strict=False))
        # All are looked at before the first is written: what is refused changes nothing.
        if (
            len(sources) != len(caches)
            or not _agree(caches)
            or not all(cpu.fits(*pair, leading, index) for pair in pairs)
        ):
            run_list(sources, caches, index)
            return
        left = [(source, cache) for source, cache in pairs if not cpu.quick_scatter(source, cache, leading, index)]
        if left:
            run_list([source for source, _ in left], [cache for _, cache in left], index)

    single, several = (
        f"(Tensor source, Tensor(a!) cache, Tensor {index_name}) -> ()",
        f"(Tensor[] sources, Tensor(a!)[] caches, Tensor {index_name}) -> ()",
    )
    define(op, single, reference=run_quick, launcher=run, fake=_nothing)
    define(f"{op}_list", several, reference=run_list_quick, launcher=run_list, fake=_nothing)
    return run_quick


def _nothing(*args: object, **kwargs: object) -> None:
    return None
