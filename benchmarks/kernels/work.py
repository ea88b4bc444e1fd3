"""Work of attention steps, counted on compiled kernels without a GPU: `make work`.

The emulator (tests/emulator) runs kernels compiled for an architecture. It counts warp instructions, the bytes
of 32-byte sectors that loads and stores touch, and launches. Our steps include their plan. The Triton kernel of vLLM
(--vllm is the folder of the wheel's sources) runs on the same tensors, and the results are compared. The figures count
work; they are not times. A row has the digest of the launches that it was counted on (`sources`). It is counted again
when the tree launches something else; --all counts every row.

Examples:
    EMULATOR_ARCH=sm_90 PYTHONPATH=src:tests python -m benchmarks work --vllm .peers/vllm-0.33
"""

from __future__ import annotations

import argparse
import dataclasses
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
from ..operators.attention_peers import run_vllm_latent, run_vllm_triton, vllm_version
from .launches import as_on_a_device
from .steps import LATENT_VALUE, STEPS, Batch, ours, sources

OURS, VLLM = "pc", "vLLM Triton"
TABLE = tables.RESULTS / "work.csv"


def load_vllm(folder: Path) -> None:
    """Let vLLM's Triton kernels be imported from its sources."""
    # vLLM disables its kernels if it finds no device, unless devices are hidden.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path.append(str(folder))
    vllm_version()


def theirs(batch: Batch) -> torch.Tensor:
    """Run vLLM's Triton kernel for a step."""
    step, call = batch.step, batch.call
    if step.latent:
        rows = (call.query, call.key_cache, call.block_tables, call.seq_lens)
        return run_vllm_latent(*rows, LATENT_VALUE, call.scale)()  # type: ignore[no-any-return]
    more: dict[str, Any] = {}
    if step.prefix:
        more = {"rswa_prefix_lens": torch.full((1,), step.prefix, dtype=torch.int32), "rswa_window": step.window}
        call = dataclasses.replace(call, case=dataclasses.replace(call.case, window=0, num_sink_tokens=0))
    return run_vllm_triton(call, **more)()  # type: ignore[no-any-return]


def counted(run: Callable[[Batch], torch.Tensor], batch: Batch) -> tuple[torch.Tensor, dict[str, str]]:
    """Return the result of a step and its work."""
    first = len(Session.launches)
    with as_on_a_device():  # on CPU tensors, a given plan would be made again and compared
        out = run(batch)
    launches = Session.launches[first:]
    work = {"instructions": sum(n.instructions for n in launches), "launches": len(launches)}
    work |= {"loaded_bytes": sum(n.loaded for n in launches), "stored_bytes": sum(n.stored for n in launches)}
    return out, {name: str(value) for name, value in work.items()}


def measure(name: str, with_rival: bool) -> list[tables.Row]:
    """Return our row, and vLLM's if it is wanted.

    Raises:
        ValueError: The two results differ by more than bfloat16 explains.
    """
    batch = Batch(STEPS[name])
    results = {OURS: counted(ours, batch)}
    if with_rival:
        results[VLLM] = counted(theirs, batch)
    rows = []
    for provider, (out, work) in results.items():
        difference = (out.float() - results[OURS][0].float()).abs().max().item()
        if not difference <= 0.02:
            raise ValueError(f"{name}: {provider} and pc differ by {difference}")
        row = {"case": name, "provider": provider, **work, "difference": f"{difference:.1e}"}
        row |= {"architecture": emulator.device.ARCH, "version": vllm_version() if provider == VLLM else ""}
        row |= {"torch": torch.__version__, "triton": triton.__version__}
        row |= {"sources": "" if provider == VLLM else _sources(name)}
        rows.append(row | {"commit": commit(), "date": datetime.date.today().isoformat()})
    return rows


def _sources(name: str) -> str:
    return sources()[emulator.device.ARCH, triton.__version__, name]


def rows(given: argparse.Namespace) -> Iterator[tables.Row]:
    """Yield the rows of steps whose rows are missing or of other sources."""
    if given.vllm is not None:
        load_vllm(given.vllm)
    known = {tuple(row[name] for name in KEY): row for row in tables.read_rows(given.output)}
    for name in (name for name in STEPS if given.case in name):
        place = (triton.__version__, emulator.device.ARCH, name)
        row, step = known.get((*place, OURS)), STEPS[name]
        can_rival = given.vllm is not None and not (step.top_k or step.kept or step.packed)
        with_rival = can_rival and (given.all or (*place, VLLM) not in known)
        if given.all or with_rival or not row or row.get("sources") != _sources(name):
            yield from measure(name, with_rival)


KEY = ("triton", "architecture", "case", "provider")
main = Experiment(
    "../work.csv",
    rows,
    {
        "--vllm": option(type=Path, help="folder of the unpacked wheel; without it only our steps are counted"),
        "--case": option("", "steps whose name contains this"),
        "--all": option(False, "rows that hold too"),
    },
    KEY,
    conditions=False,
).main
