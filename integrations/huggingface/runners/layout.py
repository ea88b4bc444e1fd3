"""Contiguous caches: filled from blocks or by forward passes over one row, and laid out for a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..api import DynamicCache, cache_argument, keeps_logits, positions, takes
from ..layers import GrowingLayer, aligned, attention_layers, from_states, put_states, take_states
from ..prompts import Prompt
from ..store.storage import ModelStorage, TensorSpec, block_index


def read(cache: DynamicCache, prompt: Prompt, length: int, room: int) -> None:
    """Fill an empty cache of one row with a prompt's first `length` tokens and states, and `room` free columns."""
    storage, layers = prompt.blocks.storage, attention_layers(cache)
    size = storage.block_size
    for group, part in storage.kv:
        first = storage.groups[group].first_needed(length, size)
        blocks = block_index(prompt.blocks.read_from(group, first, length))
        columns = length - first * size
        for index, specs in part.specs.items():
            keys, values = _buffers(specs, 1, columns + room, first * size)
            part.read(index, blocks, keys[0, :, :columns], values[0, :, :columns])
            fill(layers[index], keys, values, length, first * size)
    if prompt.hit.states is not None:
        put_states(cache, [prompt.hit.states])


def read_behind(cache: DynamicCache, prompt: Prompt, start: int, end: int) -> None:
    """Append a span of a prompt from blocks to a cache of one row."""
    storage, layers = prompt.blocks.storage, attention_layers(cache)
    first, behind = start // storage.block_size, -(-end // storage.block_size)
    for group, part in storage.kv:
        blocks = block_index(prompt.blocks.tables[group][first:behind])
        for index, specs in part.specs.items():
            keys, values = _buffers(specs, 1, end - start)
            part.read(index, blocks, keys[0], values[0])
            layers[index].update(keys, values)


def lay_out(
    cache: DynamicCache,
    storage: ModelStorage,
    prompts: Sequence[Prompt],
    caches: Mapping[int, DynamicCache],
    start: int,
    capacity: int,
    unwritten: int,
) -> None:
    """Fill the first `start` columns of a batch's empty cache.

    `caches` holds, by number, the prompts that were computed separately, each in a cache of one row. The columns of
    other prompts come from blocks.
    `capacity` is the number of columns for which buffers have room. `unwritten` is the first column that is not in
    blocks yet.
    """
    size, batch = storage.block_size, sum(len(prompt.rows) for prompt in prompts)
    layers, own_layers = attention_layers(cache), {n: attention_layers(own) for n, own in caches.items()}
    filled = [min(max(start - prompt.pad, 0), len(prompt.tokens)) for prompt in prompts]
    for group, part in storage.kv:
        spec = storage.groups[group]
        firsts = [spec.first_needed(length, size) for length in filled]
        blocks = {
            number: block_index(prompt.blocks.read_from(group, firsts[number], length))
            for number, (prompt, length) in enumerate(zip(prompts, filled, strict=True))
            if length and number not in caches
        }
        origin = min([prompts[number].pad + firsts[number] * size for number in blocks], default=start)
        origin = min(origin, unwritten, spec.first_needed(start, 1))  # the first column in the buffers of these layers
        for index, specs in part.specs.items():
            keys, values = _buffers(specs, batch, capacity - origin, origin)
            for number, prompt in enumerate(prompts):
                row, own = prompt.rows[0], own_layers[number][index] if number in caches else None
                first = firsts[number] * size if own is None else getattr(own, "first", 0)
                end = prompt.pad + filled[number] if filled[number] else start
                begin = max(prompt.pad + first, origin) if filled[number] else start
                columns = slice(begin - origin, end - origin)
                for side in (keys, values):  # a masked NaN times 0 would be NaN
                    side[row, :, : columns.start] = 0
                    side[row, :, columns.stop : start - origin] = 0
                if own is not None and filled[number]:
                    keys[row, :, columns] = own.keys[0, :, own.keys.shape[2] - end + begin :]
                    values[row, :, columns] = own.values[0, :, own.values.shape[2] - end + begin :]
                elif number in blocks:
                    part.read(index, blocks[number], keys[row, :, columns], values[row, :, columns])
                for other in prompt.rows[1:]:
                    for side in (keys, values):
                        side[other, :, : start - origin] = side[row, :, : start - origin]
            fill(layers[index], keys, values, start, origin)
    if storage.states is not None:
        states = {row: take_states(caches[number], 0) for number, p in enumerate(prompts) for row in p.rows}
        put_states(cache, [states[row] for row in range(batch)])


def _buffers(
    specs: tuple[TensorSpec, TensorSpec], rows: int, columns: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers for keys and values with `columns` columns, beginning with column number `first`."""
    keys, values = (aligned((rows, *spec.shape), columns, first, spec) for spec in specs)
    return keys, values


def fill(layer: Any, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0) -> None:
    """Set the buffers of an empty layer, which hold the columns from `first` up to `length`."""
    if isinstance(layer, GrowingLayer):
        layer.adopt(keys, values, length, first)
    else:
        layer.update(keys[:, :, :length], values[:, :, :length])


def accepted(model: Any, **inputs: Any) -> dict[str, Any]:
    """Return the inputs that a model's forward accepts."""
    return {name: value for name, value in inputs.items() if takes(model.forward, name)}


def inputs_of(
    model: Any, tokens: np.ndarray, start: int, end: int, cache: DynamicCache, given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the inputs that generate would make for tokens `start` to `end` of a row whose earlier tokens are cached.

    `given` are positions, types and images up to `end`. None: the positions of text.
    """
    ids = torch.from_numpy(tokens[:end])[None].to(model.device)
    options: dict[str, Any] = {"logits_to_keep": 1} if keeps_logits(model) else {}
    first = start == 0 or given is not None
    if given is None:
        given = accepted(model, position_ids=positions(model, ids, torch.ones_like(ids)))
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        ids,
        next_sequence_length=end - start,
        **{cache_argument(model): cache},
        attention_mask=None,
        **given,
        is_first_iteration=first,
        use_cache=True,
        **options,
    )
    return inputs


@torch.no_grad()
def forward(
    model: Any, tokens: np.ndarray, start: int, end: int, cache: DynamicCache, given: dict[str, Any] | None = None
) -> Any:
    """Compute tokens `start` to `end` of a row whose earlier tokens are in a cache; see `inputs_of`."""
    inputs = inputs_of(model, tokens, start, end, cache, given)
    with from_states():
        return model(**inputs, return_dict=True)
