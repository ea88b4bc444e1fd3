"""Sweeps of the attention kernel's constants: the time of each candidate as a row, and which one to take.

python -m benchmarks gpu --only sweep     measure, as a part of `make gpu`
python -m benchmarks sweep --write        from benchmarks/results/*/constants.csv to triton_ops/_attention/constants.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pc
from pc.triton_ops._attention import build
from pc.triton_ops._attention.constants import (
    DECODE_REGISTERS,
    PROGRAMS,
    Tiles,
    architecture,
    next_power_of_2,
    programs_per_processor,
)
from pc.triton_ops._core.cache import forget_choices

from ..harness import timing
from ..harness.conditions import conditions
from ..harness.inputs import Inputs, WrongError
from ..harness.registry import ROOT
from ..harness.tables import read_rows, replaced, write_rows
from ..operators.attention import AttentionCase, attention_inputs

# A change below this is noise: the present constants stay.
WORTH = 0.97
# Candidates that are timed side by side, beside the present constants: after so many, the rows are saved.
TOGETHER = 6
STAGES = (2, 3, 4, 5, 6)
TABLE = ROOT / "triton_ops" / "_attention" / "constants.py"


@dataclasses.dataclass(frozen=True)
class Regime:
    """A case that one set of constants serves."""

    name: str
    case: AttentionCase

    @property
    def key(self) -> str:
        """Return the regime's name in rows."""
        return f"{self.name} head_dim {self.case.head_dim} block {self.case.block_size}"

    @property
    def group(self) -> int:
        """Return the number of query heads of a KV head."""
        return self.case.heads[0] // self.case.heads[1]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of constants.

    Attributes:
        tiles: Tiles of the regime's launch.
        programs: Programs of a decode on a processor.
    """

    tiles: Tiles
    programs: int

    def columns(self) -> dict[str, str]:
        """Return the columns of a row."""
        values = dataclasses.asdict(self.tiles) | {"programs": self.programs}
        return {name: str(int(value)) for name, value in values.items()}


# Heads as models of that head_dim have them: gpt-oss, Llama 3, Gemma 3.
HEADS = {64: (64, 8), 128: (32, 8), 256: (8, 4)}


def regimes(tiny: bool = False) -> list[Regime]:
    """Decode and prefill, for each head_dim and for blocks smaller and as large as a tile; what serves most first."""
    found = []
    for head_dim, name, block_size in itertools.product((128, 64, 256), ("decode", "prefill"), (16, 64)):
        length = 128 if tiny else 4096
        batch, q_len = (2 if tiny else 8, 1) if name == "decode" else (1, length)
        case = AttentionCase(
            (length,) * batch,
            (min(q_len, 32) if tiny else q_len,) * batch,
            heads=(4, 1) if tiny else HEADS[head_dim],
            head_dim=head_dim,
            block_size=block_size,
        )
        found.append(Regime(name, case))
    return found


def regime(key: str, tiny: bool = False) -> Regime:
    """Return the regime with this key."""
    return next(each for each in regimes(tiny) if each.key == key)


def candidates(regime: Regime, present: Candidate, arch: str) -> list[Candidate]:
    """Return the present constants, then other constants that may be better."""
    tiles = present.tiles
    if regime.name == "decode":
        # With the bound on registers that the rules would set: without one some spill that need not.
        warps = sorted({2, 4, tiles.num_warps})
        found = [
            Tiles(tiles.block_m, n, w, stages, tiles.two_loops, max_registers=DECODE_REGISTERS[w])
            for n, w, stages in itertools.product((16, 32, 64), warps, STAGES)
        ]
    else:
        # 4 warps spill with 128 rows, 64 rows are few for 128 keys.
        shapes = [(64, 32, 4), (64, 32, 8), (64, 64, 4), (64, 64, 8), (128, 32, 8), (128, 64, 8), (128, 128, 8)]
        found = [
            Tiles(*shape, stages, loops) for shape, stages, loops in itertools.product(shapes, STAGES, (False, True))
        ]
    chosen = [Candidate(each, present.programs) for each in found]
    if regime.name == "decode":
        chosen += [dataclasses.replace(present, programs=programs) for programs in (2, 3, 6, 8, 16)]
    return list(dict.fromkeys([present, *chosen]))


@contextlib.contextmanager
def applied(regime: Regime, candidate: Candidate, arch: str) -> Iterator[None]:
    """Launch calls with these constants; launches that were chosen before or meanwhile are forgotten."""
    with contextlib.ExitStack() as stack:
        stack.callback(forget_choices)
        stack.enter_context(mock.patch.object(build, f"{regime.name}_tiles", return_value=candidate.tiles))
        stack.enter_context(mock.patch.dict(PROGRAMS, {arch: (candidate.programs, "")}))
        forget_choices()
        yield


def sweep_regime(
    regime: Regime, device: torch.device, seconds: float, limit: int | None = None
) -> Iterator[list[dict[str, str]]]:
    """Time the right candidates in lots, each beside the present constants, and yield all rows after each lot.

    Args:
        regime: The regime.
        device: Device that runs the candidates.
        seconds: Approximate time of a lot.
        limit: Number of candidates, on small inputs, to test the harness; None: all.
    """
    inputs = attention_inputs(regime.case, device, 0 if limit else 256 << 20)
    arch = architecture(device).name
    present = _present(regime, inputs, arch)
    if present is None:  # PyTorch runs: there is nothing to choose
        return
    rows: list[dict[str, str]] = []
    first: float | None = None
    others = candidates(regime, present, arch)[1:limit]
    for start in range(0, max(len(others), 1), TOGETHER):
        lot = {candidate: _row(regime, candidate, present, arch) for candidate in others[start : start + TOGETHER]}
        now = _row(regime, present, present, arch)
        ready = [c for c, row in [(present, now), *lot.items()] if _is_right(regime, inputs, c, arch, row)]
        rows += [*([now] if not start else []), *lot.values()]
        if present not in ready:
            raise WrongError(f"{regime.key}: the present constants: {now['note']}")
        times = _time(regime, inputs, ready, arch, device, seconds)
        # Clocks drift between lots: what counts is the ratio to the present constants in the same lot.
        first = first or times[present].p50
        for candidate, found in times.items():
            row = now if candidate == present else lot[candidate]
            row["p50_us"] = f"{found.p50 / times[present].p50 * first:.2f}"
        for row in rows:
            row.pop("reason", None)
        # The number of programs is chosen for all decodes together, by `table`.
        _choose([row for row in rows if row["programs"] == rows[0]["programs"]])
        yield [row | conditions(device.type) for row in rows]


def _row(regime: Regime, candidate: Candidate, present: Candidate, arch: str) -> dict[str, str]:
    row = {"regime": regime.key, "present": str(int(candidate == present)), **candidate.columns()}
    row |= {"architecture": arch, "kind": regime.name, "group": str(next_power_of_2(regime.group))}
    return row | {name: str(getattr(regime.case, name)) for name in ("head_dim", "block_size")}


def _is_right(regime: Regime, inputs: Inputs, candidate: Candidate, arch: str, row: dict[str, str]) -> bool:
    """Return whether a candidate runs and is right; if not, write the reason into the row."""
    try:
        with applied(regime, candidate, arch):
            inputs.check(inputs.calls[0], lambda: _call(inputs.calls[0]))
    except WrongError as error:
        row["note"] = f"wrong: {error}"
    except Exception as error:
        row["note"] = f"fails: {str(error).splitlines()[0][:120] if str(error) else type(error)}"
    return "note" not in row


def first_calls(regime: Regime, device: torch.device, limit: int | None = None) -> Iterator[Callable[[], object]]:
    """Yield a call with each candidate; the call compiles the candidate's kernels."""
    inputs = attention_inputs(regime.case, device, 0)
    arch = architecture(device).name
    present = _present(regime, inputs, arch)
    for candidate in [] if present is None else candidates(regime, present, arch)[:limit]:

        def run(candidate: Candidate = candidate) -> None:
            with applied(regime, candidate, arch):
                _call(inputs.calls[0])

        yield run


