"""The attention steps whose work is counted, and a digest of what each launches. Rows of `work.csv` name it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from types import SimpleNamespace
from typing import Any

import torch

import pc

from ..harness.inputs import paged_batch
from ..operators.attention import AttentionCall, AttentionCase

# The targets and versions of triton for which work is counted.
TARGETS = ("sm_80", "sm_90")
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
# Columns of latent rows, the number of them that are values, and tokens of a block of such rows.
LATENT_DIM, LATENT_VALUE, LATENT_BLOCK = 576, 512, 64


@dataclasses.dataclass(frozen=True)
class Step:
    """Lengths of a batch; `q_lens` of one each is a decode. `latent`: heads over latent rows, 0 for a usual cache.

    `top_k`: blocks that each query and KV head attends to; 0: all. `kept`: the share of a compressed document that KV
    heads keep, each head another part; 0: no document. The document is the sequence before its last block. `packed`:
    the share of blocks that vLLM's adapter packs a compressed prompt into; 0: there is none.
    """

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    window: int = 0
    prefix: int = 0
    latent: int = 0
    top_k: int = 0
    kept: float = 0
    packed: float = 0


# The matrix of shapes that serving is measured on, scaled down to what an emulator runs in seconds.
STEPS = {
    "decode 4 x 512": Step((512,) * 4),
    "decode 1 x 2k": Step((2048,)),
    "ragged decode 1 x 2k + 7 x 64": Step((2048,) + (64,) * 7),
    "prefill 256": Step((256,), (256,)),
    "chunk of 64 over 512": Step((576,), (64,)),
    "window 128 of 2k": Step((2048,), window=128),
    "prefix 64 + window 128 of 2k": Step((2048,), window=128, prefix=64),
    "latent decode 2 x 512, 16 heads": Step((512,) * 2, latent=16),
    "latent decode 1 x 1k, 128 heads": Step((1024,), latent=128),
    "decode 4 x 2k, 16 blocks a head": Step((2048,) * 4, top_k=16),
    "latent decode 2 x 2k, 16 heads, 8 blocks": Step((2048,) * 2, latent=16, top_k=8),
    "decode 1 x 4k": Step((4096,)),
    "decode 1 x 2k, half of a document kept": Step((2048,), kept=0.5),
    "decode 1 x 4k, half of a document kept": Step((4096,), kept=0.5),
    "decode 1 x 2k, packed into half of its blocks": Step((2048,), packed=0.5),
    "decode 1 x 4k, packed into half of its blocks": Step((4096,), packed=0.5),
}


class Batch:
    """The call of a step on drawn tensors, its block table shuffled.

    Attributes:
        call: The call without holes.
        order: For a compressed document, the rank of each token for each KV head.
        behind: The layer behind a compressed document.
    """

    def __init__(self, step: Step) -> None:
        generator = torch.Generator().manual_seed(0)
        q_lens = step.q_lens or (1,) * len(step.seq_lens)
        heads, head_dim = ((step.latent, 1), LATENT_DIM) if step.latent else ((HEADS, KV_HEADS), HEAD_DIM)
        size = LATENT_BLOCK if step.latent else BLOCK
        blocks = [-(-length // size) for length in step.seq_lens]
        shape = (sum(blocks) + 1, size, heads[1], head_dim)
        key, value = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
        numbers = torch.randperm(sum(blocks), generator=generator) + 1
        tables, lens, starts = paged_batch(step.seq_lens, q_lens, size, numbers)
        query = torch.randn(sum(q_lens), heads[0], head_dim, generator=generator).bfloat16()
        lists = None
        if step.packed:
            tables, lens = _without_holes(tables, lens, round(step.packed * (blocks[0] - 1)))
        if step.top_k:
            drawn = [torch.randperm(min(blocks), generator=generator) for _ in range(sum(q_lens) * heads[1])]
            lists = torch.stack(drawn)[:, : step.top_k].sort(1).values.int().view(sum(q_lens), heads[1], step.top_k)
        sizes = {"window": step.window, "num_sink_tokens": step.prefix, "scale": HEAD_DIM**-0.5}
        sizes |= {"value_dim": LATENT_VALUE} if step.latent else {}
        case = AttentionCase(tuple(lens.tolist()), q_lens, heads, head_dim, size, **sizes)
        self.step = step
        self.call = AttentionCall(case, query, key, value, tables, lens, starts, query_blocks=lists)
        self.order = torch.rand(KV_HEADS, step.seq_lens[0] - BLOCK, generator=generator).argsort(-1).argsort(-1)
        self.behind = behind_document(self) if step.kept else None


def _without_holes(tables: torch.Tensor, lens: torch.Tensor, packed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tables and lengths that vLLM's adapter makes for a prompt that is packed into `packed` blocks."""
    from pc.integrations.vllm.compression.worker import Compressor

    compressor: Any = SimpleNamespace(block_size=BLOCK)
    compressor._holes = [(packed, tables.shape[1] - 1 - packed)] * len(tables)
    tables[:, packed:-1] = -1
    return Compressor.close_holes(compressor, tables, lens, int(lens.max()))[:2]


