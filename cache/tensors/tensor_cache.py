"""A cache of per-token tensors besides the KV (hidden states, multimodal features), along the slots of KV blocks."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from ...triton_ops._copy.cpu import empty
from ...triton_ops._core.checks import check_integer, on_host
from ..allocation import Allocation, AnyAllocation
from ..manager import CacheManager
from ..runs import slot_runs, slots_of_runs
from ..table import Ids
from .rows import PLAIN, MissingRowsError, Named, NamedRows, RowStore, RowType
from .step import Step, StepSlots, leaves
from .valid import Mask, ValidRows, check_blocks

_log = logging.getLogger("pc.cache")


class TensorCache:
    """Named tensors `[num_blocks, block_size, *features]` that follow the slots of the KV cache.

    A request whose prefix is cached gets tensors for all its tokens, although only its suffix was computed. Call
    `store` in every step, then `load` or `join`. A request gets a row only if its block held the same tokens when the
    row was stored. A step that writes a slot replaces the rows of all names there. Rows are forgotten when the
    manager allocates their block again, or when other tokens replace rejected ones.

    Not thread-safe.

    Args:
        manager: The manager whose requests and blocks to follow. None: each call passes slots and block tables, every
            step that writes a slot of the KV cache must be stored, and `forget` must be called for blocks that
            something else fills.
        num_blocks: Number of blocks in the KV cache.
        block_size: Number of tokens in a block.
        device: "cpu" or "cuda", where the rows are kept.
        pin: Whether to pin host memory, so that a device accesses it directly. Ignored without a device.
        max_bytes: Limit for all names together. None: half of the memory that is available now.
        group: The group whose slots and block tables to follow, if the manager has several.
        exclude: Names that are never discovered, because their first dimension may equal the token count by
            coincidence, or because their rows are never read. `register` overrides it.

    Raises:
        TypeError: `num_blocks` or `block_size` is not an int.
        ValueError: One of them is below 1 or differs from the manager's. Or the manager has no such group.

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
        num_blocks = self.num_blocks = check_integer("num_blocks", num_blocks, 1)
        block_size = self.block_size = check_integer("block_size", block_size, 1)
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
        self.device = torch.device(device)
        self.pin = pin and self.device.type == "cpu" and torch.cuda.is_available()
        self.group = group
        self.max_bytes = _available_bytes(self.device) // 2 if max_bytes is None else max_bytes
        self._valid = ValidRows(num_blocks, block_size, pool)
        self._entries: dict[str, NamedRows] = {}
        self._exclude = set(exclude)
        self._warned: set[str] = set()
        self._store = RowStore(self._entries, self._valid, self.device)

    @property
    def names(self) -> tuple[str, ...]:
        """Cached names."""
        return tuple(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all names. Swapped-out rows are not counted; `host_blocks` of the manager limits them."""
        return sum(entry.rows.nbytes for entry in self._entries.values())

    def cost(self, feature_shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the number of bytes that a name of this shape and dtype takes.

        Raises:
            TypeError: The sizes are not integers, or `dtype` is no dtype.
            ValueError: A size is negative.

        Examples:
            >>> cache.cost((32,), torch.bfloat16)
            4096
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: got {dtype!r}, needs a torch.dtype")
        return self.num_blocks * self.block_size * math.prod(_check_sizes(feature_shape)) * dtype.itemsize

    def rows(self, name: str) -> torch.Tensor:
        """Return the whole cache of a name, not a copy: `[num_blocks, block_size, *features]`.

        Examples:
            >>> cache.rows("hidden").shape
            torch.Size([16, 4, 32])
        """
        self._store.require([name])
        return self._entries[name].rows

    def stored(self, name: str) -> Mask:
        """Return which slots of a name hold a row, `[num_blocks, block_size]`.

        Examples:
            >>> cache = pc.TensorCache(None, num_blocks=2, block_size=4)
            >>> others = cache.store(pc.Step({"hidden": torch.ones(3, 32)}, np.arange(4, 7)))
            >>> cache.stored("hidden").tolist()
            [[False, False, False, False], [True, True, True, False]]
        """
        self._store.require([name])
        return self._valid.there([name], np.arange(self.num_blocks))[name].reshape(-1, self.block_size)

    def register(self, name: str, feature_shape: Sequence[int], dtype: torch.dtype) -> None:
        """Allocate the cache of a name, unless it exists with this shape and dtype.

        Args:
            name: Name of the tensor in the outputs of steps. Dots lead into nested outputs.
            feature_shape: Shape of one token's row.
            dtype: Dtype of the rows.

        Raises:
            TypeError: The sizes are not integers, or `dtype` is no dtype.
            ValueError: The name exists with another shape or dtype, or a size is negative.
            MemoryError: It does not fit into `max_bytes`. Nothing has been allocated.

        Examples:
            >>> cache.register("decoder.hidden", (8,), torch.bfloat16)
            >>> cache.names, cache.rows("decoder.hidden").shape
            (('hidden', 'decoder.hidden'), torch.Size([16, 4, 8]))
        """
        features = _check_sizes(feature_shape)
        if name in self._entries:
            self._check_like(name, features, dtype)
            self._entries[name] = self._entries[name]._replace(registered=True)
        else:
            self._allocate({name: (features, dtype)}, registered=True)
        self._exclude.discard(name)

    def _check_like(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise ValueError if rows differ in shape or dtype from those of a cached name."""
        entry = self._entries[name]
        if tuple(shape) != entry.features or dtype != entry.dtype:
            raise ValueError(f"{name}: got rows {list(shape)} {dtype}, needs {list(entry.features)} {entry.dtype}")

    def _allocate(self, new: Mapping[str, RowType], registered: bool) -> None:
        """Allocate new names: all of them or none."""
        total = self.nbytes
        for name, (shape, dtype) in new.items():
            size = self.cost(shape, dtype)
            if total + size > self.max_bytes:
                needs = f"{size} bytes for {self.num_blocks * self.block_size} rows {list(shape)} {dtype}"
                raise MemoryError(f"{name}: needs {needs}, {total} of at most {self.max_bytes} bytes are taken")
            total += size
            where = f"{self.device}, {total} of {self.max_bytes} in all"
            _log.info("TensorCache: %s %s %s takes %d bytes on %s", name, list(shape), dtype, size, where)
        made = {}
        for name, (shape, dtype) in new.items():
            full = (self.num_blocks, self.block_size, *shape)
            with torch.inference_mode(False):  # otherwise no step outside of that mode could write them
                rows = torch.empty(full, dtype=dtype, pin_memory=True) if self.pin else empty(full, dtype, self.device)
                flat = rows.flatten(0, 1) if on_host(rows) and dtype in PLAIN else None
            made[name] = NamedRows(rows, registered, shape, dtype, math.prod(shape) * dtype.itemsize, flat)
        for name, entry in made.items():
            self._entries[name] = entry
            self._valid.add(name)

    def _discover(self, new: Mapping[str, RowType]) -> list[str]:
        """Allocate new names as long as there is room; return those without room."""
        refused = []
        for name, row in new.items():
            try:
                self._allocate({name: row}, registered=False)
            except MemoryError as error:  # noqa: PERF203  one failure must not exclude others
                refused.append(name)
                self._warn_once(name, f"{error}; it is not cached")
        return refused

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("TensorCache: %s", text)

    def store(self, step: Step) -> dict[str, object]:
        """Store the rows of a step in the slots of its tokens.

        Tensors whose first dimension equals the step's token count are stored. Names that are not registered are
        discovered here. A step with one token for each request discovers no name, because per-request tensors such as
        logits have the same shape. A tensor without room is not stored either.

        Args:
            step: The step. Every step must be stored, even without outputs, because what it computed replaces the
                contents of its slots.

        Returns:
            The outputs that are not per-token tensors, by name.

        Raises:
            ValueError: A slot is out of range, a name's row shape or dtype differs from before, or a registered name
                has another number of rows. After any error, nothing has been written.
            TypeError: Outputs are not a mapping, or slots are not integers.

        Examples:
            >>> outputs = {"hidden": torch.randn(1, 32), "loss": torch.tensor(0.5)}
            >>> cache.store(pc.Step.of({"a": manager.append("a", [7])}, outputs))
            {'loss': tensor(0.5000)}
        """
        slots = self._checked_slots(step)
        mine, others = self._sort(step)
        self._store.write(slots, mine)
        return others

    def _sort(self, step: Step) -> tuple[Named, dict[str, object]]:
        """Return per-token tensors, with new names allocated, and all other outputs.

        A tensor with a row for each token is discovered, unless the step decodes, since it may have a row for each
        request. A discovered name is dropped if it has fewer rows than tokens, and ignored in this step if it has more
        (padding).
        """
        outputs, num_tokens = step.outputs, step.slots.count
        if not isinstance(outputs, Mapping):
            raise TypeError(f"outputs: got {type(outputs).__name__}, needs a mapping by name")
        mine: Named = {}
        others: dict[str, object] = {}
        new: dict[str, RowType] = {}
        no_rows: Named = {}
        for name, value in leaves(outputs):
            if name in mine or name in others:
                raise ValueError(f"outputs: got two values named {name}, needs names that differ")
            others[name] = value
            if not isinstance(value, torch.Tensor) or not num_tokens or name in self._exclude:
                continue
            known = self._entries.get(name)
            if value.layout == torch.strided and value.shape[:1] == (num_tokens,):
                if known is not None:
                    self._check_like(name, value.shape[1:], value.dtype)
                elif step.is_decode:
                    continue
                else:
                    new[name] = tuple(value.shape[1:]), value.dtype
                mine[name] = value
                del others[name]
            elif known is not None and known.registered:
                raise ValueError(f"{name}: got shape {list(value.shape)}, needs {num_tokens} rows, one per token")
            else:
                no_rows[name] = value
        for name in self._discover(new) if new else ():
            others[name] = mine.pop(name)
        for name, value in no_rows.items():
            if value.layout != torch.strided or value.dim() < 1 or value.shape[0] < num_tokens:
                self._exclude.add(name)
                if self._entries.pop(name, None) is not None:
                    self._valid.drop(name)
                    _log.warning("TensorCache: %s %s is not per token, it is no longer cached", name, list(value.shape))
            elif name in self._entries:
                text = f"{name}: got {len(value)} rows for {num_tokens} tokens, none is kept: cut off the padding"
                self._warn_once(name, text)
        return mine, others

    def write(self, slots: StepSlots, mine: Named) -> None:
        """Store rows like `store`, but without checks, which saves a few microseconds.

        Args:
            slots: Slots of the step's tokens, in range.
            mine: For each registered name, rows `[slots.count, *features]` of its dtype.

        Examples:
            >>> from pc.cache.tensors.step import StepSlots
            >>> cache = pc.TensorCache(None, num_blocks=16, block_size=4)
            >>> cache.register("hidden", (32,), torch.float32)
            >>> cache.write(StepSlots.of([8, 9]), {"hidden": torch.ones(2, 32)})
            >>> cache.available(np.array([2]), num_tokens=2)
            2
        """
        self._store.write(slots, mine)

    def _checked_slots(self, step: Step) -> StepSlots:
        """Return the slots of a step, after a check of their range.

        Raises:
            ValueError: A slot is out of range.
        """
        if not isinstance(step, Step):
            raise TypeError(f"step: got {type(step).__name__}, needs a pc.Step")
        slots, limit = step.slots, self.num_blocks * self.block_size
        if slots.low < -1 or slots.high >= limit:
            raise ValueError(f"slot_mapping: got values from {slots.low} to {slots.high}, needs -1 to {limit - 1}")
        return slots

    def prepare(self, allocation: AnyAllocation) -> None:
        """Apply `copies` and `loads` of an allocation to the rows, and forget the rows that its step will replace.

        Call it before the allocation's step is computed if it has copies (a shared or partly reused block) or loads
        (rows that were swapped out). Other allocations do not need it, because `store` does the same for them. After
        `append_each`, call `copy` with its `copies` instead.

        Examples:
            >>> manager.fork("a", "c")
            >>> own = manager.append("c", [7])  # has a copy of the block that both share
            >>> cache.prepare(own)
            >>> others = cache.store(pc.Step.of({"c": own}, {"hidden": torch.randn(1, 32)}))
            >>> cache.load("c")["hidden"].shape
            torch.Size([22, 32])
        """
        if not isinstance(allocation, Allocation):
            raise TypeError(f"allocation: got {type(allocation).__name__}, needs an Allocation of the manager")
        self._store.copy(allocation.group_copies(self.group))
        self._store.swap_in(allocation.group_loads(self.group))
        mapping = allocation.group_slot_mapping(self.group)
        self._valid.clear(mapping[mapping >= 0])

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy the rows of blocks to other blocks: (source, target) pairs, one after another.

        Raises:
            TypeError: A number is not an integer.
            ValueError: A number is out of range. Nothing has been copied.

        Examples:
            >>> cache.copy([(2, 9)])
            >>> cache.load(np.array([9]), num_tokens=4)["hidden"].shape
            torch.Size([4, 32])
        """
        self._store.copy(map(tuple, check_blocks("pairs", pairs, self.num_blocks, 0, (2,)).tolist()))

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy to host memory the rows of blocks that `CacheManager.preempt` released.

        They stay there until they are loaded. Call this before anything else is written.

        Args:
            pairs: (block, host slot), as `preempt` returns them for this group.

        Raises:
            TypeError: A number is not an integer.
            ValueError: A number is negative, or a block is out of range. Nothing has been copied.

        Examples:
            >>> manager = pc.CacheManager(num_blocks=16, block_size=4, host_blocks=4)
            >>> cache, allocation = pc.TensorCache(manager, 16, 4), manager.allocate("a", range(6))
            >>> others = cache.store(pc.Step.of({"a": allocation}, {"hidden": torch.randn(6, 32)}))
            >>> merged = manager.commit("a", 6)
            >>> cache.swap_out(manager.preempt("a", "swap"))
            >>> cache.prepare(manager.resume("a"))
        """
        moves = check_blocks("pairs", pairs, 1 << 31, 0, (2,)).reshape(-1, 2)
        check_blocks("pairs", moves[:, 0], self.num_blocks, 0, noun="blocks")
        self._store.swap_out((int(block), int(slot)) for block, slot in moves)

    def forget(self, block_ids: Iterable[int] | Ids) -> None:
        """Forget the rows of blocks that something else fills, such as a connector or a tier.

        A manager reports the blocks that it allocates again. Without a manager, call this for each block that is
        allocated again, unless a stored step writes its first token.

        Args:
            block_ids: Block numbers in any order. Entries of -1 are ignored.

        Raises:
            TypeError: They are not integers.
            ValueError: A number is out of range. Nothing has been forgotten.

        Examples:
            >>> cache.forget([manager.block_table("a")[2]])
            >>> cache.available("a")
            8
        """
        self._valid.forget(block_ids)

    def available(
        self, request: Hashable | Ids, names: Sequence[str] | None = None, num_tokens: int | None = None
    ) -> int:
        """Return the number of leading tokens of a request whose rows are all stored.

        Tokens of a hit beyond them must be computed again.

        Args:
            request: As in `load`.
            names: Names of tensors. None: all.
            num_tokens: As in `load`.

        Raises:
            KeyError: The request or a name is unknown.
            ValueError: `num_tokens` is missing or too large.

        Examples:
            >>> allocation = manager.append("a", [7, 8])
            >>> cache.available("a")
            21
        """
        table, count = self._table(request, num_tokens)
        there = self._store.there(list(self._entries) if names is None else names, table, count)
        return min((int(here.argmin()) for here in there.values() if not here.all()), default=count)

    def load(
        self,
        request: Hashable | Ids,
        names: Sequence[str] | None = None,
        num_tokens: int | None = None,
        missing: str = "raise",
        device: str | torch.device | None = None,
    ) -> Named:
        """Return the tensors of a whole request, from its first token on.

        Args:
            request: Id of a running request. Without a manager, its block table: block numbers in order.
            names: Names of tensors. None: all that have a row of this request.
            num_tokens: Number of leading tokens. None: all tokens that the manager knows. Required with a block table.
            missing: "raise", or "zero" to read zeros for rows that are missing.
            device: Device of the results. None: the device of the cache.

        Returns:
            Tensors `[num_tokens, *features]` by name.

        Raises:
            MissingRowsError: A row was never stored, or its block has other contents now.
            KeyError: The request or a name is unknown.
            ValueError: `num_tokens` is missing or too large, a block number is out of range, or `missing` is unknown.

        Examples:
            >>> cache.load("a", ["hidden"])["hidden"].shape
            torch.Size([21, 32])
        """
        if missing not in ("raise", "zero"):
            raise ValueError(f"missing: got {missing!r}, needs 'raise' or 'zero'")
        table, count = self._table(request, num_tokens)
        if count and device is None:
            wanted = list(self._entries) if names is None else list(names)
            if all(name in self._entries and self._entries[name].flat is not None for name in wanted):
                rows = self._store.by_copies(wanted, [(table, count, 0, 0)], {})
                if rows is not None:
                    return dict(zip(wanted, rows, strict=True))
        there = self._store.there(names, table, count)
        whole = [name for name, here in there.items() if here.all()]
        if missing == "raise" and len(whole) < len(there):
            _refuse_missing(there, request)
        blocks = table[: -(-count // self.block_size)]
        slots = slots_of_runs(slot_runs(blocks, self.block_size, 0, count), count)
        loaded = dict(zip(whole, self._store.gather(whole, slots, device), strict=True))
        for name, here in there.items():
            if name not in loaded:
                loaded[name] = self._store.gather([name], np.where(here, slots, -1), device)[0]
        return {name: loaded[name] for name in there}

    def _table(self, request: Hashable | Ids, num_tokens: int | None) -> tuple[Ids, int]:
        """Return the block table of a request, and the number of tokens to read."""
        if self.manager is not None and isinstance(request, Hashable):
            table = self.manager.block_table(request, self.group)
            known = self.manager.num_tokens(request)
            count = known if num_tokens is None else check_integer("num_tokens", num_tokens)
        elif num_tokens is None:
            raise ValueError("num_tokens: got None, needs the number of tokens of a block table")
        else:
            blocks = check_blocks("request", cast("Ids", request), self.num_blocks, noun="block numbers")
            table = blocks.astype(np.int32)
            known, count = len(table) * self.block_size, check_integer("num_tokens", num_tokens)
        if not 0 <= count <= known:
            raise ValueError(f"num_tokens: got {count}, needs 0 to {known}")
        return table, count

    def read(self, step: Step, names: Sequence[str]) -> Named:
        """Return the rows in the slots of a step, in the order of its tokens. `store` wrote them.

        Args:
            step: The step. Its outputs are ignored.
            names: Names of tensors.

        Returns:
            Tensors `[num_tokens, *features]` by name, on the device of the cache, with zeros for tokens without a slot.

        Raises:
            MissingRowsError: A slot holds no row of a name.
            KeyError: A name is unknown.
            ValueError: A slot is out of range.

        Examples:
            >>> step = pc.Step.of({"a": manager.append("a", [7])}, {"hidden": torch.randn(1, 32)})
            >>> others = cache.store(step)
            >>> torch.equal(cache.read(step, ["hidden"])["hidden"], step.outputs["hidden"])
            True
        """
        return self._store.read(self._checked_slots(step), names)

    def join(self, step: Step, names: Sequence[str] | None = None) -> dict[Hashable, Named]:
        """Return tensors of all tokens for each request of a step: cached rows and the step's own rows.

        The result equals `store` and then `load`, but new rows are not read back. The step may be stored before or
        after. The results of one name are views of one packed tensor, on a device if the step's outputs are. If no
        request has cached rows, they are the output itself, or views of it.

        Args:
            step: A step with requests, query_start_loc and positions (see `Step.of`). Each request ends at its last
                position.
            names: Names of tensors. None: all per-token tensors of the step.

        Returns:
            Tensors `[num_tokens of the request, *features]` by request and name.

        Raises:
            MissingRowsError: A cached row was never stored, or its block has other contents now.
            KeyError: The request or a name is unknown.
            ValueError: The step has no requests, or a reason of `store` applies.

        Examples:
            >>> step = pc.Step.of({"a": manager.append("a", [7])}, {"hidden": torch.randn(1, 32)})
            >>> cache.join(step)["a"]["hidden"].shape
            torch.Size([22, 32])
        """
        self._checked_slots(step)
        if self.manager is None or step.extents is None:
            raise ValueError("step: got one without requests and positions, needs Step.of and a manager")
        requests, (bounds, lengths, _) = step.requests, step.extents
        mine, _ = self._sort(step)
        if names is not None:
            for name in names:
                if name not in mine:
                    raise KeyError(f"names: got {name!r}, needs one of {', '.join(mine) or 'none'}, the step's")
            mine = {name: mine[name] for name in names}
        for request, length in zip(requests, lengths, strict=True):
            known = self.manager.num_tokens(request)
            if length > known:
                raise ValueError(f"positions: got {length} tokens of {request!r}, needs at most {known}")
        if mine and sum(lengths) > bounds[-1]:  # some rows are cached
            joined = self._join(mine, step)
        else:
            joined = [rows.detach() if rows.requires_grad else rows for rows in mine.values()]
        if len(requests) == 1:
            return {requests[0]: dict(zip(mine, joined, strict=True))}
        split = [rows.split(lengths) for rows in joined]
        return {
            request: {name: rows[i] for name, rows in zip(mine, split, strict=True)}
            for i, request in enumerate(requests)
        }

    def _join(self, new: Named, step: Step) -> list[torch.Tensor]:
        """Join cached rows and new rows of each request, by host copies if that is fastest, else by a kernel."""
        assert self.manager is not None
        assert step.extents is not None
        bounds, lengths, scattered = step.extents
        tables = [self.manager.block_table(request, self.group) for request in step.requests]
        ranges = list(zip(tables, lengths, bounds[:-1], bounds[1:], strict=True))
        if not scattered and self._store.on_host(new):
            joined = self._store.by_copies(list(new), ranges, new)
            if joined is not None:
                return joined
        positions = np.asarray(step.positions, np.int64)
        for request, (table, length, begin, end) in zip(step.requests, ranges, strict=True):
            if length > end - begin:
                there = self._store.there(list(new), table, length)
                for here in there.values():
                    here[positions[begin:end]] = True
                _refuse_missing(there, request)
        assert step.query_start_loc is not None
        return self._store.join(new, tables, lengths, step.query_start_loc, positions if scattered else None)


def _check_sizes(feature_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one token's row, after a check that its sizes are integers of at least 0."""
    sizes = check_blocks("feature_shape", feature_shape, 1 << 62, -(1 << 62)).tolist()  # any integers
    if min(sizes, default=0) < 0:
        raise ValueError(f"feature_shape: got {sizes}, needs sizes of at least 0")
    return tuple(sizes)


def _refuse_missing(there: Mapping[str, Mask], request: object) -> None:
    """Raise MissingRowsError if a token of a request has no row of a name."""
    for name, here in there.items():
        if not here.all():
            count, first = len(here) - int(np.count_nonzero(here)), int(here.argmin())
            raise MissingRowsError(f"{name}: {count} of {len(here)} rows of {request!r} are missing, from {first} on")


def _available_bytes(device: torch.device) -> int:
    """Return the free memory of a device, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 62
