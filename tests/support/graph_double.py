"""A double of CUDA graphs for CPUs. It records operators at capture and runs them again at replay, on the same tensors.

As in a CUDA graph, a number that the host passed to an operator at capture stays the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Tape(TorchDispatchMode):
    """Records every operator with its arguments and result."""

    def __init__(self) -> None:
        super().__init__()
        self.taped: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.taped.append((func, args, kwargs or {}, result))
        return result


class TapeCapturer:
    """A capturer for CPU tensors. A replay overwrites the results of all others with NaN, since graphs share memory."""

    def __init__(self, device: torch.device) -> None:
        self.results: list[torch.Tensor] = []

    def warm(self, step: Any) -> torch.Tensor:
        return step()

    def capture(self, step: Any) -> Any:
        with Tape() as tape:
            result = step()
        result.fill_(torch.nan)  # a capture computes nothing
        self.results.append(result)

        def replay() -> torch.Tensor:
            now: dict[int, torch.Tensor] = {}

            def current(value: Any) -> Any:
                return now.get(id(value), value)

            for func, args, kwargs, before in tape.taped:
                after = func(*tree_map(current, args), **tree_map(current, kwargs))
                for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                    if isinstance(old, torch.Tensor):
                        now[id(old)] = new
            computed = now[id(result)].clone()
            for other in self.results:
                other.fill_(torch.nan)
            return result.copy_(computed)

        return replay


class FailingCapturer(TapeCapturer):
    """A capturer that runs the step and then raises."""

    attempts = 0

    def capture(self, step: Any) -> Any:
        FailingCapturer.attempts += 1
        super().capture(step)
        raise RuntimeError("out of luck")
