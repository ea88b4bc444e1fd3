"""The work that vLLM's scheduler gives its workers for compression, as a part of a step's `SchedulerOutput`."""

from __future__ import annotations

from typing import NamedTuple


class Packing(NamedTuple):
    """Work of a worker before a step: pack the kept tokens of a request's prompt from `sources` into `targets`.

    Attributes:
        request_id: The request whose block table changes.
        press: The press that scores tokens.
        tokens: Number of first tokens of the prompt, which the press scores.
        sources: The prompt's whole blocks. In the table, `targets` and then null blocks replace them.
        targets: Blocks for the kept tokens. Some may be among `sources`.
        tail: The block with the scored tokens after `sources`, which stay in place. None: there are none.
        peer: None: the worker packs the tokens now. Otherwise `targets` already hold them, and only the table changes:
            `peer` is the request that packed these blocks, or "" if they were found in the cache.
        by_head: Whether each KV head has its own number of blocks.
    """

    request_id: str
    press: str
    tokens: int
    sources: list[int]
    targets: list[int]
    tail: int | None
    peer: str | None
    by_head: bool
