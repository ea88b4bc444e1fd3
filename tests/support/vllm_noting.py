"""A scheduler that prints the hints that reach it, so that a test sees whether a client's hint arrived."""

from __future__ import annotations

from typing import Any

from pc.integrations.vllm.eviction import PolicyScheduler, read_hint


class NotingPolicyScheduler(PolicyScheduler):
    """`PolicyScheduler`, which prints a line for each request."""

    def add_request(self, request: Any) -> None:
        """Print the request's hint, then add it."""
        print(f"NOTED {request.request_id} {read_hint(request)}", flush=True)
        super().add_request(request)