def _present(regime: Regime, inputs: Inputs, arch: str) -> Candidate | None:
    """Return the constants in use; None if no kernel is launched."""
    seen: list[Tiles] = []
    original = getattr(build, f"{regime.name}_tiles")

    def observe(*arguments: Any) -> Tiles:
        seen.append(original(*arguments))
        return seen[-1]

    forget_choices()
    with mock.patch.object(build, f"{regime.name}_tiles", observe):
        _call(inputs.calls[0])
    if not seen:
        return None
    return Candidate(seen[0], programs_per_processor(arch))


def _call(call: Any, plan: torch.Tensor | None = None) -> torch.Tensor:
    out: torch.Tensor = pc.paged_attention(**call.arguments("paged_attention"), plan=plan)
    return out


def _plan(call: Any) -> torch.Tensor:
    lengths = (call.block_tables, call.seq_lens, call.query_start_loc)
    plan: torch.Tensor = pc.attention_plan(*lengths, call.case.block_size, num_kv_heads=call.case.heads[1])
    return plan


def _time(
    regime: Regime,
    inputs: Inputs,
    chosen: list[Candidate],
    arch: str,
    device: torch.device,
    seconds: float,
) -> dict[Candidate, timing.Quantiles]:
    names = {str(number): candidate for number, candidate in enumerate(chosen)}
    runs: dict[str, list[timing.Run]] = {}
    graphs = {}
    for name, candidate in names.items():
        # A plan is cut for the number of programs, and a graph keeps what it was captured with.
        with applied(regime, candidate, arch):
            planned = [(call, _plan(call)) for call in inputs.calls]
            if device.type == "cuda":
                all_runs = [lambda given=given: _call(*given) for given in planned]
                graphs[name] = (timing.capture(all_runs), len(all_runs))

        def run(given: Any, candidate: Candidate = candidate) -> None:
            with applied(regime, candidate, arch):
                _call(*given)

        runs[name] = [lambda given=given, run=run: run(given) for given in planned]
    times = timing.time_graphs(graphs, seconds) if device.type == "cuda" else timing.time_eager(runs, device, seconds)
    return {names[name]: found for name, found in times.items()}


