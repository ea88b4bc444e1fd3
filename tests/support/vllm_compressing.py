"""The made-up model of `vllm_exact` with a worker that compresses, and its expected answers to compressed prompts."""

from __future__ import annotations

from typing import Any

from vllm_exact import BLOCK, PRIME, ExactEngine, row

KEPT_QUERIES = 32


def largest(rows: list[int], count: int) -> list[int]:
    """Return the rows that this model's press keeps, which are the largest, in their order."""
    bound = sorted(rows)[-count]
    return [each for each in rows if each >= bound]


def following_compressed(tokens: list[int], count: int, end: int, keep: int) -> list[int]:
    """Return the model's answer to a prompt of which `keep` blocks are kept from the whole blocks up to `end`."""
    whole, rows, said = end // BLOCK * BLOCK, [], []
    for position in range(len(tokens) + count - 1):
        token = tokens[position] if position < len(tokens) else said[position - len(tokens)]
        if position == end:
            rows = [*largest(rows[:whole], keep * BLOCK), *rows[whole:]]
        rows.append(row(token, position, sum(rows) % PRIME))
        if position >= len(tokens) - 1:
            said.append(rows[-1] % 1000)
    return said


class CompressingEngine(ExactEngine):
    """An engine whose worker packs the requests of each step.

    Attributes:
        plans: By request, its plan, also after the request has ended.
        saved: By request, the positions whose queries were saved.
        replays: Whether steps of single tokens are replayed from a graph, which saves no queries.
    """

    replays = False

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.scheduler.vllm_config.model_config.pc_cannot_compress = ""
        self.plans: dict[str, Any] = {}
        self.saved: dict[str, list[int]] = {}

    def add(self, name: str, tokens: list[int], *args: Any, **extra: Any) -> Any:
        """Add a request and store its plan."""
        request = super().add(name, tokens, *args, **extra)
        compression = self.scheduler.compression
        if compression is not None and name in compression.plans:
            self.plans[name] = compression.plans[name]
        return request

    def prepare(self, output: Any) -> None:
        """Pack, then record which queries the forward pass will save."""
        for new in output.scheduled_new_reqs:
            self.saved.pop(new.req_id, None)
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            self.saved.pop(name, None)
        for packing in getattr(output, "pc_packings", ()):
            queries = self.saved.pop(packing.request_id, [])
            if packing.peer is None:
                assert queries == list(range(packing.tokens - KEPT_QUERIES, packing.tokens))
                rows = [self.kv[block * BLOCK + at] for block in packing.sources for at in range(BLOCK)]
                kept = largest(rows, len(packing.targets) * BLOCK)
                for at, each in enumerate(kept):
                    self.kv[packing.targets[at // BLOCK] * BLOCK + at % BLOCK] = each
            ids = packing.targets + [0] * (len(packing.sources) - len(packing.targets))
            self.tables[packing.request_id][: len(ids)] = ids
        if self.replays and set(output.num_scheduled_tokens.values()) == {1}:
            return
        for name, rows in getattr(output, "pc_queries", {}).items():
            end = self.begins[name] + output.num_scheduled_tokens[name]
            self.saved.setdefault(name, []).extend(range(end - rows, end))
