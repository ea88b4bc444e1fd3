"""Outputs of a step that are no rows of tokens: copied to the host, and dealt out to its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Leftover:
    """A copy of outputs, since the next step may write over them; of a device without waiting for it.

    Args:
        outputs: By name: tensors of any shape, and mappings, lists and tuples of them.
    """

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self._copied: list[torch.device] = []
        self._values = {name: self._copy(value) for name, value in outputs.items()}
        self._ready = None
        if self._copied:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._copied[0]))

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if not value.is_cuda:
                return value.to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._copied.append(value.device)
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            return host.copy_(value, non_blocking=True)
        if isinstance(value, Mapping):
            return {key: self._copy(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._copy(each) for each in value]
        return tuple(self._copy(each) for each in value) if isinstance(value, tuple) else value

    def split(self, spans: Mapping[str, tuple[int, int]], requests: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The part of each request, by vLLM-Omni's own rule; of a tensor with a row for each token its rows."""
        if not self._values:
            return {}
        from vllm_omni.utils.mm_outputs import to_payload_element

        if self._ready is not None:
            self._ready.synchronize()
        order, total = list(spans), sum(end - begin for begin, end in spans.values())
        return {
            name: {
                request: to_payload_element(
                    value,
                    order.index(request),
                    start=spans[request][0],
                    end=spans[request][1],
                    pass_lists_through=True,
                    seq_len=total,
                )
                for request in requests
            }
            for name, value in self._values.items()
        }
