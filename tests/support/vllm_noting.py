"""A scheduler that says which hints have reached it: what a client of a server sent arrives, or does not."""

from __future__ import annotations

from typing import Any

from pc.integrations.vllm.eviction import PolicyScheduler, read_hint


class NotingPolicyScheduler(PolicyScheduler):
    """`PolicyScheduler`, with a line for each request."""

    def add_request(self, request: Any) -> None:
        """Says it, then as without."""
        print(f"NOTED {request.request_id} {read_hint(request)}", flush=True)
        super().add_request(request)
