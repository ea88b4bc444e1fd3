"""Work of attention steps, counted on compiled kernels without a GPU: `make work`.

Kernels are compiled for an architecture and run in the emulator (tests/emulator), which counts warp instructions by
kind, the bytes of 32-byte sectors that loads and stores touch, and launches. Ours includes its plan. Beside it runs
vLLM's Triton kernel, from the wheel's sources in a folder (--vllm), on the same tensors; the results are compared.
Work is no time: nothing here says how long a step takes.

    EMULATOR_ARCH=sm_90 PYTHONPATH=src:tests python -m benchmarks work --vllm .peers/vllm-src
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emulator.device
import torch
import triton
import triton.language as tl
from emulator.launch import Session

import pc

from ..harness import tables
from ..harness.tables import ROOT

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
SEGMENTS = 16  # vLLM's
# Columns of latent rows, of these those that are values, tokens of their blocks, and vLLM's splits of them.
LATENT_DIM, LATENT_VALUE, LATENT_BLOCK, LATENT_SPLITS = 576, 512, 64, 4
KINDS = ("global load", "global store", "shared memory", "matrix product", "synchronization", "other")
WORK = ("instructions", "loaded_bytes", "stored_bytes", "launches")
COLUMNS = ("case", "provider", *WORK, *(kind.replace(" ", "_") for kind in KINDS), "difference", "architecture")
COLUMNS += ("version", "torch", "triton", "commit", "date")


@dataclasses.dataclass(frozen=True)
class Step:
    """Lengths of a batch; `q_lens` of one each is a decode. `latent`: heads over latent rows, 0 for a usual cache."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    window: int = 0
    prefix: int = 0
    latent: int = 0


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
}


