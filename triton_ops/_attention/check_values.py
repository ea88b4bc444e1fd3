"""Checks of the values that an attention call holds: where reading them is free, and in debug mode."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from .._checks import bad_argument
from .call import AttentionCall, BatchCall


def check_lengths(call: BatchCall, lens: list[int], starts: list[int], max_seq_len: int | None = None) -> None:
    """Checks that the tables hold every sequence, and every sequence its queries.

    Args:
        call: Which keys are attended to.
        lens: Its seq_lens.
        starts: Its query_start_loc.
        max_seq_len: The caller's bound.

    Raises:
        ValueError: A length below 0 or above what the table holds, or a sequence shorter than its queries.
    """
    capacity = call.block_tables.shape[-1] * call.block_size
    bound = capacity if max_seq_len is None else min(capacity, max_seq_len)
    shortest, longest = min(lens, default=0), max(lens, default=0)
    if shortest < 0 or longest > bound:
        raise bad_argument(
            "seq_lens", f"values from {shortest} to {longest}", f"0 to {bound} (block_tables, max_seq_len)"
        )
    for row, (length, begin, end) in enumerate(zip(lens, starts, starts[1:], strict=False)):
        if 0 < length < end - begin:
            needs = f"0 or at least {end - begin}, since lengths include the sequence's queries in this call"
            raise bad_argument("seq_lens", f"{length} in row {row}", needs)


def check_attention_values(call: AttentionCall) -> None:
    """Checks lengths, block numbers and positions; reads them, so on a device it synchronizes.

    Raises:
        ValueError: A value outside of what the tensors it points into can hold.
    """
    num_tokens = call.query.shape[0]
    num_blocks, block_size = call.key_cache.shape[0], call.block_size
    lens, starts = call.seq_lens.tolist(), call.query_start_loc.tolist()
    q_lens = [end - begin for begin, end in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] > num_tokens or min(q_lens, default=0) < 0:
        raise bad_argument("query_start_loc", starts, f"ascending from 0 to at most {num_tokens} (num_tokens)")
    if not lens:
        return
    check_lengths(call, lens, starts, call.max_seq_len)
    shortest, longest = min(lens), max(lens)
    if call.max_query_len is not None and max(q_lens) > call.max_query_len:
        needs = f"at least {max(q_lens)}, the longest of query_start_loc"
        raise bad_argument("max_query_len", call.max_query_len, needs)
    tables = call.block_tables.cpu().numpy()
    own = tables[..., : -(-longest // block_size)]
    if own.size and (own.min() < -1 or own.max() >= num_blocks):
        # Entries behind a sequence's end are never read and may hold anything.
        read = np.arange(own.shape[-1]) < -(-np.array(lens).reshape(-1, *[1] * (own.ndim - 1)) // block_size)
        wrong = read & ((own < -1) | (own >= num_blocks))
        if wrong.any():
            row, *head, column = place = tuple(np.argwhere(wrong)[0].tolist())
            of_head = f", KV head {head[0]}" if head else ""
            got = f"{own[place]} in row {row}{of_head}, column {column}"
            raise bad_argument("block_tables", got, f"-1 to {num_blocks - 1}")
    if call.query_blocks is not None:
        _check_lists(call.query_blocks, call, lens, starts)
    if call.tree_mask is not None:
        _check_tree(call.tree_mask, call, starts)
    if call.num_shared_blocks:
        _check_prefix(tables[:, : call.num_shared_blocks], shortest, block_size)
    if call.query_positions is not None:
        positions = call.query_positions.cpu().numpy()[: starts[-1]]
        falls = positions[1:] <= positions[:-1]
        falls[[start - 1 for start in starts[1:-1] if 0 < start < len(positions)]] = False
        if call.tree_mask is not None:
            falls[:] = False
        if (positions < 0).any() or falls.any():
            raise bad_argument("query_positions", positions.tolist()[:16], "positions that ascend within each sequence")


def _check_lists(lists: torch.Tensor, call: AttentionCall, lens: list[int], starts: list[int]) -> None:
    own = lists.cpu().numpy()[: starts[-1]]
    if not own.size:
        return
    blocks = [-(-length // call.block_size) for length in lens]
    # Without a sign -1 is above all others.
    unsigned = own.view(np.uint32)
    if unsigned.max() >= min(blocks) and (own.min() < -1 or own.max() >= min(blocks)):
        bounds = np.repeat(blocks, np.diff(starts))[:, None, None]
        wrong = (own < -1) | (own >= bounds)
        if wrong.any():
            query, head, place = np.argwhere(wrong)[0].tolist()
            got = f"block {own[query, head, place]} for query {query}, KV head {head}"
            raise bad_argument("query_blocks", got, f"-1 to {bounds[query, 0, 0] - 1}, the blocks of its sequence")
    falls = unsigned[..., 1:] <= unsigned[..., :-1]
    if falls.any() and (falls := falls & (own[..., 1:] >= 0)).any():
        query, head, _ = np.argwhere(falls)[0].tolist()
        got = f"{own[query, head].tolist()[:16]} for query {query}, KV head {head}"
        raise bad_argument("query_blocks", got, "blocks that ascend, then -1")


def tree_bits(mask: torch.Tensor, num_keys: int) -> np.ndarray:
    """Rows of a tree_mask as booleans: `[rows, num_keys]`."""
    words = np.ascontiguousarray(mask.cpu().numpy()).astype("<i4")
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return np.pad(bits, ((0, 0), (0, max(0, num_keys - bits.shape[1]))))[:, :num_keys].astype(bool)


def _check_tree(mask: torch.Tensor, call: AttentionCall, starts: list[int]) -> None:
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end - begin > 32 * mask.shape[1]:
            needs = f"{-(-(end - begin) // 32)}, 32 keys each, for the {end - begin} queries of sequence {i}"
            raise bad_argument("tree_mask", f"{mask.shape[1]} words", needs)
        if not call.causal:
            continue
        bits, row = tree_bits(mask[begin:end], 32 * mask.shape[1]), np.arange(end - begin)[:, None]
        future = np.arange(bits.shape[1]) > row
        if call.query_positions is not None:
            depth = call.query_positions[begin:end].cpu().numpy()
            future[:, : end - begin] |= (depth[None] >= depth[:, None]) & (row != row.T)
        if (bits & future).any():
            query, key = np.argwhere(bits & future)[0]
            needs = "its own bit and those of tokens before it, of smaller depth, where causal"
            raise bad_argument("tree_mask", f"bit {key} in query {query} of sequence {i}", needs)


def _check_prefix(prefixes: np.ndarray, shortest: int, block_size: int) -> None:
    num_shared_blocks = prefixes.shape[1]
    if shortest < num_shared_blocks * block_size:
        needs = f"at most {shortest // block_size}, since a sequence is {shortest} long"
        raise bad_argument("num_shared_blocks", num_shared_blocks, needs)
    if (prefixes != prefixes[:1]).any():
        raise bad_argument("block_tables", "rows that differ in shared columns", f"{num_shared_blocks} equal columns")
