"""Traces and replays."""

from __future__ import annotations

import csv
import gzip
import json

import numpy as np
import pytest

from pc.cache.replay import Trace, compare, load_trace, replay
from pc.cache.replay.traces import NEVER, next_turns


def write(path, lines):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def trace_of(*requests):
    return Trace("t", 16, [np.array(r, np.int64) for r in requests], [1] * len(requests), [0.0] * len(requests))


def test_mooncake_layout(tmp_path):
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]},
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    ]
    trace = load_trace(write(tmp_path / "a.jsonl.gz", lines))
    assert [r.tolist() for r in trace.requests] == [[0, 1], [0, 2]]
    assert (trace.block_size, trace.outputs, trace.times, trace.unique_blocks) == (512, [5, 7], [1.0, 2.0], 3)


def test_qwen_bailian_layout(tmp_path):
    line = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "output_length": 3, "turn": 1, "hash_ids": [4]}
    trace = load_trace(write(tmp_path / "a.jsonl", [line]))
    assert (trace.block_size, trace.times) == (16, [61.5])


def test_sessions_are_decoded_and_kept_apart(tmp_path):
    session = {
        "id": "s",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "out": 1, "keep": 0, "runs": [[1, 3]]},
            {"t": 5.0, "requests": [{"t": 70.0, "out": 9, "keep": 0, "runs": [[50, 1]]}]},
            {"t": 20.0, "out": 2, "keep": 2, "runs": [[9, 1], [11, 2]]},
        ],
    }
    trace = load_trace(write(tmp_path / "a.jsonl", [session, session]))
    first = [r.tolist() for r in trace.requests if r[0] < 1 << 32]
    assert first == [[1, 2, 3], [1, 2, 9, 11, 12], [50]]
    assert trace.times == [0.0, 20.0, 60.0, 75.0, 80.0, 135.0]
    assert trace.unique_blocks == 14


def test_unknown_layout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs hash_ids or requests"):
        load_trace(write(tmp_path / "a.jsonl", [{"prompt": "x"}]))


def test_what_no_cache_can_have_is_refused():
    trace = trace_of([1, 2], [1, 3])
    for capacity in (0, -1):
        with pytest.raises(ValueError, match=f"capacity: got {capacity}, needs at least 1"):
            replay(trace, "lru", capacity)
    with pytest.raises(TypeError, match=r"capacity: got 3\.5, needs an int"):
        replay(trace, "lru", 3.5)
    with pytest.raises(ValueError, match="returns: got 2, needs 0 to 1"):
        replay(trace, "default", 3, hints=[0.5, 2])


def test_hits_by_hand():
    trace = trace_of([1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3])
    assert replay(trace, "lru", 100).hit_rate == 5 / 11
    assert replay(trace, "lru", 4).hit_rate == 4 / 11  # 5 and 6 evict 3 and 4, because tails are evicted first
    assert replay(trace, "lru", 3).hit_rate == 3 / 11
    assert replay(trace, "belady", 4).hit_rate == 5 / 11 - 1 / 11


def test_a_request_larger_than_the_cache_keeps_its_beginning():
    trace = trace_of([1, 2, 3, 4], [1, 2, 3, 4])
    assert replay(trace, "lru", 2).hit_rate == 2 / 8


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "s3fifo", "arc", "priority", "default"])
def test_no_policy_beats_the_one_that_knows_the_future(policy):
    rng = np.random.default_rng(0)
    roots = [rng.integers(0, 1 << 40, 6) for _ in range(30)]
    requests = []
    for i in range(400):
        root = roots[min(int(rng.zipf(1.3)), 30) - 1]
        depth = int(rng.integers(1, 7))
        tail = range((1 << 41) + 4 * i, (1 << 41) + 4 * i + int(rng.integers(1, 4)))
        requests.append([*root[:depth].tolist(), *tail])
    trace = trace_of(*requests)
    best, got = replay(trace, "belady", 60), replay(trace, policy, 60)
    assert 0 < got.hit_rate <= best.hit_rate
    assert got.gap_hit_rate >= got.hit_rate


