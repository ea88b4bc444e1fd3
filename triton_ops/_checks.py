"""Argument errors that name the argument, what it got and what it needs."""

from __future__ import annotations

import torch


def bad_argument(name: str, got: object, needs: str, error: type[Exception] = ValueError) -> Exception:
    """The error to raise for argument `name`; call it only once a check has failed, since it formats text."""
    return error(f"{name}: got {got}, needs {needs}")


def describe(tensor: object) -> str:
    """Shape, dtype and device of a tensor, or the type of anything else, in a few words for an error."""
    if not isinstance(tensor, torch.Tensor):
        return "None" if tensor is None else type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


def check_tensor(
    name: str,
    value: object,
    ndim: int,
    layout: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Checks type, rank, dtype and device of a tensor argument, from metadata alone.

    Raises:
        TypeError: Not a tensor, or a dtype outside `dtypes`.
        ValueError: Another rank than `ndim` (described by `layout`), or another device.
    """
    if not isinstance(value, torch.Tensor):
        raise bad_argument(name, describe(value), f"a tensor {layout}", TypeError)
    if value.dim() != ndim:
        raise bad_argument(name, f"shape {list(value.shape)}", layout)
    if value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise bad_argument(name, describe(value), f"dtype {names}", TypeError)
    if device is not None and value.device != device:
        raise bad_argument(name, f"device {value.device}", f"device {device}")


def refuse_grad(**tensors: torch.Tensor | None) -> None:
    """Raises RuntimeError for a tensor that requires grad while grad mode is on: these operators have no backward."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise bad_argument(
                name, "a tensor that requires grad", "torch.no_grad() or .detach(), there is no backward", RuntimeError
            )
