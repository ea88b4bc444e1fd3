"""Oracles of the operators that write, rotate, move and join rows: indexing row by row, and rotations in float64.

Each check compares every byte of a cache's memory, also the bytes around a strided cache. So the caches of a call must
not share memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import pc
from pc.triton_ops._verify import oracle

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with all the memory around it."""
    storage = tensor.untyped_storage().clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal shapes, dtypes and bytes. NaN equals itself."""
    a, b = (x.cpu().contiguous() for x in (a, b))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return not a.numel() or torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def same_memory(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether every byte of two tensors' storages is equal."""
    one, other = (torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()) for x in (found, wanted))
    return torch.equal(one, other)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, first: int = 0) -> torch.Tensor:
    """Return the rotary embedding of x `[..., heads, head_dim]` in float64.

    cos and sin are `[..., pairs]`. The features before `first` and after the pairs stay.
    """
    out, half = (x.float() if x.dtype.itemsize == 1 else x).double(), cos.shape[-1]
    out = out.clone()
    part, turn = out[..., first : first + 2 * half], torch.complex(cos.double(), sin.double())[..., None, :]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    turned = torch.complex(a.contiguous(), b.contiguous()) * turn
    parts = (turned.real, turned.imag)
    out[..., first : first + 2 * half] = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return out


def _rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the allowed error of a result. Triton's interpreter truncates to bfloat16, where a device rounds."""
    if dtype == INT8:
        return torch.full_like(exact, 0.51)
    return exact.abs() / 15 + 2**-9 if dtype == E4M3 else 2 * torch.finfo(dtype).eps * (exact.abs() + 1)


