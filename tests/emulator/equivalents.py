"""Comparisons in the kernels' sources whose neighbours change no result, and the reasons.

They are listed by file and expression, as comparisons.py names them. `make mutate` fails if no case notices a
comparison that is missing here, and if a comparison is here without need.

Some reasons were tried on sm_80 by decodes, prefills, windows and holes: those of `full_end > full_begin`,
`i_end - skip > i_begin`, `i < jump`, and of the three that begin with `ahead` (half of the copies of the first one).
The mutants that no case notices leave every bit of the results as it was, with one exception. In "split decode", one
copy of the first `ahead` lets a query see one key of hundreds too many. That is within the bound of the error.
"""

from __future__ import annotations

ONE_TURN = "one more turn of the loop, in which every lane is masked off or that nothing uses"
INSIDE = "one key more is read, inside of the tensors, and a later mask drops it"
AGAIN = "one more program or lane writes what another one writes, the same values"
NO_TILE = "a walk over no tile"
EMPTY = "one more row tile or query tile runs, with every row masked off"
DEAD_ROWS = "an element of rows behind the last query, which are not written"
LOG2 = "log2's own tests for infinity and numbers below the smallest normal one: at the boundary both ways agree"
SEVERAL = "made by the compiler from several: entries of loops, and which thread writes a sum"
REASONS: dict[str, dict[str, str]] = {
    "kernels/attention.py": {
        "for base in range(0, num_seqs, 128)": ONE_TURN,
        "offs < num_seqs": "the end of the last sequence is read too, which lies behind every tile that a sequence has",
        "row_begin < q_len * GROUP": EMPTY,
        "start <= index": "a lane behind the last sequence, dropped by `offs < num_seqs`: a warp has several a thread",
        "tl.program_id(1) < GRID_HEADS": AGAIN,
        "for begin in range(0, count, BLOCK_S)": ONE_TURN,
        "token < q_begin + q_len": EMPTY,
        "tokens >= 0": "a token's number is never below 0",
    },
    "kernels/lists.py": {
        "base + offs_k < blocks": "the mark behind the last block is cleared too",
        "(block + 1) * BLOCK_SIZE > seq_len - q_len": "one block more is marked, all of whose keys the predicate drops",
        "block < blocks": "lists hold blocks that their sequence has; debug mode refuses others",
        "first < q_len": EMPTY,
        "first >= q_len": EMPTY,
        "for base in range(0, blocks, BLOCK_K)": ONE_TURN,
        "for base in range(0, top_k, BLOCK_K)": ONE_TURN,
        "for step in tl.range(0, (i_end - i_begin + PARTS - 1) // PARTS * PIECES)": ONE_TURN,
        "i < i_end": "what is loaded ahead for the step after the last, and what lies behind the last chosen block",
        "member < QUERIES": "no block is marked for that query",
        "offs < blocks": "the mark behind the last block is of no block: its keys lie behind the sequence",
        "offset < BLOCK_SIZE": "the next block's first key, in a lane of a block that has no such key",
        "token < q_len": "a row behind the last query is read and not written; one outside of the tensor is found",
        "tl.load(table_ptr + block, mask=live, other=-1) >= 0": "a lane of no block, which is masked off all the same",
        "tl.max(tl.broadcast_to(live, [queries.q.shape[0], BLOCK_N]).to(tl.int32), 0) > 0": INSIDE,
    },
    "kernels/plan.py": {
        "block * BLOCK_SIZE < tile[:, None] * TILE + TILE": "where blocks divide tiles no lane is at the next tile",
        "block < blocks": "its tile lies behind the sequence, or has that block as its last and drops it by its end",
        "for base in range(0, items, BLOCK_S)": ONE_TURN,
        "for base in range(0, num_rows, BLOCK_S)": ONE_TURN,
        "offs < num_rows": "one row more is read, whose column of attended tiles is that of no decode",
        "tile < sink_hi": "sink tokens end inside of the window's tiles, or the tile is of no block",
        "tile < tile_hi": "the last query of a decode is the last token: no tile behind it is live",
        "tile >= sink_lo": "sink tokens begin at tile 0 or where none is attended to",
        "tile >= tile_lo": "without a window every tile counts from 0 on, which no tile is below",
        "tile[:, None] < num_tiles": "the blocks of that tile lie behind the sequence's last",
    },
    "kernels/predicate.py": {
        "ahead < _ahead(tl.maximum(hi, key_begin), key_begin)": "one key more is read and masked, or " + DEAD_ROWS,
        "ahead < sink_end": "one key more is read, or one that a row has in its window, or has not at all",
        "ahead >= _ahead(tl.maximum(lo, key_begin), key_begin)": DEAD_ROWS,
        "begin + BLOCK_SIZE > pos - mask.window + 1": "one block more is marked, all of whose keys the window drops",
        "begin < mask.num_sink_tokens": "one block more is marked, none of whose keys is a sink token",
        "hi > lo": "an empty range gets a tile, all of whose keys are masked off",
        "limit > key_begin": "no sink token gets a tile, all of whose keys are masked off",
    },
    "kernels/program.py": {
        "full_end > full_begin": NO_TILE,
        "i_end - skip > i_begin": NO_TILE,
        "tl.log2(denominator)": LOG2,
        "tl.log2(safe_total)": LOG2,
        "token < sequence.q_len": "a row behind the last query is read, not written; outside of the tensor it is found",
    },
    "kernels/scores.py": {"tl.log2(denominator)": LOG2},
    "kernels/mainloop.py": {
        "for j in tl.range(0, steps)": ONE_TURN,
        "i < i_end": "what is loaded ahead for the step after the last",
        "i < jump": "what is loaded ahead for the step after the last, or nothing is skipped",
        "i < tiles.n_sink": "the window's first tile by its rank, or what is loaded ahead for the step after the last",
        "key + offset < hi": "a block's number is read, and the keys' own masks drop its keys",
        "key < hi": "a block's number is read ahead for the step after the last",
        "own < tree.keys": "a token that no mask has a bit for lies behind the sequence",
        "start < hi": "a block's number is read, and the keys' own masks drop its keys",
        "start < walk.hi": "a step is taken, and the keys' own masks drop its keys",
        "t < hi": INSIDE,
        "t >= tree.own_begin": "the first of a call's own tokens is at depth 0, where its position is its place",
    },
    "kernels/codes.py": {"magnitude < 1015021568": "at the smallest normal number both formulas give the same code"},
    "kernels/move_rows.py": {
        "pid < first + programs": "the first program of the next tensor has no row of this one",
        "source >= 0": "a lane that has no row reads -1, and writes nothing",
        "target >= 0": "a lane that has no row reads -1, and writes nothing",
    },
    "_list_attention_kernel": {"several": SEVERAL},
    "_list_blocks_kernel": {"several": SEVERAL},
    "_plan_tiles_kernel": {"several": SEVERAL},
    "kernels/join_prefix.py": {
        "block < max_blocks": "a sequence has no more blocks than its table, which debug mode checks",
        "for _ in range(steps)": "one more halving of a range that is empty",
    },
    "kernels/merge_attention.py": {"tl.log(total)": LOG2},
    "kernels/rope_and_cache.py": {"offs_d < ROTARY_DIM": "the partner of one element more is read, which nothing uses"},
    "kernels/shared_prefix.py": {"for base in range(0, num_seqs, BLOCK_S)": ONE_TURN},
}


def reasons() -> list[str]:
    """Return the places that have a reason."""
    return [f"{path}: {expression}" for path, found in REASONS.items() for expression in found]


def reason(place: str) -> str | None:
    """Return why the neighbour of a comparison changes nothing, None if no reason is known."""
    path, _, expression = place.partition(": ")
    return REASONS.get(path, {}).get(expression)
