"""The state of a request, running or preempted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from .hashing import Chain, Words
from .keys import EncodedKeys
from .pool import Hint
from .table import Ids

# Attributes of a request that verbs (the manager's methods, such as `allocate`) change. In addition, verbs grow
# `tokens` and the room of `tables` in place.
CHANGING = (
    *("pending", "tables", "num_blocks", "hit", "chain", "committed", "computed", "published", "digests"),
    *("replaced", "check_tail", "writing", "new_states", "host_end", "host_blocks", "host_slots"),
)
_changing = attrgetter(*CHANGING)

# A request, its number of tokens, and the values of `CHANGING`, or none of them if the request only gets tokens.
RequestSnapshot = tuple["Request", int, tuple[Any, ...]]


@dataclass(slots=True, eq=False)
class Request:
    """A running or preempted request. A preempted one has no blocks.

    A verb may grow `tokens` and the room of `tables` in place. It replaces all other values, because
    `ManagerState.begin` keeps references to the old ones.

    Attributes:
        tokens: The tokens that have blocks.
        pending: The rest of a prompt that is allocated in chunks.
        committed: Positions before this one have been written.
        computed: Queries before this one need not be computed. It is less than `committed` while the last token of a
            fully cached prompt must be computed again.
        published: Logical blocks before this one that the request holds are published in the prefix cache.
        tables: For each group, block numbers by logical block, -1 where the request holds none, with room to grow.
        num_blocks: Number of logical blocks. The rest of each table is room.
        chain: Running hash after the blocks of `digests`; None if it must be built again.
        hint: The hint for its blocks; None without one.
        digests: Hashes of the first complete blocks: those of the prompt, and every block before `committed`.
        hit: Number of leading blocks that were cached when the request started and are still complete.
        replaced: For each group, blocks that were replaced in the table, held until the next commit, preempt or
            free.
        check_tail: Whether the next append must check if the last, partly filled block is shared.
        new_states: (group, logical block) of states that `checkpoint` allocated and no commit has published yet.
        prompt_tokens: Number of tokens with which the request started.
        writing: Hash of the block that this request computes and others may wait for, or None.
        host_end: While the request is preempted, the position at which computing can continue with the KV in host
            memory. If this is the end of the request, its last token is computed again.
        host_blocks: For each group, the logical blocks in host memory, while the request is preempted.
        host_slots: For each group, the host slots of these blocks. `resume` loads them, and the next commit or free
            releases them.
    """

    tokens: array[int]
    chain: Chain | None
    digests: Words
    keys: EncodedKeys
    hint: Hint | None = None
    prompt_tokens: int = 0
    pending: array[int] | None = None
    tables: list[Ids] = field(default_factory=list)
    num_blocks: int = 0
    hit: int = 0
    committed: int = 0
    computed: int = 0
    published: int = 0
    replaced: list[Ids] | None = None
    check_tail: bool = False
    writing: bytes | None = None
    new_states: Sequence[tuple[int, int]] = ()
    host_end: int = 0
    host_blocks: Sequence[Ids] = ()
    host_slots: Sequence[list[int]] = ()

    @property
    def namespace(self) -> bytes | None:
        """The namespace of the chain (`Chain.namespace`); None if the chain must be built again."""
        return self.chain.namespace if self.chain is not None else None

    @property
    def length(self) -> int:
        """Number of all known tokens, including the prompt's tokens that have no blocks yet."""
        return len(self.tokens) + (len(self.pending) if self.pending else 0)

    def snapshot(self) -> RequestSnapshot:
        """Return the request, its number of tokens, and the values of `CHANGING`."""
        return self, len(self.tokens), _changing(self)

    def restore(self, length: int, values: tuple[Any, ...]) -> None:
        """Restore what `snapshot` returned. `values` is empty for a request that only got tokens."""
        for name, value in zip(CHANGING, values, strict=False):
            setattr(self, name, value)
        self.chain = None  # it may have been fed, so it must be built again
        del self.tokens[length:]

    def copy(self) -> Request:
        """Return a request with the same tokens on the same blocks, without states that are not published yet."""
        chain = self.chain.copy() if self.chain is not None else None
        other = Request(array("I", self.tokens), chain, self.digests, self.keys, self.hint, self.prompt_tokens)
        other.pending = self.pending  # verbs replace it and never change it
        other.tables = [self.written_table(group, self.num_blocks) for group in range(len(self.tables))]
        other.num_blocks = self.num_blocks
        other.committed, other.computed, other.published = self.committed, self.computed, self.published
        return other

    def keep_replaced(self, group: int, ids: Ids) -> None:
        """Hold replaced blocks until the next commit, preempt or free."""
        replaced = list(self.replaced) if self.replaced is not None else [np.empty(0, np.int32) for _ in self.tables]
        replaced[group] = np.concatenate((replaced[group], ids))
        self.replaced = replaced

    def put_blocks(self, group: int, blocks: int | slice | Ids, ids: int | Ids) -> None:
        """Replace logical blocks in a copy of a group's table, and keep the copy, so that a verb can be undone."""
        table = self.tables[group].copy()
        table[blocks] = ids
        self.tables = [*self.tables[:group], table, *self.tables[group + 1 :]]

    def written_table(self, group: int, end: int) -> Ids:
        """Return a copy of a group's table up to block `end`, with -1 for states that are not written yet."""
        table = self.tables[group][:end].copy()
        table[[block for at, block in self.new_states if at == group and block < end]] = -1
        return table

    def held(self, group: int) -> Ids:
        """Return the blocks that the request holds in a group."""
        table = self.tables[group][: self.num_blocks]
        present = table >= 0
        return table if np.count_nonzero(present) == table.size else table[present]

    def grown_table(self, group: int, num_blocks: int) -> Ids:
        """Return the group's table with room for `num_blocks`; doubling keeps growth cheap."""
        table = self.tables[group]
        if num_blocks > table.size:
            larger = np.full(max(num_blocks, 2 * table.size, 8), -1, np.int32)
            larger[: table.size] = table
            self.tables[group] = table = larger
        return table
