"""What the KV of a prompt depends on besides its tokens: weights, modules, adapters."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLED = 16
"""Elements of each weight that are compared before a call."""


def fingerprint(model: Any) -> int:
    """Changes when a weight is written to, replaced or moved, or a module gets a hook: other KV must not be read.

    What is written past autograd (`weight.data += delta`, as in merging an adapter) shows in a sample of each weight.
    """
    parts: list[Any] = []
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    with torch.no_grad():
        for p in model.parameters():
            parts.append((id(p), p.data_ptr(), 0 if p.is_inference() else p._version))
            if type(p) is torch.nn.Parameter and p.layout == torch.strided and p.device.type != "meta" and p.numel():
                samples.setdefault((p.device, p.dtype), []).append(_sample(p))
        parts += [torch.cat(values).cpu().view(torch.uint8).numpy().tobytes() for values in samples.values()]
    for m in model.modules():
        parts.append((id(m), id(vars(m).get("forward")), *m._forward_hooks, *m._forward_pre_hooks))
    return hash(tuple(parts))


def _sample(p: torch.Tensor) -> torch.Tensor:
    """A view of SAMPLED elements of a weight, an odd distance apart, so that they are of different columns."""
    flat = p if p.is_contiguous() else p[..., 0].reshape(-1)
    count = min(flat.numel(), SAMPLED)
    return flat.as_strided((count,), ((flat.numel() // count - 1) | 1,), flat.storage_offset())


def adapter_keys(model: Any) -> tuple[str, ...]:
    """Which PEFT adapters are active in which layer, and how strongly: KV of one prompt differs between them."""
    states = [
        f"{index} {m.active_adapters} {m.disable_adapters} {getattr(m, 'scaling', None)}"
        for index, m in enumerate(model.modules())
        if hasattr(m, "active_adapters") and not callable(m.active_adapters) and hasattr(m, "disable_adapters")
    ]
    return ("adapters", hashlib.sha256("\n".join(states).encode()).hexdigest()) if states else ()
