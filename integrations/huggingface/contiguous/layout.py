"""Contiguous caches from blocks: of one row, or of a batch whose rows end at one column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from .grouped import GroupedStorage
from .layers import GrowingLayer, GrowingWindowLayer, attention_layers
from .prompts import Prompt
from .states import put_states, take_states
from .storage import BlockIds, TokenSpec


def read(cache: DynamicCache, storage: GroupedStorage, prompt: Prompt, length: int, room: int) -> None:
    """Fills an empty cache of one row with a prompt's first `length` tokens, and what states it has there.

    Args:
        cache: Of one row.
        storage: Whose blocks.
        prompt: Whose tokens.
        length: How many.
        room: Tokens for which there is to be room besides.
    """
    size, layers = storage.block_size, attention_layers(cache)
    for group, part in storage.kv:
        first = storage.groups[group].first_needed(length, size)
        blocks = BlockIds(prompt.blocks(group, first, length, size))
        columns = length - first * size
        for index, specs in part.specs.items():
            keys, values = _buffers(specs, 1, columns + room)
            part.read(index, blocks, keys[0, :, :columns], values[0, :, :columns])
            _fill(layers[index], keys, values, length, first * size)
    if prompt.states is not None:
        put_states(cache, [prompt.states])


def read_behind(cache: DynamicCache, storage: GroupedStorage, prompt: Prompt, start: int, end: int) -> None:
    """Puts a span of a prompt from blocks behind what a cache of one row has."""
    first, behind, layers = start // storage.block_size, -(-end // storage.block_size), attention_layers(cache)
    for group, part in storage.kv:
        blocks = BlockIds(prompt.tables[group][first:behind])
        for index, specs in part.specs.items():
            keys, values = _buffers(specs, 1, end - start)
            part.read(index, blocks, keys[0], values[0])
            layers[index].update(keys, values)


def lay_out(
    cache: DynamicCache,
    storage: GroupedStorage,
    prompts: Sequence[Prompt],
    caches: dict[int, DynamicCache],
    start: int,
    capacity: int,
    unwritten: int,
) -> None:
    """Fills an empty cache of a batch: from the prompts' own caches, or else from blocks.

    Args:
        cache: Of the batch.
        storage: Whose blocks.
        prompts: Of the batch; every row is one's.
        caches: Of single rows, by the prompt's number.
        start: Columns to fill.
        capacity: Columns that buffers are to have room for.
        unwritten: The first column that goes to blocks yet.
    """
    size, batch = storage.block_size, sum(len(prompt.rows) for prompt in prompts)
    layers, own_layers = attention_layers(cache), {n: attention_layers(own) for n, own in caches.items()}
    filled = [max(start - prompt.pad, 0) for prompt in prompts]
    for group, part in storage.kv:
        spec = storage.groups[group]
        firsts = [spec.first_needed(length, size) for length in filled]
        blocks = {
            number: BlockIds(prompt.blocks(group, firsts[number], length, size))
            for number, (prompt, length) in enumerate(zip(prompts, filled, strict=True))
            if length and number not in caches
        }
        origin = min([prompts[number].pad + firsts[number] * size for number in blocks], default=start)
        origin = min(origin, unwritten, spec.first_needed(start, 1))  # the first column of these layers
        for index, specs in part.specs.items():
            keys, values = _buffers(specs, batch, capacity - origin)
            for number, prompt in enumerate(prompts):
                row, own = prompt.rows[0], own_layers[number][index] if number in caches else None
                first = firsts[number] * size if own is None else getattr(own, "first", 0)
                begin = max(prompt.pad + first, origin) if filled[number] else start
                columns = slice(begin - origin, start - origin)
                for side in (keys, values):  # masked out, but NaN times 0 is NaN
                    side[row, :, : columns.start] = 0
                if own is not None and filled[number]:
                    keys[row, :, columns] = own.keys[0, :, own.keys.shape[2] - start + begin :]
                    values[row, :, columns] = own.values[0, :, own.values.shape[2] - start + begin :]
                elif number in blocks:
                    part.read(index, blocks[number], keys[row, :, columns], values[row, :, columns])
                for other in prompt.rows[1:]:
                    for side in (keys, values):
                        side[other, :, : columns.stop] = side[row, :, : columns.stop]
            _fill(layers[index], keys, values, start, origin)
    if storage.states is not None:
        states = {row: take_states(caches[number], 0) for number, p in enumerate(prompts) for row in p.rows}
        put_states(cache, [states[row] for row in range(batch)])


def _buffers(specs: tuple[TokenSpec, TokenSpec], rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = specs
    return keys.empty(rows, capacity), values.empty(rows, capacity)


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0) -> None:
    """Gives a layer buffers that have its columns from `first` up to `length`."""
    if isinstance(layer, GrowingWindowLayer):
        layer.adopt(keys, values, length, first)
    elif isinstance(layer, GrowingLayer):
        layer.adopt(keys, values, length)
    else:
        layer.update(keys[:, :, :length], values[:, :, :length])