def test_what_the_next_turn_alone_says():
    """The policy knows when a conversation continues, not with which blocks, so it keeps the unused tail 3."""
    trace = trace_of([1, 2, 3], [5, 6, 7], [8, 9], [1, 2, 4], [5, 6, 7], [8, 9], [1, 2, 4])
    assert next_turns(trace) == [3, 4, 5, 6, NEVER, NEVER, NEVER]
    hits = {name: round(19 * replay(trace, name, 7).hit_rate) for name in ("lru", "next_turn", "belady")}
    assert hits == {"lru": 7, "next_turn": 8, "belady": 9}


def test_ratio_to_lru():
    trace = trace_of([1, 2], [1, 2], [3, 4], [1, 2])
    rows = compare(trace, ["fifo", "lru"], [0.5, 1.0])
    assert [r.capacity_blocks for r in rows] == [2, 2, 4, 4]
    for row, lru in zip(rows[::2], rows[1::2], strict=True):
        assert row.lru_ratio == row.hit_rate / lru.hit_rate


def test_command_writes_csv_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    testing = pytest.importorskip("typer.testing")
    from pc.__main__ import app

    lines = [{"timestamp": i, "output_length": 1, "hash_ids": [i % 3, 10 + i % 5]} for i in range(40)]
    path = write(tmp_path / "mini.jsonl", lines)
    arguments = [str(path), "--policies", "lru,default", "--capacity", "50%,4", "--hints", "none,oracle"]
    arguments += ["--csv", str(tmp_path / "rows.csv"), "--plot", str(tmp_path / "plot.png")]
    result = testing.CliRunner().invoke(app, ["replay", *arguments])
    assert result.exit_code == 0, result.output
    with open(tmp_path / "rows.csv") as file:
        rows = list(csv.DictReader(file))
    names = [
        "trace",
        "policy",
        "hints",
        "capacity_share",
        "capacity_blocks",
        "hit_rate",
        "gap_hit_rate",
        "lru_ratio",
        "seconds",
    ]
    assert list(rows[0]) == names
    assert {(r["policy"], r["hints"]) for r in rows} >= {("lru", "none"), ("default", "oracle"), ("belady", "none")}
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert testing.CliRunner().invoke(app, ["replay", str(path), "--policies", "nonesuch"]).exit_code == 2
    for capacity in ("0%", "nan%", "inf%", "some", "1e300%", "1000000000000", "9" * 400):
        assert testing.CliRunner().invoke(app, ["replay", str(path), "--capacity", capacity]).exit_code == 2


