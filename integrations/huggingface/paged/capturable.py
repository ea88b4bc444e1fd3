"""Whether decode steps of a model can be captured: by what it looks like, and by what one of its steps does."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..support import rope_types

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index.Tensor,
)


def why_eager(model: Any) -> str | None:
    """Why decode steps of a model cannot be captured as it is now; None when nothing is known to speak against it."""
    device = model.device
    if any(t.device != device for t in itertools.chain(model.parameters(), model.buffers())):
        return f"some of the model is not on {device}"
    kinds = sorted({"dynamic", "longrope"} & rope_types(model.config))
    if kinds:
        return f"{kinds[0]} rotary embeddings change with the length"
    if torch_module._has_any_global_hook():
        return "a hook on all modules is registered"
    for name, m in model.named_modules():
        if m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m):
            return f"{name or 'the model'} has a hook or a forward of its own"
    return None


def baked_in(model: Any) -> object:
    """What a captured step depends on besides weights and adapters; equal as long as that is the same."""
    return (
        [(id(buffer), buffer.data_ptr()) for buffer in model.buffers()],
        str(model.config.to_dict()),
        getattr(model.config, "_experts_implementation", None),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


class Rehearsal(TorchDispatchMode):
    """Runs operators as they are and notes the first that makes the host wait for the device or read from it.

    A capture that meets one fails half-way; a rehearsed step is still right.

    Attributes:
        problem: What it does; None while there is nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator and looks at it."""
        result = func(*args, **(kwargs or {}))
        if self.problem is None:
            self.problem = _problem(func, (args, kwargs), result)
        return result


def _problem(func: Any, arguments: Any, result: Any) -> str | None:
    if torch.Tag.data_dependent_output in func.tags:
        return f"{func} reads a value from the device"
    tensors = [t for t in tree_leaves((arguments, result)) if isinstance(t, torch.Tensor)]
    masks = func in _INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(arguments[0][1:2]))
    if masks or (torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXING):
        return f"{func} has a result whose shape depends on values"
    # A scalar on the host is an argument of a kernel, unless it is what is copied.
    devices = {t.device for t in tensors if t.dim() or func in _COPIES}
    return f"{func} copies between {', '.join(sorted(map(str, devices)))}" if len(devices) > 1 else None
