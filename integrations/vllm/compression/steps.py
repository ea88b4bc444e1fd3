"""Orders of vLLM's scheduler to its workers, which travel on the `SchedulerOutput` of a step."""

from __future__ import annotations

from typing import NamedTuple


class Packing(NamedTuple):
    """An order to workers: pack the kept tokens of a request's prompt from `sources` into `targets`.

    Attributes:
        request_id: The request whose block table changes.
        press: The press that scores tokens.
        tokens: The prompt's first tokens, which the press scores.
        sources: The prompt's whole blocks. Null blocks take their places behind `targets`.
        targets: Blocks for the kept tokens; some may be among `sources`.
        tail: The block of tokens behind `sources`, which are scored and stay where they are; None: there are none.
        peer: None: tokens are packed now. Otherwise `targets` hold them already, and only the table changes. Then this
            is the request that they were packed for, or "" where they were found in the cache.
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


class CompressionStep(NamedTuple):
    """Orders of one step: what to pack before its forward pass, and the queries to save in it.

    Attributes:
        packings: Orders, to be carried out one after the other.
        queries: By request, how many last rows of its chunk a press will read.
    """

    packings: list[Packing]
    queries: dict[str, int]
