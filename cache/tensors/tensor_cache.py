"""Per-token tensors besides the KV (hidden states, multimodal features), cached along the slots of the KV blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...triton_ops import (
    copy_blocks_list,
    gather_blocks_list,
    gather_slots_list,
    join_prefix_list,
    scatter_blocks_list,
    scatter_slots_list,
)
from ..allocation import BaseAllocation
from ..manager import CacheManager
from ..runs import Slots, ascending, find_runs
from ..table import Ids
from .host_copy import Range, find_pieces, join_pieces, worth_copies, write_rows
from .named_tensors import Named, NamedTensors
from .step import Step, StepRequest
from .step_slots import StepSlots
from .valid_rows import Mask, ValidRows


class MissingRowsError(LookupError):
    """Rows of a name were asked for that no step stored, or whose blocks have had other content since.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> cache, allocation = pc.TensorCache(manager, 8, 4), manager.allocate("a", range(3))
        >>> cache.register("hidden", (32,), torch.float32)
        >>> try:
        ...     rows = cache.load("a", ["hidden"])
        ... except pc.MissingRowsError:
        ...     print("no step has stored them")
        no step has stored them
    """


class TensorCache:
    """Named tensors `[num_blocks, block_size, *features]` that follow the same slots as the KV cache.

    A request whose prefix is cached gets whole tensors, although only its suffix was computed: `store` every step, then
    `load` or `join`. A row is only ever given to a request whose block held the same tokens when the row was stored:
    a slot holds exactly the names of the last step that wrote it, and what it held is forgotten once the manager hands
    it out anew, with its block or to tokens that take the place of rejected ones.

    Not safe for use from several threads at once.

    Args:
        manager: Whose requests and blocks to follow; None: slots and block tables are given in each call, every step
            that writes a slot of the KV cache has to be stored, and `forget` is to be told of blocks that something
            else fills.
        num_blocks: Blocks of the KV cache.
        block_size: Tokens a block.
        device: "cpu" or "cuda", where the rows are kept.
        pin: Whether host memory is pinned, so that a device reads and writes it directly; ignored without a device.
        max_bytes: Bound of all names together; None: half of the memory that is available now.
        group: Whose slots and block tables are followed, when the manager has several groups.
        exclude: Names that are never discovered, because their first dimension may equal the token count by
            coincidence, or because nobody wants their rows again; `register` overrules it.

    Examples:
        >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
        >>> cache = pc.TensorCache(manager, num_blocks=16, block_size=4)
        >>> for request, prompt in (("a", [*range(20), 1]), ("b", [*range(20), 2])):
        ...     allocation = manager.allocate(request, prompt)
        ...     count = sum(end - start for start, end in allocation.compute_spans)
        ...     others = cache.store(pc.Step.of({request: allocation}, {"hidden": torch.randn(count, 32)}))
        ...     merged = manager.commit(request, len(prompt))
        ...     print(count, "computed,", len(cache.load(request)["hidden"]), "loaded")
        21 computed, 21 loaded
        1 computed, 21 loaded
    """

    def __init__(
        self,
        manager: CacheManager[Any, Any, Any] | None,
        num_blocks: int,
        block_size: int,
        device: str | torch.device = "cpu",
        pin: bool = True,
        max_bytes: int | None = None,
        group: int = 0,
        exclude: Iterable[str] = ("logits",),
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks, block_size: got {num_blocks}, {block_size}, needs at least 1 each")
        pool = None
        if manager is not None:
            if not 0 <= group < len(manager.pools):
                raise ValueError(f"group: got {group}, needs 0 to {len(manager.pools) - 1}")
            pool = manager.pools[group]
            if manager.block_size != block_size:
                raise ValueError(f"block_size: got {block_size}, needs {manager.block_size} of the manager")
            if pool.num_blocks != num_blocks:
                raise ValueError(f"num_blocks: got {num_blocks}, needs {pool.num_blocks} of the manager")
        self.manager = manager
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.pin = pin and self.device.type == "cpu" and torch.cuda.is_available()
        self.group = group
        self._valid = ValidRows(num_blocks, block_size, pool)
        self._names = NamedTensors(num_blocks, block_size, self.device, self.pin, max_bytes, exclude, self._valid)
        self._entries = self._names.entries
        self._swapped: dict[int, tuple[Named, dict[str, Mask]]] = {}
        self._written: torch.cuda.Event | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names that are cached."""
        return tuple(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all names; what is swapped out is not counted, the manager's host slots bound it."""
        return self._names.nbytes

    @property
    def max_bytes(self) -> int:
        """Bound of all names together."""
        return self._names.max_bytes

    def cost(self, feature_shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that a name of this shape and dtype takes.

        Examples:
            >>> pc.TensorCache(None, num_blocks=16, block_size=4).cost((32,), torch.bfloat16)
            4096
        """
        return self._names.cost(feature_shape, dtype)

    def rows(self, name: str) -> torch.Tensor:
        """The cache of a name itself, `[num_blocks, block_size, *features]`.

        Examples:
            >>> cache = pc.TensorCache(None, num_blocks=16, block_size=4)
            >>> cache.register("hidden", (32,), torch.bfloat16)
            >>> cache.rows("hidden").shape
            torch.Size([16, 4, 32])
        """
        return self._entries[name].rows

    def stored(self, name: str) -> Mask:
        """Which slots of a name hold a row, `[num_blocks, block_size]`.

        Examples:
            >>> cache = pc.TensorCache(None, num_blocks=2, block_size=4)
            >>> others = cache.store(pc.Step({"hidden": torch.ones(3, 32)}, np.arange(4, 7)))
            >>> cache.stored("hidden").tolist()
            [[False, False, False, False], [True, True, True, False]]
        """
        bits = self._valid.there([name], np.arange(self.num_blocks))[name]
        return bits.reshape(self.num_blocks, self.block_size)

    def register(self, name: str, feature_shape: Sequence[int], dtype: torch.dtype) -> None:
        """Allocates the cache of a name, unless it is there already, equal in shape and dtype.

        Args:
            name: Under which steps give the tensor; dots lead into nested outputs.
            feature_shape: Shape of one token's row.
            dtype: Of the rows.

        Raises:
            ValueError: The name is there with another shape or dtype, or a size is negative.
            MemoryError: It does not fit into `max_bytes`; nothing has been allocated.

        Examples:
            >>> cache = pc.TensorCache(None, num_blocks=16, block_size=4)
            >>> cache.register("decoder.hidden", (32,), torch.bfloat16)
            >>> cache.names, cache.rows("decoder.hidden").shape
            (('decoder.hidden',), torch.Size([16, 4, 32]))
        """
        self._names.register(name, feature_shape, dtype)

    def store(self, step: Step) -> dict[str, object]:
        """Keeps the rows of a step in the slots of its tokens.

        Tensors whose first dimension equals the step's token count are kept, those that were not registered under the
        name they have here, from now on. A step with one token a request does not make a name known, since its logits
        look the same; nor does a tensor that finds no room.

        Args:
            step: Every step is to be stored, also one without outputs to keep: what it computed replaces what its slots
                held.

        Returns:
            The outputs that are not per-token tensors, by name.

        Raises:
            ValueError: A slot out of range, or a name whose row shape or dtype differs from before, or a registered one
                with another number of rows. As with the other error, nothing has been written.
            TypeError: Outputs that are no mapping, or slots that are not integers.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> outputs = {"hidden": torch.randn(6, 32), "loss": torch.tensor(0.5)}
            >>> cache.store(pc.Step.of({"a": allocation}, outputs)), cache.names
            ({'loss': tensor(0.5000)}, ('hidden',))
        """
        slots = self._checked_slots(step)
        mine, others = self._names.sort(step)
        self.write(slots, mine)
        return others

    def write(self, slots: StepSlots, mine: Named) -> None:
        """`store` of what has been looked through already: a few microseconds less.

        Args:
            slots: Of the step's tokens, in range.
            mine: By name, which has been registered, `[slots.count, *features]` of its dtype; nothing is checked.

        Examples:
            >>> from pc.cache.tensors.step_slots import StepSlots
            >>> cache = pc.TensorCache(None, num_blocks=16, block_size=4)
            >>> cache.register("hidden", (32,), torch.float32)
            >>> cache.write(StepSlots.of([8, 9]), {"hidden": torch.ones(2, 32)})
            >>> cache.available(np.array([2]), num_tokens=2)
            2
        """
        if slots.runs is not None:
            self._valid.clear_spans(slots.spans)
        else:
            self._valid.clear(slots.kept)
        if not mine or slots.high < 0:
            return
        if self._on_host(mine):
            for name, tensor in mine.items():
                entry = self._entries[name]
                assert entry.flat is not None
                write_rows(entry.rows, entry.flat, slots, tensor, entry.row_bytes)
        else:
            self._scatter(mine, slots.index)
        if slots.runs is not None:
            self._valid.mark_spans(mine, slots.spans)
        else:
            self._valid.mark(mine, slots.kept)

    def _on_host(self, mine: Named) -> bool:
        """Whether rows and their cache are all where plain copies serve; waits for what a device still writes there."""
        for name, tensor in mine.items():
            if self._entries[name].flat is None or not tensor.is_cpu:
                return False
        if self._written is not None:
            self._wait()
        return True

    def _scatter(self, mine: Named, index: torch.Tensor) -> None:
        for device in {tensor.device for tensor in mine.values()}:  # one launch for each
            some = {name: tensor.detach() for name, tensor in mine.items() if tensor.device == device}
            if device.type == "cpu":
                self._wait()
            scatter_slots_list(list(some.values()), [self._entries[name].rows for name in some], index)
            if device.type == "cuda" and self.device.type == "cpu":
                self._written = torch.cuda.Event()
                self._written.record(torch.cuda.current_stream(device))

    def _checked_slots(self, step: Step) -> StepSlots:
        """The slots of a step, all in range."""
        slots, limit = step.slots, self.num_blocks * self.block_size
        if slots.low < -1 or slots.high >= limit:
            raise ValueError(f"slot_mapping: got values from {slots.low} to {slots.high}, needs -1 to {limit - 1}")
        return slots

    def prepare(self, allocation: BaseAllocation) -> None:
        """Carries out `copies` and `loads` of an allocation on the rows, and forgets what its slots to compute held.

        To be called before its step is computed when an allocation has copies (a partial block that was shared, or
        reused in part) or loads (swapped out before); at other times it changes nothing that `store` would not.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> others = cache.store(pc.Step.of({"a": allocation}, {"hidden": torch.randn(6, 32)}))
            >>> merged = manager.commit("a", 6)
            >>> manager.fork("a", "b")
            >>> own = manager.append("b", [7])  # has copies: the block that both share in part
            >>> cache.prepare(own)
            >>> others = cache.store(pc.Step.of({"b": own}, {"hidden": torch.randn(1, 32)}))
            >>> cache.load("b")["hidden"].shape
            torch.Size([7, 32])
        """
        self.copy(allocation.group_copies(self.group))
        self._swap_in(allocation.group_loads(self.group))
        mapping = allocation.group_slot_mapping(self.group)
        self._valid.clear(mapping[mapping >= 0])

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies the rows of blocks to other blocks: (source, target) pairs, one after the other.

        Examples:
            >>> cache = pc.TensorCache(None, num_blocks=16, block_size=4)
            >>> others = cache.store(pc.Step({"hidden": torch.ones(4, 32)}, np.arange(8, 12)))  # fills block 2
            >>> cache.copy([(2, 5)])
            >>> cache.load(np.array([5]), num_tokens=4)["hidden"].shape
            torch.Size([4, 32])
        """
        self._wait()
        for source, target in pairs:
            if self._entries:
                ids = (torch.tensor([block], device=self.device) for block in (source, target))
                copy_blocks_list([entry.rows for entry in self._entries.values()], *ids)
            self._valid.set_bits(target, self._valid.bits_of(source))

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Keeps the rows of blocks that `CacheManager.preempt` gave up, in host memory, until they are loaded again.

        Args:
            pairs: (block, host slot), as preempt returns them (for this group); to be called before anything is
                written.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4, host_blocks=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> others = cache.store(pc.Step.of({"a": allocation}, {"hidden": torch.randn(6, 32)}))
            >>> merged = manager.commit("a", 6)
            >>> cache.swap_out(manager.preempt("a", "swap"))
            >>> cache.prepare(manager.resume("a"))
        """
        self._wait()
        for block, slot in pairs:
            index = torch.tensor([block])
            rows = gather_blocks_list([entry.rows for entry in self._entries.values()], index) if self._entries else []
            kept = {name: row.cpu() for name, row in zip(self._entries, rows, strict=True)}
            self._swapped[slot] = kept, self._valid.bits_of(block)

    def _swap_in(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._wait()
        for slot, block in pairs:
            rows, bits = self._swapped.pop(slot, ({}, {}))
            known = [name for name in rows if name in self._entries]
            if known:
                targets = [self._entries[name].rows for name in known]
                scatter_blocks_list([rows[name] for name in known], targets, torch.tensor([block]))
            self._valid.set_bits(block, bits)

    def forget(self, block_ids: Iterable[int] | Ids) -> None:
        """Drops what is stored in blocks that somebody else has filled or will fill, such as a connector or a tier.

        A manager tells of blocks that it hands out anew; without one, this is to be called for each of them whose first
        token no stored step writes.

        Args:
            block_ids: Block numbers in any order; -1 is none.

        Raises:
            TypeError: They are not integers.
            ValueError: A number that no block has; nothing has been dropped.

        Examples:
            >>> cache = pc.TensorCache(None, num_blocks=16, block_size=4)
            >>> others = cache.store(pc.Step({"hidden": torch.ones(4, 32)}, np.arange(8, 12)))  # fills block 2
            >>> cache.forget([2])
            >>> cache.available(np.array([2]), num_tokens=4)
            0
        """
        self._valid.forget(block_ids)

    def available(
        self, request: Hashable | Ids, names: Sequence[str] | None = None, num_tokens: int | None = None
    ) -> int:
        """Leading tokens of a request whose rows are all there; what a hit has beyond them is to be computed again.

        Args:
            request: As in `load`.
            names: Which tensors; None: all.
            num_tokens: As in `load`.

        Raises:
            KeyError: An unknown request or name.
            ValueError: num_tokens is missing or too large.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> others = cache.store(pc.Step.of({"a": allocation}, {"hidden": torch.randn(6, 32)}))
            >>> step = manager.append("a", [7, 8])
            >>> cache.available("a")
            6
        """
        table, count = self._table(request, num_tokens)
        there = self._there(list(self._entries) if names is None else names, table, count)
        return min((int(here.argmin()) for here in there.values() if not here.all()), default=count)

    def load(
        self,
        request: Hashable | Ids,
        names: Sequence[str] | None = None,
        num_tokens: int | None = None,
        missing: str = "raise",
        device: str | torch.device | None = None,
    ) -> Named:
        """The tensors of a whole request, from its first token on.

        Args:
            request: The id of a running request; without a manager its block table, block numbers in order.
            names: Which tensors; None: all that have a row of this request.
            num_tokens: Of how many leading tokens; None: all tokens the manager knows of. Needed with a block table.
            missing: "raise", or "zero" to read zeros where a name has no row.
            device: Where the tensors go; None: where the cache is.

        Returns:
            By name `[num_tokens, *features]`.

        Raises:
            MissingRowsError: A row was never stored, or its block has had other content since.
            KeyError: An unknown request or name.
            ValueError: num_tokens is missing or too large, a block number out of range, or another `missing`.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> others = cache.store(pc.Step.of({"a": allocation}, {"hidden": torch.randn(6, 32)}))
            >>> cache.load("a", ["hidden"])["hidden"].shape
            torch.Size([6, 32])
        """
        if missing not in ("raise", "zero"):
            raise ValueError(f"missing: got {missing!r}, needs 'raise' or 'zero'")
        table, count = self._table(request, num_tokens)
        if count and device is None:
            wanted = list(self._entries) if names is None else list(names)
            if all(name in self._entries and self._entries[name].flat is not None for name in wanted):
                self._wait()
                rows = self._by_copies(wanted, [(table, count, 0, 0)], {})
                if rows is not None:
                    return dict(zip(wanted, rows, strict=True))
        there = self._there(names, table, count)
        whole = [name for name, here in there.items() if here.all()]
        if missing == "raise" and len(whole) < len(there):
            _refuse_missing(there, request)
        slots = _slots_of(table, count, self.block_size)
        loaded = dict(zip(whole, self._gather(whole, slots, device), strict=True))
        for name, here in there.items():
            if name not in loaded:
                loaded[name] = self._gather([name], np.where(here, slots, -1), device)[0]
        return {name: loaded[name] for name in there}

    def _gather(self, names: list[str], slots: Slots, device: str | torch.device | None) -> list[torch.Tensor]:
        self._wait()
        if not names:
            return []
        return gather_slots_list([self._entries[name].rows for name in names], torch.from_numpy(slots), device)

    def _table(self, request: Hashable | Ids, num_tokens: int | None) -> tuple[Ids, int]:
        """Block table and length to read of a request."""
        if self.manager is not None and isinstance(request, Hashable):
            table = self.manager.block_table(request, self.group)
            known = self.manager.num_tokens(request)
            count = known if num_tokens is None else num_tokens
        elif num_tokens is None:
            raise ValueError("num_tokens: got None, needs the number of tokens of a block table")
        else:
            table = np.asarray(request, np.int32)
            if table.size and not -1 <= int(table.min()) <= int(table.max()) < self.num_blocks:
                got = f"block numbers from {table.min()} to {table.max()}"
                raise ValueError(f"request: got {got}, needs -1 to {self.num_blocks - 1}")
            known, count = len(table) * self.block_size, num_tokens
        if not 0 <= count <= known:
            raise ValueError(f"num_tokens: got {count}, needs 0 to {known}")
        return table, count

    def _there(self, names: Sequence[str] | None, table: Ids, count: int) -> dict[str, Mask]:
        """Per name, which tokens have a row; without names, of those that have any."""
        for name in names or ():
            if name not in self._entries:
                raise KeyError(f"names: got {name!r}, needs one of {', '.join(self._entries) or 'none'}")
        blocks = table[: -(-count // self.block_size)]
        there = self._valid.there(self._entries if names is None else names, blocks, count)
        if names is None and count:
            there = {name: here for name, here in there.items() if here.any()}
        return there

    def read(self, step: Step, names: Sequence[str]) -> Named:
        """The rows in the slots of a step, in the order of its tokens: what `store` kept, until others are written.

        Args:
            step: Its outputs are not looked at.
            names: Which tensors.

        Returns:
            By name `[num_tokens, *features]`, on the device of the cache; zeros for a token without a slot.

        Raises:
            MissingRowsError: A slot holds no row of a name.
            KeyError: An unknown name.
            ValueError: A slot out of range.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> step = pc.Step.of({"a": allocation}, {"hidden": torch.randn(6, 32)})
            >>> others = cache.store(step)
            >>> torch.equal(cache.read(step, ["hidden"])["hidden"], step.outputs["hidden"])
            True
        """
        slots = self._checked_slots(step)
        for name in names:
            if name not in self._entries:
                raise KeyError(f"names: got {name!r}, needs one of {', '.join(self._entries) or 'none'}")
        if not self._valid.holds(names, slots.spans if slots.runs is not None else ascending(find_runs(slots.kept))):
            raise MissingRowsError(f"{', '.join(names)}: a row of the step's slots is missing")
        self._wait()
        runs, entries = slots.runs, [self._entries[name] for name in names]
        if runs and slots.low >= 0 and all(entry.flat is not None for entry in entries):
            pieces = [(True, first, end) for _, first, end in runs]
            if all(worth_copies(len(runs), slots.count * entry.row_bytes) for entry in entries):
                read = [join_pieces(e.flat, pieces, e.flat, slots.count, e.row_bytes) for e in entries]  # type: ignore[arg-type]
                return dict(zip(names, read, strict=True))
        return dict(zip(names, gather_slots_list([e.rows for e in entries], slots.index), strict=True))

    def join(self, step: Step, names: Sequence[str] | None = None) -> dict[Hashable, Named]:
        """Whole tensors of all requests of a step: cached rows and the step's own, read once and written once.

        It gives what `store` and then `load` give, without reading the new rows back; the step may be stored before or
        after. The results of one name are parts of one packed tensor, on a device if the step's outputs are; where no
        request had cached rows they are the output itself, or parts of it.

        Args:
            step: With requests, query_start_loc and positions (see `Step.of`); each request reaches to the last of its
                positions.
            names: Which tensors; None: all per-token tensors of the step.

        Returns:
            By request and name `[num_tokens of the request, *features]`.

        Raises:
            MissingRowsError: A cached row was never stored, or its block has had other content since.
            KeyError: An unknown request or name.
            ValueError: A step without requests, or as in `store`.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> others = cache.store(pc.Step.of({"a": allocation}, {"hidden": torch.randn(6, 32)}))
            >>> step = pc.Step.of({"a": manager.append("a", [7])}, {"hidden": torch.randn(1, 32)})
            >>> cache.join(step)["a"]["hidden"].shape
            torch.Size([7, 32])
        """
        parts = step.parts
        if self.manager is None or parts is None:
            raise ValueError("step: got one without requests and positions, needs Step.of and a manager")
        self._checked_slots(step)
        mine, _ = self._names.sort(step)
        if names is not None:
            for name in names:
                if name not in mine:
                    raise KeyError(f"names: got {name!r}, needs one of {', '.join(mine) or 'none'}, the step's")
            mine = {name: mine[name] for name in names}
        cached = 0
        for part in parts:
            known = self.manager.num_tokens(part.request)
            if part.num_tokens > known:
                raise ValueError(f"positions: got {part.num_tokens} tokens of {part.request!r}, needs at most {known}")
            cached += part.num_tokens - (part.end - part.begin)
        if cached and mine:
            joined = self._join(mine, step, parts)
        else:
            joined = [rows.detach() if rows.requires_grad else rows for rows in mine.values()]
        if len(parts) == 1:
            return {parts[0].request: dict(zip(mine, joined, strict=True))}
        split = [rows.split([part.num_tokens for part in parts]) for rows in joined]
        return {
            part.request: {name: rows[i] for name, rows in zip(mine, split, strict=True)}
            for i, part in enumerate(parts)
        }

    def _join(self, new: Named, step: Step, parts: Sequence[StepRequest]) -> list[torch.Tensor]:
        assert self.manager is not None
        tables = [self.manager.block_table(part.request, self.group) for part in parts]
        lengths = [part.num_tokens for part in parts]
        scattered = any(part.scattered for part in parts)
        if not scattered and self._on_host(new):
            ranges = [(table, part.num_tokens, part.begin, part.end) for part, table in zip(parts, tables, strict=True)]
            joined = self._by_copies(list(new), ranges, new)
            if joined is not None:
                return joined
        positions = np.asarray(step.positions, np.int64)
        for part, table in zip(parts, tables, strict=True):
            if part.num_tokens > part.end - part.begin:
                there = self._there(list(new), table, part.num_tokens)
                for here in there.values():
                    here[positions[part.begin : part.end]] = True
                _refuse_missing(there, part.request)
        self._wait()
        return join_prefix_list(
            [self._entries[name].rows for name in new],
            torch.from_numpy(_stack(tables)),
            torch.tensor(lengths),
            [rows.detach() for rows in new.values()],
            torch.from_numpy(np.require(step.query_start_loc, np.int64, ["C", "W"])),
            sum(lengths),
            torch.from_numpy(np.require(positions, np.int64, ["C", "W"])) if scattered else None,
        )

    def _by_copies(self, names: Sequence[str], ranges: Sequence[Range], new: Named) -> list[torch.Tensor] | None:
        """Rows of names that the host can copy, and new ones; None where a kernel moves them or one is missing."""
        pieces = find_pieces(self._valid, names, ranges)
        if pieces is None:
            return None
        count = sum(length for _, length, _, _ in ranges)
        joined = []
        for name in names:
            entry = self._entries[name]
            if entry.flat is None or not worth_copies(len(pieces), count * entry.row_bytes):
                return None
            joined.append(join_pieces(entry.flat, pieces, new.get(name, entry.flat), count, entry.row_bytes))
        return joined

    def _wait(self) -> None:
        """Waits for what a device still writes to host memory."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None


def _slots_of(table: Ids, num_tokens: int, block_size: int) -> Slots:
    """Slots of the first tokens of a block table, -1 in holes."""
    blocks = table[: -(-num_tokens // block_size)].astype(np.int64)[:, None]
    slots = blocks * block_size + np.arange(block_size)
    if blocks.size and blocks.min() < 0:
        slots[blocks[:, 0] < 0] = -1
    return slots.ravel()[:num_tokens]


def _stack(tables: Sequence[Ids]) -> Ids:
    """Block tables as the rows of one array, padded with -1."""
    grid = np.full((len(tables), max(len(table) for table in tables)), -1, np.int32)
    for row, table in zip(grid, tables, strict=True):
        row[: len(table)] = table
    return grid


def _refuse_missing(there: Mapping[str, Mask], request: object) -> None:
    for name, here in there.items():
        if not here.all():
            count, first = len(here) - int(np.count_nonzero(here)), int(here.argmin())
            raise MissingRowsError(f"{name}: {count} of {len(here)} rows of {request!r} are missing, from {first} on")