def behind_document(batch: Batch) -> Any:
    """Return a layer of HuggingFace's adapter in the second decode of a call, with the document's plan made before."""
    from pc.integrations.huggingface.compression import kept as whole
    from pc.integrations.huggingface.compression import layers
    from pc.integrations.huggingface.runners.dispatch import MARK

    length = batch.order.shape[1]  # of the document; own tokens fill a block
    sides = [
        side.flatten(0, 1)[BLOCK:].transpose(0, 1)[None] for side in (batch.call.key_cache, batch.call.value_cache)
    ]
    kept = (torch.linspace(0.5, 1.5, KV_HEADS) * batch.step.kept * length).round()
    layer = whole.keep(*(side[0, :, :length] for side in sides), batch.order < kept[:, None])
    cache = layers.question_cache(whole.Content({0: layer}, torch.arange(length), length, 0, b""))

    def behind(own: slice) -> Any:
        return getattr(cache.update(*(side[:, :, own] for side in sides), 0)[0], MARK)

    _attend_behind(batch, behind(slice(length, -1)))
    return behind(slice(-1, None))


def _attend_behind(batch: Batch, behind: Any) -> torch.Tensor:
    from pc.integrations.huggingface.runners.dispatch import MarkedCall

    call = batch.call
    call = MarkedCall(call.query.transpose(0, 1)[None], call.key_cache, call.value_cache, call.scale)
    out: torch.Tensor = behind.attend(call)
    return out.flatten(0, 1)


def ours(batch: Batch) -> torch.Tensor:
    """Run the operator that serves a step."""
    step, call = batch.step, batch.call
    if batch.behind is not None:
        return _attend_behind(batch, batch.behind)
    if step.prefix:
        holes = call.block_tables.clone()
        holes[0, -(-step.prefix // BLOCK) : (step.seq_lens[0] - step.window) // BLOCK] = -1
        call = dataclasses.replace(call, block_tables=holes)
    op = "sliding_window_attention" if step.window else "paged_attention"
    if step.prefix or step.top_k:
        op = "sparse_latent_attention" if step.latent else "sparse_gap_attention"
    elif step.latent:
        op = "latent_attention"
    out: torch.Tensor = getattr(pc, op)(**call.arguments(op))
    return out


@functools.cache
def sources() -> dict[tuple[str, str, str], str]:
    """Return the digest of what the tree launches now, by target, version of triton and step."""
    from .launches import run_on_cpu

    return {tuple(key): value for key, value in json.loads(run_on_cpu("-m", "benchmarks", "launches"))}


def main() -> None:
    """Print the digest of every step on each target, with the constants of each triton version, as JSON."""
    import triton

    from . import launches

    torch.set_num_threads(1)
    drawn: dict[str, Batch] = {}  # drawing takes longest, so targets share batches, but no launches
    found = []
    for target, version in itertools.product(TARGETS, VERSIONS):
        triton.__version__ = version
        with launches.recorded_for(target) as recorded:
            for name, step in STEPS.items():
                recorded.clear()
                if name not in drawn:
                    drawn[name] = Batch(step)
                elif step.kept:
                    drawn[name].behind = behind_document(drawn[name])
                ours(drawn[name])
                found.append(((target, version, name), launches.digest(recorded)))
    print(json.dumps(found))