def test_a_trace_without_blocks_has_no_hits(tmp_path):
    testing = pytest.importorskip("typer.testing")
    from pc.__main__ import app

    path = write(tmp_path / "a.jsonl", [{"timestamp": 0, "hash_ids": []}])
    done = testing.CliRunner().invoke(app, ["replay", str(path), "--capacity", "5"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("option", "file"), [("--csv", "folder"), ("--plot", "folder"), ("--plot", "a.nonesuch")])
def test_a_file_that_cannot_be_written_is_refused_before_the_replay(tmp_path, monkeypatch, option, file):
    pytest.importorskip("matplotlib")
    testing = pytest.importorskip("typer.testing")
    import pc.replay
    from pc.__main__ import app

    monkeypatch.setattr(pc.replay, "compare", lambda *args: pytest.fail("the results would be lost"))
    (tmp_path / "folder").mkdir()
    path = write(tmp_path / "a.jsonl", [{"timestamp": 0, "hash_ids": [1]}])
    done = testing.CliRunner().invoke(app, ["replay", str(path), option, str(tmp_path / file)])
    assert done.exit_code == 2, done.output
    assert option in done.output
    assert not (tmp_path / "a.nonesuch").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 2, "hash_ids": [1\n', "line 2"),
        ('{"timestamp": 1, "hash_ids": [1]}\n\n{"timestamp": 2}\n', "line 3: lacks 'hash_ids'"),
        ('{"timestamp": 1, "hash_ids": ["a"]}\n', "line 1.*needs a list of integers"),
        ('{"timestamp": 1, "hash_ids": [1]}\n[1, 2]\n', "line 2: got list, needs a JSON object"),
        ('{"timestamp": "soon", "hash_ids": [1]}\n', "line 1"),
        ('{"id": "s", "block_size": 64, "requests": [{"t": 0}]}\n', "line 1: lacks 'runs'"),
        ('{"id": "s", "block_size": 64, "requests": [{"t": 0, "keep": -1, "runs": []}]}\n', "line 1: keep: got -1"),
        ('{"id": "s", "block_size": 64, "requests": [{"t": 0, "keep": 3, "runs": []}]}\n', "line 1: keep: got 3"),
        ('{"id": "s", "block_size": 0, "requests": [{"t": 0, "keep": 0, "runs": [[1, 2]]}]}\n', "block_size: got 0"),
        ('{"id": "s", "requests": ' + 50_000 * '[{"requests": ' + "\n", "line 1: "),
        ('{"timestamp": NaN, "hash_ids": [1]}\n', "line 1: got the time nan, needs a finite number"),
        ('{"timestamp": 1e999, "hash_ids": [1]}\n', "line 1: got the time inf, needs a finite number"),
        (
            '{"requests": [{"hash_ids": [1]}]}\n{"requests": [{"hash_ids": [-1]}]}\n',
            "ids from -1",
        ),
        ('{"id": "s", "requests": [{"hash_ids": [4294967296]}]}\n', "line 1: got ids from .*needs? 0 to 2\\*\\*32 - 1"),
        ('{"id": "s", "requests": [{"keep": 0, "runs": [[4294967295, 2]]}]}\n', "line 1: got ids from"),
        ('{"requests": [{"keep": 0, "runs": [[1.5, 2]]}]}\n', "line 1: 'float' object cannot be interpreted"),
        (
            '{"block_size": 16, "requests": []}\n{"block_size": 64, "requests": []}\n',
            "block_size: got 64, needs 16",
        ),
        ("", "holds no requests"),
        ("\n\n", "holds no requests"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, text, told):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        load_trace(path)


@pytest.mark.parametrize("size", [0, -16])
def test_a_block_size_below_1_is_refused(tmp_path, size):
    path = write(tmp_path / "a.jsonl", [{"timestamp": 1, "hash_ids": [1]}])
    with pytest.raises(ValueError, match=f"block_size: got {size}, needs at least 1"):
        load_trace(path, block_size=size)


def test_a_truncated_gzip_file_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", [{"timestamp": i, "hash_ids": list(range(50))} for i in range(50)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="line"):
        load_trace(path)


def test_ids_of_contents_become_ids_of_prefixes(tmp_path):
    lines = [{"timestamp": i, "hash_ids": ids} for i, ids in enumerate([[7, 7, 7], [7, 7, 8], [8, 7]])]
    requests = [r.tolist() for r in load_trace(write(tmp_path / "a.jsonl", lines)).requests]
    assert requests[0][:2] == requests[1][:2]
    assert len({block for ids in requests for block in ids}) == 6
    assert replay(trace_of(*requests), "lru", 10).hit_rate == 2 / 8


def test_a_part_is_measured_against_the_whole(tmp_path):
    testing = pytest.importorskip("typer.testing")
    from pc.__main__ import app

    path = write(tmp_path / "mini.jsonl", [{"timestamp": i, "hash_ids": [i, 100 + i]} for i in range(20)])
    arguments = [str(path), "--part", "50%-100%", "--capacity", "10%", "--csv", str(tmp_path / "rows.csv")]
    assert testing.CliRunner().invoke(app, ["replay", *arguments]).exit_code == 0
    with open(tmp_path / "rows.csv") as file:
        row = next(csv.DictReader(file))
    assert (row["trace"], row["capacity_blocks"]) == ("mini 50%-100%", "4")
    assert testing.CliRunner().invoke(app, ["replay", str(path), "--part", "60%-50%"]).exit_code == 2