class Batch:
    """Tensors of a step, its block table shuffled."""

    def __init__(self, step: Step) -> None:
        generator = torch.Generator().manual_seed(0)
        q_lens = step.q_lens or (1,) * len(step.seq_lens)
        size = LATENT_BLOCK if step.latent else BLOCK
        blocks = [-(-length // size) for length in step.seq_lens]
        shape = (sum(blocks) + 1, size, *((1, LATENT_DIM) if step.latent else (KV_HEADS, HEAD_DIM)))
        self.key, self.value = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
        numbers = iter((torch.randperm(sum(blocks), generator=generator) + 1).split(blocks))
        self.tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, count in enumerate(blocks):
            self.tables[row, :count] = next(numbers)
        heads = (step.latent, LATENT_DIM) if step.latent else (HEADS, HEAD_DIM)
        self.query = torch.randn(sum(q_lens), *heads, generator=generator).bfloat16()
        self.starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        self.lens = torch.tensor(step.seq_lens, dtype=torch.int32)
        self.most, self.step = max(q_lens), step


def ours(batch: Batch) -> torch.Tensor:
    """The operator that serves the step."""
    step, given = batch.step, {"max_query_len": batch.most, "max_seq_len": max(batch.step.seq_lens)}
    tensors = (batch.query, batch.key, batch.value)
    rest, scale = (batch.lens, batch.starts), HEAD_DIM**-0.5
    if step.latent:
        return pc.latent_attention(batch.query, batch.key, batch.tables, *rest, scale, LATENT_VALUE, **given)
    if step.prefix:
        holes = batch.tables.clone()
        holes[0, -(-step.prefix // BLOCK) : (step.seq_lens[0] - step.window) // BLOCK] = -1
        sinks = {"window": step.window, "num_sink_tokens": step.prefix}
        return pc.sparse_gap_attention(*tensors, holes, *rest, None, scale, **sinks, **given)
    if step.window:
        return pc.sliding_window_attention(*tensors, batch.tables, *rest, scale, step.window, **given)
    return pc.paged_attention(*tensors, batch.tables, *rest, scale, **given)


def load_vllm(folder: Path) -> Callable[[Batch], torch.Tensor]:
    """The Triton kernel of vLLM out of its sources, with stand-ins for the rest of vLLM."""

    def stand_in(name: str, **content: Any) -> None:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(content)

    class Platform:
        def fp8_dtype(self) -> torch.dtype:
            return torch.float8_e4m3fn

        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *args, **kwargs: False

    class Modes:
        """Numbers of vLLM's KVQuantMode."""

        NONE, FP8_PER_TENSOR, INT8_PER_TOKEN_HEAD, FP8_PER_TOKEN_HEAD, INT4_PER_TOKEN_HEAD = range(5)

    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        stand_in(name, __path__=[])
    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    stand_in("vllm.logger", init_logger=logging.getLogger)
    stand_in("vllm.platforms", current_platform=Platform())
    stand_in("vllm.triton_utils", tl=tl, triton=triton)
    stand_in("vllm.v1.kv_cache_interface", KVQuantMode=Modes)
    for name in ("triton_attention_helpers", "triton_unified_attention", "triton_decode_attention"):
        full = f"vllm.v1.attention.ops.{name}"
        spec = importlib.util.spec_from_file_location(full, folder / f"vllm/v1/attention/ops/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    kernel = sys.modules["vllm.v1.attention.ops.triton_unified_attention"].unified_attention
    latent = sys.modules["vllm.v1.attention.ops.triton_decode_attention"].decode_attention_fwd

    def run_latent(batch: Batch) -> torch.Tensor:
        rows, heads = batch.key, batch.query.shape[:2]
        out = torch.empty(*heads, LATENT_VALUE, dtype=batch.query.dtype)
        parts = torch.empty(*heads, LATENT_SPLITS, LATENT_VALUE + 1)
        latent(
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
        kernel(
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


def measure(name: str, vllm: Callable[[Batch], torch.Tensor] | None, version: str) -> list[dict[str, str]]:
    """A row for each provider.

    Raises:
        ValueError: The two results differ by more than bfloat16 explains.
    """
    batch = Batch(STEPS[name])
    results = {"pc": counted(ours, batch)}
    if vllm is not None:
        results["vLLM Triton"] = counted(vllm, batch)
    rows = []
    for provider, (out, work) in results.items():
        difference = (out.float() - results["pc"][0].float()).abs().max().item()
        if not difference <= 0.02:
            raise ValueError(f"{name}: {provider} and pc differ by {difference}")
        row = {"case": name, "provider": provider, **work, "difference": f"{difference:.1e}"}
        rows.append(row | {"version": version if provider != "pc" else "", **_conditions()})
    return rows


def _conditions() -> dict[str, str]:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "triton_ops", "tests/emulator", "-m benchmarks work")
    return {
        "architecture": emulator.device.ARCH,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if changed else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measures and writes results/work.csv; rows of other architectures and steps stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder of the unpacked wheel; without it ours alone is counted")
    parser.add_argument("--version", default="0.33.0", help="of that wheel")
    parser.add_argument("--case", default="", help="steps whose name contains this")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "work.csv")
    given = parser.parse_args()
    torch.set_num_threads(1)
    vllm = None if given.vllm is None else load_vllm(given.vllm)
    for name in STEPS:
        if given.case not in name:
            continue
        found = measure(name, vllm, given.version)
        for row in found:
            ratio = int(row["instructions"]) / int(found[0]["instructions"])
            print(f"{name}: {row['provider']}, {int(row['instructions']):,} warp instructions, {ratio:.2f} of ours")
        _save(given.output, found)
    return 0


def _save(path: Path, rows: list[dict[str, str]]) -> None:
    rows = [*tables.read_rows(path), *rows]
    found = {(row["architecture"], row["case"], row["provider"]): row for row in rows}
    order = {name: place for place, name in enumerate(STEPS)}
    rows = sorted(found.values(), key=lambda row: (row["architecture"], order[row["case"]], row["provider"]))
    tables.write_rows(path, rows, COLUMNS)
