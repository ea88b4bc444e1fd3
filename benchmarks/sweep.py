"""Sweeps the attention kernel's constants and writes each candidate's time, and which to take and why."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pc
from pc.triton_ops._attention import launch
from pc.triton_ops._attention.constants import Tiles

from . import timing
from .attention import AttentionCase, AttentionInputs
from .conditions import conditions
from .registry import WrongError

# A change below this is noise: the present constants stay.
WORTH = 0.97


@dataclasses.dataclass(frozen=True)
class Regime:
    """What one set of constants serves."""

    name: str
    head_dim: int
    block_size: int
    case: AttentionCase

    @property
    def key(self) -> str:
        """As it stands in the table."""
        return f"{self.name} head_dim {self.head_dim} block {self.block_size}"


def regimes(tiny: bool = False) -> list[Regime]:
    """Decode and prefill, for each head_dim and for blocks smaller and as large as a tile."""
    found = []
    for name, head_dim, block_size in itertools.product(("decode", "prefill"), (64, 128, 256), (16, 64)):
        length = 128 if tiny else 4096
        batch, q_len = (2 if tiny else 8, 1) if name == "decode" else (1, length)
        case = AttentionCase(
            (length,) * batch,
            (min(q_len, 32) if tiny else q_len,) * batch,
            heads=(4, 1) if tiny else (32, 8) if head_dim < 256 else (16, 4),
            head_dim=head_dim,
            block_size=block_size,
        )
        found.append(Regime(name, head_dim, block_size, case))
    return found


def candidates(regime: Regime, present: Tiles) -> list[Tiles]:
    """The present constants first, then all others that may compile to something useful."""
    if regime.name == "decode":
        grid: Any = itertools.product((present.block_m,), (16, 32, 64), (4, 8), (2, 3, 4), (False,))
    else:
        grid = itertools.product((64, 128), (32, 64), (4, 8), (2, 3), (False, True))
    return list(dict.fromkeys([present, *(Tiles(*constants) for constants in grid)]))


def sweep_regime(
    regime: Regime, device: torch.device, seconds: float, limit: int | None = None
) -> list[dict[str, str]]:
    """Times every candidate side by side, those that are right; one row each."""
    inputs = AttentionInputs(regime.case, device, 0 if limit else 256 << 20)
    function = f"{regime.name}_tiles"
    original = getattr(launch, function)
    present: list[Tiles] = []

    def observe(*arguments: Any) -> Tiles:
        present.append(original(*arguments))
        return present[-1]

    with mock.patch.object(launch, function, observe):
        _call(inputs.calls[0])
    if not present:  # the references run: there is nothing to choose
        return []
    rows, ready = [], {}
    for tiles in candidates(regime, present[0])[:limit]:
        name = " ".join(f"{field}={value}" for field, value in dataclasses.asdict(tiles).items())
        row = {"regime": regime.key, "present": str(int(tiles == present[0])), **_strings(tiles)}
        try:
            with mock.patch.object(launch, function, return_value=tiles):
                inputs.check(inputs.calls[0], lambda: _call(inputs.calls[0]))
        except WrongError as error:
            rows.append(row | {"note": f"wrong: {error}"})
        except Exception as error:
            rows.append(row | {"note": f"fails: {str(error).splitlines()[0][:120] if str(error) else type(error)}"})
        else:
            rows.append(row)
            ready[name] = (row, tiles)
    times = _time(inputs, function, {name: tiles for name, (_, tiles) in ready.items()}, device, seconds)
    for name, (row, _) in ready.items():
        row["p50_us"] = f"{times[name].p50:.2f}"
    _choose(rows)
    return [row | conditions(device.type) for row in rows]


def _call(call: Any, plan: torch.Tensor | None = None) -> torch.Tensor:
    out: torch.Tensor = pc.paged_attention(**call.arguments("paged_attention"), plan=plan)
    return out


def _strings(tiles: Tiles) -> dict[str, str]:
    return {field: str(int(value)) for field, value in dataclasses.asdict(tiles).items()}


def _time(
    inputs: AttentionInputs, function: str, chosen: dict[str, Tiles], device: torch.device, seconds: float
) -> dict[str, timing.Quantiles]:
    plans = {
        id(call): pc.attention_plan(
            call.block_tables,
            call.seq_lens,
            call.query_start_loc,
            call.case.block_size,
            num_kv_heads=call.case.heads[1],
        )
        for call in inputs.calls
    }

    def runs(tiles: Tiles) -> list[timing.Run]:
        def run(call: Any) -> None:
            with mock.patch.object(launch, function, return_value=tiles):
                _call(call, plans[id(call)])

        return [lambda call=call: run(call) for call in inputs.calls]

    prepared = {name: runs(tiles) for name, tiles in chosen.items()}
    if device.type != "cuda":
        return timing.time_eager(prepared, device, seconds)
    graphs = {name: (timing.capture(all_runs), len(all_runs)) for name, all_runs in prepared.items()}
    return timing.time_graphs(graphs, seconds)


def _choose(rows: list[dict[str, str]]) -> None:
    """Marks the candidate to take, with its reason."""
    timed = [row for row in rows if "p50_us" in row]
    if not timed:
        return
    best = min(timed, key=lambda row: float(row["p50_us"]))
    now = next((row for row in timed if row["present"] == "1"), None)
    if now is not None and float(best["p50_us"]) > WORTH * float(now["p50_us"]):
        now["reason"] = f"present constants, within noise of the fastest of {len(timed)}"
    else:
        gain = (
            "" if now is None else f", {float(now['p50_us']) / float(best['p50_us']):.2f} times as fast as the present"
        )
        best["reason"] = f"fastest of {len(timed)}{gain}"


COLUMNS = ("regime", "present", "reason", "p50_us", *(field.name for field in dataclasses.fields(Tiles)), "note")


def save_sweep(path: Path, rows: list[dict[str, str]]) -> None:
    """Replaces the rows of the regimes that were swept now."""
    before = []
    if path.exists():
        with path.open(newline="") as file:
            before = [row for row in csv.DictReader(file) if row["regime"] not in {r["regime"] for r in rows}]
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *conditions("cpu")], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*before, *rows], key=lambda row: row["regime"]))
