"""What the kernels have to reach, and whether the rows of a run do. A decode's bars are an H200's, scaled by memory."""

from __future__ import annotations

from pathlib import Path

from ..harness.ceilings import PUBLISHED
from ..harness.registry import OURS
from ..harness.tables import Row, read_rows

# Microseconds of a decode in a CUDA graph: bfloat16, heads 32/8, head_dim 128, blocks of 16.
DECODE = {"1x1k": 11, "1x4k": 14, "8x4k": 39, "1x32k": 39, "32x4k": 136, "8x16k": 136, "8x32k": 272}
# TFLOP/s of a causal prefill.
PREFILL = {"1x4k": 500, "1x8k": 500, "1x16k": 500}
# Times what the dense kernel takes over the live tokens alone.
GAP = 1.1
COMPACTED = "compaction + pc.paged_attention"


def check_bars(folder: Path) -> list[str]:
    """A line per bar, those that are not met or not measured first.

    Args:
        folder: A device's results.
    """
    lines = []
    dense = _graph_rows(folder / "paged_attention.csv")
    slower = _slower(folder)
    for case, bar in ((case, round(bar * slower)) for case, bar in DECODE.items()):
        row = dense.get((f"decode {case}", OURS))
        took = None if row is None else float(row["p50_us"])
        lines.append(_line(f"decode {case}", took, took is not None and took <= bar, f"us, at most {bar}"))
    for case, bar in PREFILL.items():
        row = dense.get((f"prefill {case}", OURS))
        speed = None if row is None else float(row["flops"]) / float(row["p50_us"]) / 1e6
        lines.append(_line(f"prefill {case}", speed, speed is not None and speed >= bar, f"TFLOP/s, at least {bar}"))
    gaps = _graph_rows(folder / "sparse_gap_attention.csv")
    rivals = {case: float(row["p50_us"]) for (case, provider), row in gaps.items() if provider == COMPACTED}
    if not rivals:
        lines.append(_line("gap over compaction", None, False, f"times, at most {GAP}"))
    for case, rival in rivals.items():
        ratio = float(gaps[case, OURS]["p50_us"]) / rival if (case, OURS) in gaps else None
        met = ratio is not None and ratio <= GAP
        lines.append(_line(f"gap over compaction, {case}", ratio, met, f"times, at most {GAP}"))
    return sorted(lines, key=lambda line: ("missing", "not met", "met").index(line.split(": ")[0]))


def _slower(folder: Path) -> float:
    """How much slower the memory of the device is than an H200's, as published; 1 where that is not known."""
    devices = {row["device"] for row in read_rows(folder / "paged_attention.csv") if row.get("device")}
    found = [PUBLISHED["H200"][0] / PUBLISHED[name][0] for name in PUBLISHED for device in devices if name in device]
    return found[0] if found else 1.0


def _graph_rows(path: Path) -> dict[tuple[str, str], Row]:
    return {
        (row["case"], row["provider"]): row for row in read_rows(path) if row["mode"] == "graph" and row.get("p50_us")
    }


def _line(what: str, value: float | None, met: bool, needs: str) -> str:
    if value is None:
        return f"missing: {what}, {needs}"
    return f"{'met' if met else 'not met'}: {what}, {value:.3g} {needs}"
