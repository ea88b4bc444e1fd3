"""The state of a request, running or preempted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from .hashing import Chain, Words
from .keys import EncodedKeys
from .table import Ids

# Attributes that verbs set: not tokens, the running hash and the contents of tables.
CHANGING = (
    *("pending", "num_blocks", "committed", "computed", "published", "digests", "released", "replaced"),
    *("shared_tail", "writing", "loading", "new_states"),
)
_snapshot = attrgetter(*CHANGING)


@dataclass(eq=False, slots=True)
class SharedTail:
    """How far the last block that forks share is spoken for.

    `end`: tokens of the sequence up to which a request has written in that block, or may; -1: unknown.
    """

    end: int


class Request:
    """A running request.

    Attributes:
        tokens: Those that have blocks.
        pending: The rest of a prompt that is allocated in chunks.
        committed: Positions before it have been written.
        computed: Queries before it have been computed, or need not be: less than `committed` while the last token of a
            prompt that is cached whole is to be computed again.
        published: Logical blocks before it that it holds are published in the prefix cache.
        tables: Per group, block numbers by logical block, with room to grow; -1 is a hole.
        chain: Running hash behind `chain.hashed` blocks, None when it has to be built again.
        digests: Hashes of the complete blocks of the prompt, as far as they still hold.
        hit: Leading blocks that were cached when the request began.
        released: Per group, logical blocks before it, sinks apart, were given back.
        replaced: Per group, blocks that are replaced in the table, held until the next commit or free.
        shared_tail: Set while another request may hold the last block too, so that writing it needs a look.
        loading: Per group, host slots that its KV is being copied from, held until the next commit or free.
        new_states: Per group, logical blocks taken by `checkpoint` that no commit has published yet.
        prompt_tokens: How many tokens it began with.
        writing: The hash under which others learn that this request is computing that block, or None.
    """

    __slots__ = (*CHANGING, "chain", "hit", "keys", "priority", "prompt_tokens", "tables", "tokens", "ttl")

    def __init__(
        self,
        tokens: array[int],
        chain: Chain | None,
        digests: Words,
        keys: EncodedKeys,
        priority: int,
        ttl: float | None,
    ) -> None:
        self.tokens = tokens
        self.pending: array[int] | None = None
        self.tables: list[Ids] = []
        self.num_blocks = self.hit = self.committed = self.computed = self.published = 0
        self.chain = chain
        self.digests = digests
        self.keys = keys
        self.released: list[int] = []
        self.replaced: list[Ids] | None = None
        self.shared_tail: SharedTail | None = None
        self.writing: bytes | None = None
        self.loading: list[list[int]] = []
        self.prompt_tokens = len(tokens)
        self.new_states: list[tuple[int, int]] = []
        self.priority = priority
        self.ttl = ttl

    def snapshot(self) -> tuple[Any, ...]:
        """Its values of `CHANGING`."""
        return _snapshot(self)

    @property
    def namespace(self) -> bytes | None:
        """See `Chain.namespace`; None also for a chain that is to be built again."""
        return self.chain.namespace if self.chain is not None else None

    @property
    def length(self) -> int:
        """All tokens known, those of the prompt that have no blocks yet included."""
        return len(self.tokens) + (len(self.pending) if self.pending else 0)

    def copy(self) -> Request:
        """A request with the same tokens on the same blocks, without the states only the first one fills."""
        chain = self.chain.copy() if self.chain is not None else None
        other = Request(array("I", self.tokens), chain, self.digests, self.keys, self.priority, self.ttl)
        other.pending = array("I", self.pending) if self.pending else None
        other.tables = [table[: self.num_blocks].copy() for table in self.tables]
        for group, block in self.new_states:
            other.tables[group][block] = -1
        other.num_blocks, other.prompt_tokens = self.num_blocks, self.prompt_tokens
        other.committed, other.computed, other.published = self.committed, self.computed, self.published
        other.released = list(self.released)
        return other

    def keep_replaced(self, group: int, ids: Ids) -> None:
        """Keeps replaced blocks from being handed out for now."""
        replaced = list(self.replaced) if self.replaced is not None else [np.empty(0, np.int32) for _ in self.tables]
        replaced[group] = np.concatenate((replaced[group], ids))
        self.replaced = replaced  # as a new list, so that what was there before can be put back

    def put_blocks(self, group: int, first: int, ids: Ids) -> None:
        """Writes logical blocks from `first` on into a group's table."""
        self.tables[group][first : first + ids.size] = ids

    def held(self, group: int) -> Ids:
        """The blocks in a group's table."""
        table = self.tables[group][: self.num_blocks]
        present = table >= 0
        return table if np.count_nonzero(present) == table.size else table[present]

    def grown_table(self, group: int, num_blocks: int) -> Ids:
        """The group's table with room for `num_blocks`, doubled when it has to grow so that growth stays cheap."""
        table = self.tables[group]
        if num_blocks > table.size:
            larger = np.full(max(num_blocks, 2 * table.size, 8), -1, np.int32)
            larger[: table.size] = table
            self.tables[group] = table = larger
        return table


@dataclass
class Preempted:
    """What is left of a preempted request.

    Attributes:
        position: Computing can go on here with what is in host memory alone, or one token before if it is the end.
        blocks: Per group, logical blocks that are in host memory, and `slots`: the host slot of each.
    """

    tokens: array[int]
    pending: array[int] | None
    keys: EncodedKeys
    priority: int
    ttl: float | None
    position: int = 0
    blocks: list[Ids] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
