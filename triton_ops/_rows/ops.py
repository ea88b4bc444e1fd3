"""Gather and scatter by block number or slot, which differ in nothing but how many dimensions an index counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .._debug import reads_values
from .._triton import KERNELS_ON_CPU
from . import cpu, memory
from .checks import check_caches, check_index, check_range, check_reach, check_rows
from .transfer import move_rows

BLOCKS, SLOTS = 1, 2
_INDEX = {BLOCKS: ("block_ids", "[n]"), SLOTS: ("slot_mapping", "[num_tokens]")}


def on_host(*tensors: torch.Tensor) -> bool:
    """Whether PyTorch on the CPU serves these tensors."""
    return not KERNELS_ON_CPU and not any(t.is_cuda for t in tensors)


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


class Gather:
    """What a gather of rows by BLOCKS or SLOTS runs, from one cache and from several.

    Args:
        op: The operator's name, for errors.
        leading: BLOCKS or SLOTS.
    """

    def __init__(self, op: str, leading: int) -> None:
        self._op = op
        self._leading = leading

    def launch(self, cache: torch.Tensor, index: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """One cache, any device."""
        return _gather(self._op, "cache", [cache], index, self._leading, device)[0]

    def launch_list(
        self, caches: Sequence[torch.Tensor], index: torch.Tensor, device: torch.device | None = None
    ) -> list[torch.Tensor]:
        """Several caches, any device."""
        return _gather(f"{self._op}_list", "caches", caches, index, self._leading, device)

    def cpu(self, cache: torch.Tensor, index: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """One cache in host memory."""
        rows = cpu.quick_gather(cache, self._leading, index) if device is None else None
        return self.launch(cache, index, device) if rows is None else rows

    def cpu_list(
        self, caches: Sequence[torch.Tensor], index: torch.Tensor, device: torch.device | None = None
    ) -> list[torch.Tensor]:
        """Several caches in host memory."""
        if device is not None or not _agree(caches):
            return self.launch_list(caches, index, device)
        found = (cpu.quick_gather(cache, self._leading, index) for cache in caches)
        return [self.launch_list([caches[i]], index)[0] if rows is None else rows for i, rows in enumerate(found)]

    def empty(self, cache: torch.Tensor, index: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
        """A result without data."""
        place = result_device(cache, index, None if device is None else torch.device(device))
        return cache.new_empty((index.shape[0], *cache.shape[self._leading :]), device=place)


class Scatter:
    """What a scatter of rows by BLOCKS or SLOTS runs, into one cache and into several; arguments as for `Gather`."""

    def __init__(self, op: str, leading: int) -> None:
        self._op = op
        self._leading = leading

    def launch(self, source: torch.Tensor, cache: torch.Tensor, index: torch.Tensor) -> None:
        """One cache, any device."""
        _scatter(self._op, ("source", "cache"), [source], [cache], index, self._leading)

    def launch_list(self, sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], index: torch.Tensor) -> None:
        """Several caches, any device."""
        _scatter(f"{self._op}_list", ("sources", "caches"), sources, caches, index, self._leading)

    def cpu(self, source: torch.Tensor, cache: torch.Tensor, index: torch.Tensor) -> None:
        """One cache in host memory."""
        if not cpu.quick_scatter(source, cache, self._leading, index):
            self.launch(source, cache, index)

    def cpu_list(self, sources: Sequence[torch.Tensor], caches: Sequence[torch.Tensor], index: torch.Tensor) -> None:
        """Several caches in host memory."""
        leading = self._leading
        pairs = list(zip(sources, caches, strict=False))
        # All are looked at before the first is written: what is refused changes nothing.
        if (
            len(sources) != len(caches)
            or not _agree(caches)
            or not all(cpu.fits(*pair, leading, index) for pair in pairs)
        ):
            self.launch_list(sources, caches, index)
            return
        left = [(source, cache) for source, cache in pairs if not cpu.quick_scatter(source, cache, leading, index)]
        if left:
            self.launch_list([source for source, _ in left], [cache for _, cache in left], index)
