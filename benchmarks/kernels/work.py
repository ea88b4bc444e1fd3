"""Work of attention steps, counted on compiled kernels without a GPU: `make work`.

The emulator (tests/emulator) runs kernels compiled for an architecture. It counts warp instructions by kind, the bytes
of 32-byte sectors that loads and stores touch, and launches. Our steps include their plan. The Triton kernel of vLLM
(--vllm is the folder of the wheel's sources) runs on the same tensors, and the results are compared. The figures count
work; they are not times. A row has the digest of the launches that it was counted on (`sources`). It is counted again
when the tree launches something else; --all counts every row.

Examples:
    EMULATOR_ARCH=sm_90 PYTHONPATH=src:tests python -m benchmarks work --vllm .peers/vllm-0.33
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulator.device
import torch
import triton
from emulator.launch import Session

from ..harness import tables
from ..harness.conditions import commit
from ..harness.experiment import Experiment, option
from ..operators.attention_peers import vllm_version
from .steps import HEAD_DIM, HEADS, KV_HEADS, LATENT_BLOCK, LATENT_VALUE, STEPS, Batch, ours, sources

SEGMENTS, LATENT_SPLITS = 16, 4  # vLLM's
KINDS = ("global load", "global store", "shared memory", "matrix product", "synchronization", "other")
WORK = ("instructions", "loaded_bytes", "stored_bytes", "launches")
OURS, VLLM = "pc", "vLLM Triton"
TABLE = tables.RESULTS / "work.csv"


def load_vllm(folder: Path) -> Callable[[Batch], torch.Tensor]:
    """Return a function that runs vLLM's Triton kernels, imported from its sources."""
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # vLLM disables its kernels if it finds no device, unless devices are hidden
    )
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
    """Return the result of a step and its work."""
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
    """Return a row for each provider.

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
        row |= {"architecture": emulator.device.ARCH, "version": version if provider == VLLM else ""}
        row |= {"torch": torch.__version__, "triton": triton.__version__}
        row |= {"sources": "" if provider == VLLM else _sources(name)}
        rows.append(row | {"commit": commit(), "date": datetime.date.today().isoformat()})
    return rows


def _sources(name: str) -> str:
    return sources()[emulator.device.ARCH, triton.__version__, name]


def rows(given: argparse.Namespace) -> Iterator[tables.Row]:
    """Yield the rows of steps whose rows are missing or of other sources."""
    vllm = None if given.vllm is None else load_vllm(given.vllm)
    known = {tuple(row[name] for name in KEY): row for row in tables.read_rows(given.output)}
    for name in (name for name in STEPS if given.case in name):
        place = (triton.__version__, emulator.device.ARCH, name)
        row, theirs = known.get((*place, OURS)), known.get((*place, VLLM))
        step = STEPS[name]
        has_rival = vllm is not None and not (step.top_k or step.kept or step.packed)  # which its kernel cannot do
        if given.all or not row or row.get("sources") != _sources(name) or (has_rival and not theirs):
            yield from measure(name, vllm if has_rival and (given.all or not theirs) else None, given.version)


KEY = ("triton", "architecture", "case", "provider")
main = Experiment(
    "../work.csv",
    rows,
    {
        "--vllm": option(type=Path, help="folder of the unpacked wheel; without it only our steps are counted"),
        "--version": option("0.33.0", "of that wheel"),
        "--case": option("", "steps whose name contains this"),
        "--all": option(False, "rows that hold too"),
    },
    KEY,
    conditions=False,
).main
