"""Debug mode: checks that read tensor values on the device, at the price of a synchronization per call."""

from __future__ import annotations

import os

import torch

_enabled = os.environ.get("PC_DEBUG", "0").lower() in ("1", "true", "yes", "on")


def debug_mode_enabled() -> bool:
    """Whether operators on device tensors check the values of block tables, lengths and slots."""
    return _enabled


def set_debug_mode(enabled: bool) -> None:
    """Turns value checks on device tensors on or off; the environment variable PC_DEBUG=1 starts with them on.

    On CPU tensors the checks always run, because reading there needs no synchronization.

    Examples:
        >>> pc.set_debug_mode(True)  # operators on a GPU now refuse a block number that is out of range
        >>> pc.set_debug_mode(False)
    """
    global _enabled
    _enabled = bool(enabled)


def reads_values(tensor: torch.Tensor) -> bool:
    """Whether values may be read to be checked: on the CPU they are free, on a device that synchronizes."""
    return _enabled or tensor.is_cpu
