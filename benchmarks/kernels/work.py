"""Work of attention steps, counted on compiled kernels without a GPU: `make work`.

The emulator (tests/emulator) runs kernels compiled for an architecture. It counts warp instructions by kind, the bytes
of 32-byte sectors that loads and stores touch, and launches. Our steps include their plan. vLLM's Triton kernel
(--vllm is the folder of the wheel's sources) runs on the same tensors, and the results are compared. The figures count
work; they are not times. A row has the digest of the launches that it was counted on (`sources`). It is counted again
when the tree launches something else; --all counts every row.

Usage:

    EMULATOR_ARCH=sm_90 PYTHONPATH=src:tests python -m benchmarks work --vllm .peers/vllm-src
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulator.device
import torch
import triton
from emulator.launch import Session

from ..harness import tables
from ..harness.conditions import commit
from ..operators.attention_peers import vllm_version
from .steps import HEAD_DIM, HEADS, KV_HEADS, LATENT_BLOCK, LATENT_VALUE, STEPS, Batch, ours, sources

SEGMENTS, LATENT_SPLITS = 16, 4  # vLLM's
KINDS = ("global load", "global store", "shared memory", "matrix product", "synchronization", "other")
WORK = ("instructions", "loaded_bytes", "stored_bytes", "launches")
COLUMNS = ("case", "provider", *WORK, *(kind.replace(" ", "_") for kind in KINDS), "difference", "architecture")
COLUMNS += ("version", "torch", "triton", "sources", "commit", "date")
OURS, VLLM = "pc", "vLLM Triton"
TABLE = tables.RESULTS / "work.csv"


def load_vllm(folder: Path) -> Callable[[Batch], torch.Tensor]:
    """The Triton kernels of vLLM out of its sources."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where vLLM finds no device it turns its kernels off, unless none is meant
    sys.path.append(str(folder))
    vllm_version()
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    def run_latent(batch: Batch) -> torch.Tensor:
        rows, heads = batch.key, batch.query.shape[:2]
        out = torch.empty(*heads, LATENT_VALUE, dtype=batch.query.dtype)
        parts = torch.empty(*heads, LATENT_SPLITS, LATENT_VALUE + 1)
        decode_attention_fwd(
            batch.query, rows, rows[..., :LATENT_VALUE], out, torch.empty(heads), batch.tables, batch.lens, parts,
            LATENT_SPLITS, HEAD_DIM**-0.5, LATENT_BLOCK,
        )  # fmt: skip
        return out

    def run(batch: Batch) -> torch.Tensor:
        if batch.step.latent:
            return run_latent(batch)
        step, tokens, out = batch.step, batch.query.shape[0], torch.empty_like(batch.query)
        partial = [torch.empty(tokens, HEADS, SEGMENTS, *last) for last in ((HEAD_DIM,), (), ())]
        options: dict[str, Any] = {}
        if step.prefix:
            options["rswa_prefix_lens"] = torch.full((1,), step.prefix, dtype=torch.int32)
            options["rswa_window"] = step.window
        window = (step.window - 1, 0) if step.window and not step.prefix else (-1, -1)
        unified_attention(
            batch.query, batch.key, batch.value, out, batch.starts, batch.most, batch.lens, max(step.seq_lens),
            HEAD_DIM**-0.5, True, window, batch.tables, 0.0, None, None, None,
            seq_threshold_3D=128 // KV_HEADS, num_par_softmax_segments=SEGMENTS, softmax_segm_output=partial[0],
            softmax_segm_max=partial[1], softmax_segm_expsum=partial[2], **options,
        )  # fmt: skip
        return out

    return run


def counted(run: Callable[[Batch], torch.Tensor], batch: Batch) -> tuple[torch.Tensor, dict[str, str]]:
    """The result of a step and its work."""
    first = len(Session.launches)
    known = {launch.program for launch in Session.launches}
    before = {program: program.kinds() for program in known}
    out = run(batch)
    launches = Session.launches[first:]
    work = {"instructions": sum(n.instructions for n in launches), "launches": len(launches)}
    work |= {"loaded_bytes": sum(n.loaded for n in launches), "stored_bytes": sum(n.stored for n in launches)}
    for kind in KINDS:
        now = sum(program.kinds()[kind] for program in {n.program for n in launches})
        earlier = sum(before[program][kind] for program in {n.program for n in launches} & known)
        work[kind.replace(" ", "_")] = now - earlier
    return out, {name: str(value) for name, value in work.items()}


def measure(name: str, vllm: Callable[[Batch], torch.Tensor] | None, version: str) -> list[tables.Row]:
    """A row for each provider.

    Raises:
        ValueError: The two results differ by more than bfloat16 explains.
    """
    batch = Batch(STEPS[name])
    results = {OURS: counted(ours, batch)}
    if vllm is not None:
        results[VLLM] = counted(vllm, batch)
    rows = []
    for provider, (out, work) in results.items():
        difference = (out.float() - results[OURS][0].float()).abs().max().item()
        if not difference <= 0.02:
            raise ValueError(f"{name}: {provider} and pc differ by {difference}")
        row = {"case": name, "provider": provider, **work, "difference": f"{difference:.1e}"}
        row |= {"architecture": emulator.device.ARCH, "torch": torch.__version__, "triton": triton.__version__}
        row |= {"version": version if provider == VLLM else "", "sources": "" if provider == VLLM else _sources(name)}
        rows.append(row | {"commit": commit(), "date": datetime.date.today().isoformat()})
    return rows


def _sources(name: str) -> str:
    return sources()[emulator.device.ARCH, triton.__version__, name]


def _key(row: tables.Row) -> tuple[str, ...]:
    return row["triton"], row["architecture"], row["case"], row["provider"]


def main() -> int:
    """Counts what is missing or of other sources, and writes results/work.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder of the unpacked wheel; without it ours alone is counted")
    parser.add_argument("--version", default="0.33.0", help="of that wheel")
    parser.add_argument("--case", default="", help="steps whose name contains this")
    parser.add_argument("--all", action="store_true", help="rows that hold too")
    parser.add_argument("--output", type=Path, default=TABLE)
    given = parser.parse_args()
    torch.set_num_threads(1)
    vllm = None if given.vllm is None else load_vllm(given.vllm)
    for name in STEPS:
        if given.case not in name:
            continue
        known = {_key(row): row for row in tables.read_rows(given.output)}
        place = (triton.__version__, emulator.device.ARCH, name)
        row, theirs = known.get((*place, OURS)), known.get((*place, VLLM))
        step = STEPS[name]
        has_rival = vllm is not None and not (step.top_k or step.kept or step.packed)  # which its kernel cannot say
        if not given.all and row and row.get("sources") == _sources(name) and (theirs or not has_rival):
            continue
        found = measure(name, vllm if has_rival and (given.all or not theirs) else None, given.version)
        for row in found:
            print(
                f"{name} on {place[1]}, triton {place[0]}: {row['provider']}, {int(row['instructions']):,} instructions"
            )
        rows = (known | {_key(row): row for row in found}).values()
        order = list(STEPS)
        rows = sorted(rows, key=lambda row: (*_key(row)[:2], order.index(row["case"]), row["provider"]))
        tables.write_rows(given.output, rows, COLUMNS)
    return 0
