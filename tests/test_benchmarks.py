"""The benchmarks' harness: its counts, its errors and its files. The operators' speed is not tested here."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from processes import python

import pc
from benchmarks.__main__ import NAMES
from benchmarks.harness import experiment, peers, registry, runner, tables, timing
from benchmarks.operators import attention, attention_providers
from pc.bench import run_bench

pytestmark = pytest.mark.usefixtures("plain_empty")
CPU = torch.device("cpu")
MEASURED = [op for op in registry.operators() if op != "rotate_keys"]  # it launches the kernel of move_slots
SMALL = {"heads": (4, 2), "head_dim": 16, "block_size": 8}


@pytest.mark.parametrize("op", MEASURED)
def test_every_operator_has_a_benchmark(op: str) -> None:
    (benchmark,) = registry.discover([op])
    assert benchmark.op == op
    assert benchmark.providers[0].name == registry.OURS
    for kind in ("cpu", "cuda"):
        assert benchmark.of(kind, True), kind
        assert set(benchmark.of(kind, True)) <= set(benchmark.of(kind, False))
        assert len({case.name for case in benchmark.of(kind, False)}) == len(benchmark.of(kind, False))


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(ValueError, match=r"op: got 'nothing'.*paged_attention"):
        registry.discover(["nothing"])


CASES = {
    "decode": {"seq_lens": (37, 5), "q_lens": (1, 1)},
    "prefill": {"seq_lens": (37,), "q_lens": (37,)},
    "mixed": {"seq_lens": (37, 64, 12), "q_lens": (1, 20, 12)},
    "window": {"seq_lens": (61, 20), "q_lens": (9, 1), "window": 10, "num_sink_tokens": 3},
    "holes": {"seq_lens": (64, 64), "q_lens": (1, 1), "live": ((0, 16), (48, 64))},
    "holes and window": {"seq_lens": (64,), "q_lens": (4,), "live": ((0, 8), (40, 64)), "window": 12},
    "queries inside": {"seq_lens": (64,), "q_lens": (11,), "queries": ((10, 15), (40, 46))},
    "shared": {"seq_lens": (40, 50), "q_lens": (1, 1), "shared": 32},
    "sinks": {"seq_lens": (33,), "q_lens": (5,), "sinks": True, "window": 8},
    "head-major": {"seq_lens": (33,), "q_lens": (5,), "layout": "HND"},
    "int8": {"seq_lens": (33,), "q_lens": (5,), "cache_dtype": "int8"},
    "float8": {"seq_lens": (33,), "q_lens": (5,), "cache_dtype": "float8_e4m3fn"},
    "float16": {"seq_lens": (33,), "q_lens": (5,), "dtype": "float16"},
    "tables of heads": {"seq_lens": (133, 80), "q_lens": (5, 1), "kept": 0.5},
    "lists": {"seq_lens": (133, 80), "q_lens": (5, 1), "kept": 0.3, "lists": True, "layout": "HND"},
}


def build(name: str) -> Any:
    return attention.attention_inputs(attention.AttentionCase(**{**SMALL, **CASES[name]}), CPU, 0)


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_mask(name: str) -> None:
    inputs = build(name)
    case = inputs.calls[0].case
    pairs, cells = 0, set()
    for i in range(len(case.seq_lens)):
        mask = case.visible(i, case.positions(i))
        pairs += int(mask.sum())
        table = inputs.calls[0].block_tables[i]
        blocks = (table if table.dim() == 1 else table[0]).tolist()
        cells |= {(blocks[t // 8], t % 8) for t in np.flatnonzero(mask.any(axis=0)).tolist()}
    item = 2 if name == "float16" else 4
    stored = 1 if case.cache_dtype else item
    assert inputs.flops == 4 * pairs * 4 * 16
    assert inputs.bytes == 2 * sum(case.q_lens) * 4 * 16 * item + 2 * len(cells) * 2 * 16 * stored


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("op", ["paged_attention", "sliding_window_attention", "sparse_gap_attention"])
def test_providers_that_take_a_case_are_right(name: str, op: str) -> None:
    inputs = build(name)
    case = inputs.calls[0].case
    if op == "paged_attention" and (case.window or case.queries or case.kept < 1):
        pytest.skip("another operator's case")
    if op == "sliding_window_attention" and (case.queries or not case.window):
        pytest.skip("another operator's case")
    right = []
    for provider in attention_providers.attention_providers(op):
        if provider.device is not None:
            continue
        try:
            run = provider.prepare(inputs.calls[-1])
        except registry.UnsupportedError:
            continue
        inputs.check(inputs.calls[-1], run)
        right.append(provider.name)
    assert registry.OURS in right


@pytest.mark.parametrize("name", ["decode", "prefill", "holes", "holes and window", "queries inside", "float16"])
def test_flex_attention_is_asked_the_same(name: str) -> None:
    inputs = build(name)
    run = attention_providers._flex(inputs.calls[-1], compile=False)
    inputs.check(inputs.calls[-1], run)


def test_inputs_of_a_rotation_share_no_block() -> None:
    tables = [call.block_tables for call in build("mixed").calls]
    numbers = torch.cat([table[table >= 0] for table in tables])
    assert len(tables) > 1
    assert numbers.unique().numel() == numbers.numel()
    assert not torch.equal(numbers, numbers.sort().values), "block tables are shuffled"


def tiny(op: str) -> Any:
    """Return the benchmark of `op` with its first quick CPU case, or a small one for attention."""
    (benchmark,) = registry.discover([op])
    case = benchmark.of("cpu", True)[0]
    if op.endswith("attention"):
        given = CASES["holes" if op.startswith("sparse") else "decode"] | SMALL
        case = attention.attention_case("small", "cpu", True, **given)
    return dataclasses.replace(benchmark, cases=(case,))


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pc.paged_attention
    monkeypatch.setattr(pc, "paged_attention", lambda **given: right(**given) * 1.001)
    benchmark = tiny("paged_attention")
    with pytest.raises(runner.WrongResultError, match="paged_attention, small: off by"):
        runner.run_case(benchmark, benchmark.cases[0], 0.01, tiny=True)


def test_a_wrong_rival_gets_a_note_and_no_time() -> None:
    benchmark = tiny("paged_attention")
    wrong = registry.Provider("rival", lambda call: lambda: torch.full_like(call.query, float("nan")), lambda: "1")
    absent = registry.Provider("absent", lambda call: None, lambda: attention_providers.version("no-such-package"))
    benchmark = dataclasses.replace(benchmark, providers=(*benchmark.providers, wrong, absent))
    rows = runner.run_case(benchmark, benchmark.cases[0], 0.01, tiny=True)
    (row,) = (row for row in rows if row["provider"] == "rival")
    assert row["note"].startswith("wrong: off by")
    assert "p50_us" not in row
    assert "absent" not in {row["provider"] for row in rows}


@pytest.mark.parametrize("op", ["gather_blocks", "scatter_slots", "copy_blocks", "paged_attention"])
def test_rows_carry_numbers_and_conditions(op: str, tmp_path: Path) -> None:
    benchmark = tiny(op)
    for _, rows in runner.run_benchmarks([benchmark], "cpu", True, tiny=True):
        path = runner.results_path(tmp_path, "cpu", op)
        runner.save_rows(path, benchmark, rows)
    found = tables.read_rows(path)
    assert path == tmp_path / "cpu" / f"{op}.csv"
    assert len({row["provider"] for row in found}) > 1
    for row in found:
        assert float(row["p20_us"]) <= float(row["p50_us"]) <= float(row["p80_us"])
        assert float(row["roofline"]) > 0
        for column in ("device", "torch", "python", "commit", "date", "version", "copy_gbs", "matmul_tflops"):
            assert row[column], column


def test_saving_replaces_what_was_measured_again(tmp_path: Path) -> None:
    one, two = (registry.Case(name, None, True, "cpu") for name in ("one", "two"))
    benchmark = registry.Benchmark("op", (one, two), ())
    path = tmp_path / "op.csv"
    row = {"provider": "pc", "mode": "eager", "device": "this"}
    runner.save_rows(path, benchmark, [row | {"case": "two", "p50_us": "1"}, row | {"case": "one", "p50_us": "2"}])
    runner.save_rows(path, benchmark, [row | {"case": "one", "p50_us": "3"}])
    assert [(r["case"], r["p50_us"]) for r in tables.read_rows(path)] == [("one", "3"), ("two", "1")]
    runner.save_rows(path, benchmark, [row | {"case": "one", "p50_us": "4", "device": "that"}])
    assert [(r["case"], r["p50_us"]) for r in tables.read_rows(path)] == [("one", "4")], "machines are not mixed"


def test_rows_are_written_as_they_were_read(tmp_path: Path) -> None:
    """Files of results are written byte for byte as they were read, except line ends; no rows do not empty a file."""
    copy = tmp_path / "new" / "copy.csv"
    paths = sorted((registry.ROOT / "benchmarks" / "results").rglob("*.csv"))
    assert len(paths) > 20
    for path in paths:
        tables.write_rows(copy, tables.read_rows(path))
        assert copy.read_bytes() == path.read_bytes().replace(b"\r\n", b"\n"), path
    before = copy.read_bytes()
    with pytest.raises(ValueError, match="rows: got none, needs at least one"):
        tables.write_rows(copy, [])
    assert copy.read_bytes() == before
    tables.write_rows(copy, [{"b": 1}, {"a": 2, "c": "x,y"}], ["a"])
    assert copy.read_text() == 'a,b,c\n,1,\n2,,"x,y"\n'


def _measure(given: Any) -> Any:
    """Yield a row for each number, and fail at 0."""
    for n in given.numbers:
        yield {"n": n, "inverse": 1 / n}
        yield {"n": n, "inverse": -1 / n}


@pytest.mark.parametrize("key", [("n",), ()])
def test_an_experiment_replaces_rows_by_key(
    key: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.csv"
    made = experiment.Experiment("-", _measure, {"numbers": experiment.option([1])}, key, ("pytest",))

    def run(*numbers: str) -> list[tuple[str, str]]:
        made.main([*numbers, "--output", str(output)])
        return [(row["n"], row["inverse"]) for row in tables.read_rows(output)]

    assert run() == [("1", "1.0"), ("1", "-1.0")]
    assert capsys.readouterr().out == "1 1.0\n1 -1.0\n"
    first = run("2", "4")
    with pytest.raises(ZeroDivisionError):
        run("4", "5", "0", "8")
    after = [(row["n"], row["inverse"]) for row in tables.read_rows(output)]
    new = [("4", "0.25"), ("4", "-0.25"), ("5", "0.2"), ("5", "-0.2")]
    assert after == (first[:4] + new if key else first), "a file without a key changes only as a whole"
    assert first[0][0] == ("1" if key else "2")
    for row in tables.read_rows(output):
        assert (row["pytest"], row["torch"]) == (pytest.__version__, torch.__version__)
        assert row["device"]
        assert row["commit"]


def test_an_experiment_names_its_file_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--fast": experiment.option(False), "--size": experiment.option(2, "of it"), "--at": experiment.option()}
    options |= {"texts": experiment.option(["a", "b"], choices=["a", "b", "c"])}
    made = experiment.Experiment(lambda given: f"{given.size}.csv", _measure, options)
    given = made.parse(["--size", "3"])
    assert (given.fast, given.size, given.at, given.texts) == (False, 3, None, ["a", "b"])
    assert made.parse(["c"]).texts == ["c"]
    with pytest.raises(SystemExit):
        made.parse(["d"])
    assert "argument {a,b,c}: got 'd', needs one of a, b, c" in capsys.readouterr().err
    assert given.output == tables.RESULTS / "cpu" / "3.csv"
    with pytest.raises(SystemExit):
        made.parse(["--help"])
    assert (__doc__ or "-") in capsys.readouterr().out
    with pytest.raises(SystemExit):
        made.parse(["--size", "x"])


def test_the_examples_of_benchmarks_are_accepted() -> None:
    found = 0
    for name, (path, _) in NAMES.items():
        if name == "work":
            continue  # its module needs the emulator
        with mock.patch.dict(os.environ):  # some modules set variables for processes that they start
            module = importlib.import_module(f"benchmarks.{path}")
        examples = (module.__doc__ or "").partition("Examples:")[2]
        for line in re.findall(rf"-m benchmarks {name}\b(.*)", examples):
            said = re.sub(r" {3,}\(.*", "", line).replace("...", "")  # a remark may follow
            for arguments in (re.sub(r"\[.*?\]", "", said), re.sub(r"[\[\]]", "", said)):  # `[...]` may be left out
                if hasattr(module.main, "__self__"):
                    assert module.main.__self__.parse(shlex.split(arguments))
                    found += 1
    assert found > 20


def test_rounds_go_forwards_and_backwards() -> None:
    measured: list[str] = []
    names = ["a", "b", "c"]
    found = timing.by_turns(lambda name: measured.append(name) or len(measured), names, 2)
    assert found == {"a": [1, 6], "b": [2, 5], "c": [3, 4]}
    assert measured == [*names, *reversed(names)]
    numbers = iter((10, 20))
    assert timing.by_turns(lambda name, n: n, names, 2, lambda: next(numbers)) == {name: [10, 20] for name in names}


def test_the_command_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--quick", "--device", "cpu", "--case", "8 tokens", "--output", str(tmp_path))
    # As a process, since `import pc` is lazy. A ceiling is one call instead of a second of calls; no digest is made.
    code = "from benchmarks.harness import ceilings, conditions; conditions.sources = str; "
    code += "ceilings._best = lambda run, *_: run() is None or 1.0; from pc.__main__ import main; main()"
    done = python("-c", code, "bench", "reshape_and_cache", *options, cwd=registry.ROOT)
    assert "roofline" in done.stdout
    with (tmp_path / "cpu" / "reshape_and_cache.csv").open() as file:
        assert {row["provider"] for row in csv.DictReader(file)} == {"pc", "torch indexing"}
    assert run_bench(["nothing"], "cpu", True, "", None, tmp_path, 1, None) == 2
    if not torch.cuda.is_available():
        assert run_bench([], "cuda", True, "", None, tmp_path, 1, None) == 2
    said = capsys.readouterr().out
    assert "got 'nothing'" in said


@pytest.mark.slow
def test_quick_cases_are_tests_for_pytest_benchmark() -> None:
    done = python("-m", "pytest", "-q", "--collect-only", "benchmarks", cwd=registry.ROOT)
    assert all(f"test_operator[{op}-" in done.stdout for op in MEASURED)


def test_without_a_checkout_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pc.bench

    monkeypatch.setattr(pc.bench, "__file__", str(tmp_path / "site-packages" / "pc" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="needs a checkout"):
        pc.bench.find_checkout()


def test_wheels_of_peers_are_unpacked_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "peer_of_ours-1.5-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer_of_ours.py", "answer = 42")
        wheel.writestr(
            "peer_of_ours-1.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: peer-of-ours\nVersion: 1.5\n"
        )
    monkeypatch.setattr(sys, "path", list(sys.path))
    peers.add_peers(tmp_path)
    assert attention_providers.version("peer-of-ours") == "1.5"
    assert importlib.import_module("peer_of_ours").answer == 42


def test_info_says_what_a_bug_report_needs() -> None:
    from pc.info import collect_info, format_info

    found = json.loads(json.dumps(collect_info()))
    assert found["versions"]["torch"] == torch.__version__
    assert "pc" in found["versions"]
    assert found["cpu"]["operators"]
    text = format_info(found)
    for name in ("triton", "TRITON_CACHE_DIR", "PC_DEBUG", "device"):
        assert name in text


def test_info_names_the_tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import pc.info
    from pc.triton_ops._attention.constants import Architecture

    properties = type("Properties", (), {"name": "A GPU", "total_memory": 80 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(pc.info, "architecture", lambda device: Architecture("sm_90", 132, True))
    found = pc.info._gpu(torch.device("cuda", 0))
    assert found["device"] == "A GPU, 80 GiB, 132 processors"
    assert "warps" in found["decode 128"]
    assert "warps" in found["prefill 256"]


@pytest.mark.parametrize(
    "op", [op for op in registry.operators() if op.endswith("_attention") and op != "merge_attention"]
)
def test_cases_for_a_gpu_are_sound_and_fit(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attention_inputs", lambda case, device, rotate: case)
    (benchmark,) = registry.discover([op])
    for entry in benchmark.of("cuda", False):
        case = entry.build(torch.device("cuda"), 0)
        assert len(case.seq_lens) == len(case.q_lens), entry.name
        for i in {case.seq_lens.index(length) for length in case.seq_lens}:
            positions, present = case.positions(i), case.present(i)
            assert len(positions) == case.q_lens[i], entry.name
            assert (np.diff(positions) > 0).all(), entry.name
            assert 0 <= positions[0] <= positions[-1] < case.seq_lens[i], entry.name
            assert present[positions].all(), entry.name
        assert case.heads[0] % case.heads[1] == 0, entry.name
        assert case.shared % case.block_size == 0, entry.name
        tokens = sum(-(-length // case.block_size) * case.block_size for length in case.seq_lens)
        assert 2 * tokens * 2 * case.heads[1] * case.head_dim * 2 < 40e9, entry.name
