"""A plugin that counts events in SGLang's scheduler process, which a test cannot read itself."""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "SGLANG_COUNTS"
"""The variable that names a file, which gets a line for each event. Without it, nothing is counted."""


def register() -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from pc.integrations.sglang.attention import PagedAttnBackend
    from pc.integrations.sglang.eviction import PolicyTreeCore

    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def count(holder: Any, name: str, what: Any) -> None:
        called = getattr(holder, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            os.write(file, f"{what(*args) if callable(what) else what}\n".encode())
            return called(*args, **kwargs)

        setattr(holder, name, counted)

    count(PagedAttnBackend, "init_forward_metadata", lambda self, batch: f"step {batch.forward_mode.name}")
    count(PagedAttnBackend, "_attend", "layer")
    count(PolicyTreeCore, "_choose", "eviction")
    count(ScheduleBatch, "retract_decode", "retraction")
    count(ScheduleBatch, "mix_with_running", "mixed step")  # for backends, its mode is EXTEND
