"""Draws the images of docs/hidden_states.md from the state of a real cache: `python docs/images/hidden_states.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import pc

FOLDER = Path(__file__).parent
NUM_BLOCKS, BLOCK_SIZE, HIDDEN, FEATURE = 8, 4, 2, 16
FIRST = "The quick brown fox was tired and slept beneath the shady tree"
SECOND = "The quick brown fox jumped over the dog"
SLOT, ROW, LEFT, TOP = 172, 46, 104, 50
STYLE = """
  .page { fill: #ffffff } .slot { fill: #f3f6fa; stroke: #8b98a8 }
  .empty { fill: none; stroke: #8b98a8; stroke-dasharray: 4 3 }
  .new { fill: #dbeafe; stroke: #3b82f6 } .hit { fill: #dcfce7; stroke: #16a34a } .value { fill: #1d4ed8 }
  text { font: 14px system-ui, sans-serif; fill: #1f2937 } .small { font-size: 12px; fill: #4b5563 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2129 } .slot { fill: #2b303b } .new { fill: #1e3a5f; stroke: #60a5fa }
    .hit { fill: #14432a; stroke: #4ade80 } .value { fill: #93c5fd }
    text { fill: #e5e7eb } .small { fill: #b6beca }
  }
"""


def rows(words: list[str], width: int) -> torch.Tensor:
    """Rows as a causal model gives them: each depends on all words up to its own."""
    state = torch.tensor([sum(map(ord, " ".join(words[: i + 1]))) for i in range(len(words))], dtype=torch.float64)
    return torch.sin(state[:, None] * torch.arange(1, width + 1) * 12.9898).abs().float()


def steps() -> Iterator[tuple[str, str, pc.TensorCache, dict[int, str], set[int], set[int]]]:
    """After each step: file, title, the cache, the word of each slot, slots just written, slots just read."""
    manager = pc.CacheManager(NUM_BLOCKS, BLOCK_SIZE)
    tensors = pc.TensorCache(manager, NUM_BLOCKS, BLOCK_SIZE)
    tensors.register("hidden_states", (HIDDEN,), torch.float32)
    tensors.register("mm_feature", (FEATURE,), torch.float32)
    vocabulary: dict[str, int] = {}
    held: dict[int, str] = {}
    yield "hidden_states_0.svg", "Nothing is cached", tensors, held, set(), set()
    for number, text in enumerate((FIRST, SECOND), 1):
        words = text.split()
        allocation = manager.allocate(number, [vocabulary.setdefault(word, len(vocabulary)) for word in words])
        start = allocation.num_cached_tokens
        outputs = {"hidden_states": rows(words, HIDDEN)[start:], "mm_feature": rows(words, FEATURE)[start:]}
        tensors.store(pc.Step.of({number: allocation}, outputs))
        manager.commit(number, len(words))
        slots = [int(b) * BLOCK_SIZE + i for b in allocation.block_ids for i in range(BLOCK_SIZE)][: len(words)]
        held.update(zip(slots, words, strict=True))
        title = f"Request {number}: {start} of {len(words)} tokens are a hit, {len(words) - start} are computed"
        yield f"hidden_states_{number}.svg", title, tensors, held, set(slots[start:]), set(slots[:start])


def image(title: str, tensors: pc.TensorCache, held: dict[int, str], new: set[int], hit: set[int]) -> str:
    """One row a block, one box a slot: its word, its hidden state (2 cells) and its mm_feature (16 cells)."""
    width, height = LEFT + BLOCK_SIZE * SLOT + 20, TOP + NUM_BLOCKS * ROW + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        f'<text x="20" y="30">{title}</text>',
    ]
    stored = tensors.stored("hidden_states").reshape(-1)
    for slot in range(NUM_BLOCKS * BLOCK_SIZE):
        block, offset = divmod(slot, BLOCK_SIZE)
        x, y = LEFT + offset * SLOT, TOP + block * ROW
        if not offset:
            parts.append(f'<text class="small" x="20" y="{y + 26}">block {block}</text>')
        kind = "new" if slot in new else "hit" if slot in hit else "slot" if stored[slot] else "empty"
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{SLOT - 6}" height="{ROW - 6}" rx="3"/>')
        if not stored[slot]:
            continue
        parts.append(f'<text x="{x + 8}" y="{y + 17}">{held[slot]}</text>')
        at = x + 8
        for name, cell in (("hidden_states", 10), ("mm_feature", 7)):
            for value in tensors.rows(name)[block, offset].tolist():
                parts.append(
                    f'<rect class="value" x="{at}" y="{y + 23}" width="{cell}" height="12" opacity="{value:.2f}"/>'
                )
                at += cell
            at += 8
    legend = (("new", "stored by this request"), ("hit", "found by it"), ("slot", "held"), ("empty", "empty"))
    for i, (kind, label) in enumerate(legend):
        x, y = LEFT + i * SLOT, TOP + NUM_BLOCKS * ROW + 10
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="16" height="14" rx="2"/>')
        parts.append(f'<text class="small" x="{x + 22}" y="{y + 12}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def images() -> dict[str, str]:
    """Every image by its file."""
    return {file: image(title, *state) for file, title, *state in steps()}


if __name__ == "__main__":
    for file, text in images().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
