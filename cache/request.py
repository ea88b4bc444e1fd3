"""The state of a request, running or preempted."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from .hashing import Chain, Words
from .keys import EncodedKeys
from .table import Ids


class SharedTail:
    """How far the last block that forks share is spoken for.

    Attributes:
        end: Tokens of the sequence up to which somebody has written in that block, or may; -1 for nobody knows.
    """

    __slots__ = ("end",)

    def __init__(self, end: int) -> None:
        self.end = end


class Request:
    """A running request.

    Attributes:
        tokens: The ids of all tokens that have blocks.
        pending: The rest of a prompt that is allocated in chunks.
        committed: Positions before it have been written.
        published: Logical blocks before it that it holds are findable.
        tables: Per group, block numbers by logical block, with room to grow; -1 is a hole.
        num_blocks: Logical blocks in use.
        chain: Running hash behind `chain.hashed` blocks, None when it has to be built again.
        digests: Hashes of the complete blocks of the prompt, as far as they still hold.
        keys: Extra keys and salt.
        hit: Leading blocks that were cached when the request began.
        released: Per group, logical blocks before it, sinks apart, were given back.
        replaced: Per group, blocks that are replaced in the table, held until the next commit or free.
        shared_tail: Set while the last block may be someone else's too, so that writing it needs a look.
        loading: Per group, host slots that its KV is being copied from, held until the next commit or free.
        new_states: Per group, logical blocks taken by `checkpoint` that no commit has made findable yet.
        priority: As given to `allocate`.
        prompt_tokens: How many tokens it began with.
        ttl: As given to `allocate`.
        writing: The hash under which others learn that this request is computing that block, or None.
    """

    __slots__ = (
        "chain",
        "committed",
        "digests",
        "hit",
        "keys",
        "loading",
        "new_states",
        "num_blocks",
        "pending",
        "priority",
        "prompt_tokens",
        "published",
        "released",
        "replaced",
        "shared_tail",
        "tables",
        "tokens",
        "ttl",
        "writing",
    )

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
        self.num_blocks = 0
        self.chain = chain
        self.digests = digests
        self.keys = keys
        self.hit = 0
        self.committed = 0
        self.published = 0
        self.released: list[int] = []
        self.replaced: list[Ids] | None = None
        self.shared_tail: SharedTail | None = None
        self.writing: bytes | None = None
        self.loading: list[list[int]] = []
        self.prompt_tokens = len(tokens)
        self.new_states: list[tuple[int, int]] = []
        self.priority = priority
        self.ttl = ttl

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
        other.num_blocks = self.num_blocks
        other.prompt_tokens = self.prompt_tokens
        other.committed, other.published = self.committed, self.published
        other.released = list(self.released)
        return other

    def keep_replaced(self, group: int, ids: Ids) -> None:
        """Keeps replaced blocks from being handed out for now."""
        if self.replaced is None:
            self.replaced = [np.empty(0, np.int32) for _ in self.tables]
        self.replaced[group] = np.concatenate((self.replaced[group], ids))

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
    """What is left of a preempted request."""

    tokens: array[int]
    pending: array[int] | None
    keys: EncodedKeys
    priority: int
    ttl: float | None
    position: int = 0
    """Computing can go on here with what is in host memory alone, or one token before if it is the end."""
    blocks: list[Ids] = field(default_factory=list)
    """Per group, the logical blocks in host memory."""
    slots: list[list[int]] = field(default_factory=list)
    """Per group, the host slot of each."""
