"""The benchmark of agents' traffic: how prompts are made from a trace, what is changed in them, and what is counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.models.agents import BESIDE, VARIANTS, count, interleaved, sessions_of, write_hashed

RESULT = "<output>\n{}\n</output>\n"


def rows(session: str, turns: int, start: int) -> list[dict[str, object]]:
    said, found = "Task.\n", []
    for turn in range(turns):
        output = f"THOUGHT: maybe {turn}\n```ls {turn}```\n"
        found.append({"session": session, "timestamp": start + 1_000_000 * turn, "input": said, "output": output})
        said += RESULT.format(f"file {turn}")
    return found


def written(tmp_path: Path, sessions: int, turns: int = 6) -> list[list[tuple[float, tuple[list[str], str]]]]:
    lines = [row for number in range(sessions) for row in rows(f"s{number}", turns, number)]
    with gzip.open(tmp_path / "trace.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in reversed(lines))
    return sessions_of(tmp_path / "trace.jsonl.gz")


def test_outputs_are_put_back_between_what_was_said(tmp_path: Path) -> None:
    (session,) = written(tmp_path, 1)
    parts, output = session[2][1]
    thoughts = [f"THOUGHT: maybe {turn}\n```ls {turn}```\n" for turn in range(3)]
    results = [RESULT.format(f"file {turn}") for turn in range(2)]
    assert parts == ["Task.\n", thoughts[0], results[0], thoughts[1], results[1]]
    assert output == thoughts[2]


def test_changes_leave_the_latest_as_it_is(tmp_path: Path) -> None:
    (session,) = written(tmp_path, 1)
    parts = session[5][1][0]
    whole = VARIANTS["untouched"](parts, 5)
    assert VARIANTS["marker"](parts, 5) == "It is 9:05.\n" + whole
    stripped = VARIANTS["thinking"](parts, 5)
    assert [f"maybe {turn}" in stripped for turn in range(5)] == [False, False, False, False, True]
    assert all(f"```ls {turn}```" in stripped for turn in range(5))
    cleared = VARIANTS["cleared"](parts, 5)
    assert [f"file {turn}" in cleared for turn in range(5)] == [False, False, True, True, True]
    assert cleared.count("(cleared)") == 2


def test_sessions_run_side_by_side_and_in_order(tmp_path: Path) -> None:
    sessions = written(tmp_path, 11)
    order = [(session, turn) for session, turn, _ in interleaved(sessions)]
    assert sorted(order) == [(session, turn) for session in range(11) for turn in range(6)]
    assert all([turn for of, turn in order if of == session] == list(range(6)) for session in range(11))
    ends: set[int] = set()
    for session, turn in order:
        assert session < BESIDE + len(ends)
        ends |= {session} if turn == 5 else set()
    assert len({session for session, _ in order[: 4 * BESIDE]}) == BESIDE  # one second apart at the start


def test_counts_are_those_of_the_prompts(tmp_path: Path) -> None:
    text = list(range(1000))
    requests = [(text[:320], text[320:340]), (text[:340], []), ([5000, *text[:320]], [])]
    assert count(requests, "prefix", 100) == (981, 320 + 4 + 321, 0, 20 + 1 + 20)
    asked, computed, moved, _ = count(requests, "anywhere", 100)
    assert (asked, moved) == (981, 319)  # incomplete blocks are never read
    assert computed == 320 + 4 + 2 + 32
    write_hashed(tmp_path / "trace.jsonl", requests)
    ids = [json.loads(line)["hash_ids"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert ids[0] == ids[1][:20]
    assert not set(ids[2]) & set(ids[1])
