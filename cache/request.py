"""The state of a running request."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from .hashing import Chain
from .table import Ids


class Request:
    """A running request.

    Attributes:
        tokens: All its token ids.
        committed: Positions before it have been written.
        published: Logical blocks before it that it holds are findable.
        tables: Per group, block numbers by logical block, with room to grow; -1 is a hole.
        num_blocks: Logical blocks in use.
        chain: Running hash behind `chain.hashed` blocks, None when it has to be built again.
        keys: Extra keys and salt.
        released: Per group, logical blocks before it, sinks apart, were given back.
        replaced: Per group, blocks that are replaced in the table, held until the next commit or free.
        shared_tail: Whether the last block may be someone else's too, so that writing it needs a look.
        loading: Per group, host slots that its KV is being copied from, held until the next commit or free.
        priority: As given to `allocate`.
        prompt_tokens: How many tokens it began with.
        writing: The hash under which others learn that this request is computing that block, or None.
    """

    __slots__ = (
        "chain",
        "committed",
        "keys",
        "loading",
        "num_blocks",
        "priority",
        "prompt_tokens",
        "published",
        "released",
        "replaced",
        "shared_tail",
        "tables",
        "tokens",
        "writing",
    )

    def __init__(self, tokens: array[int], chain: Chain | None, keys: Any) -> None:
        self.tokens = tokens
        self.tables: list[Ids] = []
        self.num_blocks = 0
        self.chain = chain
        self.keys = keys
        self.committed = 0
        self.published = 0
        self.released: list[int] = []
        self.replaced: list[Ids] | None = None
        self.shared_tail = False
        self.writing: bytes | None = None
        self.loading: list[list[int]] = []
        self.priority = 0
        self.prompt_tokens = len(tokens)

    def open(self, tables: list[Ids], committed: int, published: int) -> None:
        """Gives the request its first blocks."""
        self.tables = tables
        self.num_blocks = tables[0].size
        self.released = [0] * len(tables)
        self.committed = committed
        self.published = published

    def copy(self) -> Request:
        """A request with the same tokens on the same blocks."""
        chain = self.chain.copy() if self.chain is not None else None
        other = Request(array("I", self.tokens), chain, self.keys)
        other.open([table[: self.num_blocks].copy() for table in self.tables], self.committed, self.published)
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