def _choose(rows: list[dict[str, str]]) -> None:
    """Mark the candidate to take with the reason."""
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


TUNED = tuple(field.name for field in dataclasses.fields(Tiles) if field.name != "value_splits")  # of latent rows
CHOICES = (*TUNED, "programs")
KEYS = ("architecture", "kind", "head_dim", "group", "block_size")
COLUMNS = ("regime", "present", "reason", "p50_us", *CHOICES, *KEYS, "note")


def save_sweep(path: Path, rows: list[dict[str, str]]) -> None:
    """Replace the rows of the regimes that were swept now."""
    if not rows:
        return
    rows = sorted(replaced(path, rows, ("regime",)), key=lambda row: row["regime"])
    write_rows(path, rows, [*COLUMNS, *conditions("cpu")])


def table(rows: list[dict[str, str]], source: str) -> dict[str, dict[Any, Any]]:
    """Return TILES and PROGRAMS of `constants.py` from the rows of a device.

    Args:
        rows: Rows of all regimes; one row of each has a reason.
        source: File of the rows, for the reasons.
    """
    found: dict[str, dict[Any, Any]] = {"TILES": {}, "PROGRAMS": {}}
    for row in rows:
        if not row.get("reason") or row["present"] == "1":
            continue
        why = f"{row['reason']}; {row['device']}, {row['date']}, {source}"
        arch, head_dim, group, size = row["architecture"], *(int(row[name]) for name in KEYS[2:])
        *numbers, loops, limit = (int(row.get(name) or 0) for name in TUNED)
        tiles = (*numbers, bool(loops), *([limit] if limit else []))
        found["TILES"][arch, row["kind"], head_dim, group, size] = (tiles, why)
    for arch in sorted({row["architecture"] for row in rows}):
        decodes = [row for row in rows if (row["architecture"], row["kind"]) == (arch, "decode") and row.get("p50_us")]
        if choice := _choose_programs(decodes):
            programs, gain = choice
            why = f"{gain:.2f} times as fast as before over all decodes; {decodes[0]['device']}, {decodes[0]['date']}"
            found["PROGRAMS"][arch] = (programs, f"{why}, {source}")
    return found


def _choose_programs(decodes: list[dict[str, str]]) -> tuple[int, float] | None:
    """Return the fastest number of programs over all regimes and its gain; None if the present number stays."""
    gains: dict[str, list[float]] = {}
    for now in (row for row in decodes if row["present"] == "1"):
        alike = [name for name in CHOICES if name != "programs"]
        for row in decodes:
            if row["regime"] == now["regime"] and all(row.get(name) == now.get(name) for name in alike):
                gains.setdefault(row["programs"], []).append(float(now["p50_us"]) / float(row["p50_us"]))
    everywhere = max(map(len, gains.values()), default=0)
    means = {n: math.exp(sum(map(math.log, g)) / len(g)) for n, g in gains.items() if len(g) == everywhere}
    best = max(means, key=lambda n: means[n], default=None)
    return (int(best), means[best]) if best is not None and means[best] > 1 / WORTH else None


def write_table(found: dict[str, dict[Any, Any]], path: Path = TABLE) -> None:
    """Replace the entries of TILES and PROGRAMS in `constants.py`."""
    text = path.read_text(encoding="utf-8")
    for name, entries in found.items():
        lines = [f"    {key!r}: {value!r},\n" for key, value in sorted(entries.items())]
        body = "{\n" + "".join(lines).replace("'", '"') + "}" if lines else "{}"
        start = text.index(f"\n{name}: ") + 1
        start = text.index(" = {", start) + 3
        end = text.index("\n\n", start) if "\n\n" in text[start:] else len(text) - 1
        text = text[:start] + body + text[end:]
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line: show the choices of the sweeps in the tree, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table; else show it")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    found: dict[str, dict[Any, Any]] = {"TILES": {}, "PROGRAMS": {}}
    for path in sorted(given.results.glob("*/constants.csv")):
        for name, entries in table(read_rows(path), f"{path.parent.name}/constants.csv").items():
            found[name] |= entries
    for name, entries in found.items():
        for key, value in sorted(entries.items()):
            print(f"{name}: {key} -> {value}")
    print(f"{sum(map(len, found.values()))} entries from sweeps under {given.results}")
    if given.write:
        write_table(found)
    return 0