def check_write(rows: Any, caches: Any, slots: torch.Tensor, scales: Any = ()) -> None:
    """Call reshape_and_cache; `rows` and `caches` are those of keys and of values."""
    wanted, live = [twin(cache) for cache in caches], slots >= 0
    for i, (row, want) in enumerate(zip(rows, wanted, strict=True)):
        stored = oracle.codes(row, scales[i], want.dtype) if scales else row
        want[slots[live] // want.shape[1], slots[live] % want.shape[1]] = stored[live]
    pc.reshape_and_cache(*rows, *caches, slots, *scales)
    assert all(map(same_memory, caches, wanted))


def check_rope(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor, interleaved: bool = False,
    scales: Any = (),
) -> None:  # fmt: skip
    """Call rope_and_cache."""
    wanted, before, dtype = [twin(key_cache), twin(value_cache)], (query.clone(), key.clone()), key_cache.dtype
    out = pc.rope_and_cache(
        query, key, value, positions, cos_sin, key_cache, value_cache, slots, interleaved, *scales
    )  # fmt: skip
    turn, live = cos_sin[positions.long()].chunk(2, 1), slots >= 0
    exact, exact_key = (rotated(x, *turn, interleaved) for x in (query, key))
    assert out.is_contiguous()
    assert ((out.double() - exact).abs() <= _rounding(exact, query.dtype)).all()
    assert all(map(torch.equal, (query, key), before))
    place = slots[live] // key_cache.shape[1], slots[live] % key_cache.shape[1]
    wanted[1][place] = (oracle.codes(value, scales[1], dtype) if scales else value)[live]
    # Keys are rounded to the query's dtype first, so a quantized key may be the other of two neighbours.
    step = scales[0].double().view(-1, 1) if scales else 1.0
    found, want = key_cache[place].float().double() * step, exact_key[live]
    limit = _rounding(want, query.dtype)
    if scales:
        want = want.clamp(*(bound * step for bound in ((-127, 127) if dtype == INT8 else (-448, 448))))
        limit = limit + step * 0.51 if dtype == INT8 else want.abs() / 15 + step * 2**-9
    assert ((found - want).abs() <= limit).all()
    wanted[0][place] = key_cache[place]
    assert all(map(same_memory, (key_cache, value_cache), wanted))


def check_rotation(
    op: str, keys: torch.Tensor, moves: Any, inv_freq: Any, is_neox: bool = True, first: int = 0, values: Any = None
) -> None:
    """Call rotate_keys, by block, or move_slots, by slot; `moves` are sources, targets and deltas."""
    by_block, half = op == "rotate_keys", 0 if inv_freq is None else len(inv_freq)
    caches = [keys] if by_block or values is None else [keys, values]
    before, wanted = [cache.clone() for cache in caches], [twin(cache) for cache in caches]
    turn = (inv_freq, is_neox, first) if inv_freq is not None else ()
    if by_block:
        pc.rotate_keys(keys, *moves, *turn)
    else:
        pc.move_slots(keys, values, *moves, *turn)
    for source, target, delta in zip(*(move.tolist() for move in moves), strict=True):
        if target < 0:
            continue
        to, origin = ((i,) if by_block else (i // keys.shape[1], i % keys.shape[1]) for i in (target, source))
        for cache, old, want in zip(caches, before, wanted, strict=True):
            want[to] = old[origin] if source >= 0 else torch.zeros_like(old[to])
            if cache is keys and half:
                turned, angle = slice(first, first + 2 * half), delta * inv_freq.double()
                exact, found = rotated(want[to], angle.cos(), angle.sin(), not is_neox, first)[..., turned], cache[to]
                exact = exact.clamp(-128, 127) if keys.dtype == INT8 else exact
                error = (found[..., turned].float().double() - exact).abs()
                assert (error <= _rounding(exact, keys.dtype)).all(), (source, target, delta)
                want[to][..., turned] = found[..., turned]  # all other bits are compared below
    assert all(map(same_memory, caches, wanted))


@dataclass(frozen=True)
class Op:
    """An operator, how many dimensions of a cache its index counts, and an index into 8 blocks of 4 slots."""

    name: str
    leading: int
    index: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        return self.name

    @property
    def writes(self) -> bool:
        return not self.name.startswith("gather")

    @property
    def has_source(self) -> bool:
        return self.name.startswith("scatter")

    def indices(self, device: torch.device, dtype: torch.dtype = torch.int64) -> list[torch.Tensor]:
        return [torch.tensor(numbers, dtype=dtype, device=device) for numbers in self.index]

    def expected(self, source: Any, cache: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        """Return the expected result, or the expected cache, computed row by row."""
        cache = cache.cpu().contiguous()
        rows, numbers = cache.flatten(0, self.leading - 1), [number.tolist() for number in index]
        out = rows.clone() if self.writes else rows.new_empty(len(numbers[0]), *rows.shape[1:])
        for i, target in enumerate(numbers[-1] if self.writes else range(len(numbers[0]))):
            if target >= 0 and self.has_source:
                out[target] = source[i].cpu()
            elif target >= 0:
                out[target] = rows[numbers[0][i]] if numbers[0][i] >= 0 else torch.zeros_like(out[target])
        return out.view(cache.shape) if self.writes else out

    def run(self, source: Any, cache: torch.Tensor, *index: torch.Tensor, through: Any = torch.ops.pc) -> torch.Tensor:
        """Return the operator's result, or the cache that it wrote to."""
        out = getattr(through, self.name)(*([source] if self.has_source else []), cache, *index)
        return cache if self.writes else out

    def check(self, source: Any, cache: torch.Tensor, *index: torch.Tensor) -> None:
        """Call the operator, and check that it equals indexing and writes nowhere else."""
        expected, wanted = self.expected(source, cache, *index), twin(cache)
        out = self.run(source, cache, *index)
        if self.writes:
            wanted.copy_(expected)
        else:
            assert out.is_contiguous()
            assert same_bits(out, expected)
        assert same_memory(cache, wanted)


BLOCKS, SLOTS = (5, -1, 0, 3, -1, 1, 2), (5, -1, 0, 23, 7, 8, 9, 10, -1, -1, 22)
OPS = (
    Op("gather_blocks", 1, ((*BLOCKS, 3),)),
    Op("gather_slots", 2, ((*SLOTS, 7),)),
    Op("scatter_blocks", 1, (BLOCKS,)),
    Op("scatter_slots", 2, (SLOTS,)),
    Op("copy_blocks", 1, ((0, 2, -1, 3, -1, 2), (5, 6, 7, -1, -1, 1))),
)


def joined(
    cache: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor, new: torch.Tensor, starts: torch.Tensor,
    num_rows: int, positions: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the rows of join_prefix, copied one by one from whole tensors of the sequences."""
    cache, new, begins = cache.cpu(), new.cpu(), starts.tolist()
    parts = []
    for s, length in enumerate(seq_lens.tolist()):
        full = torch.zeros((length, *cache.shape[2:]), dtype=cache.dtype)
        for block, number in enumerate(tables[s].tolist()):
            begin = block * cache.shape[1]
            if number >= 0 and begin < length:
                full[begin : begin + cache.shape[1]] = cache[number][: length - begin]
        own = slice(begins[s], begins[s + 1])
        count = own.stop - own.start
        full[list(range(length - count, length)) if positions is None else positions[own].tolist()] = new[own]
        parts.append(full)
    return torch.cat([*parts, torch.zeros((num_rows, *cache.shape[2:]), dtype=cache.dtype)])[:num_rows]
