"""What a user's type checker sees of the manager: no Any, so that a typo in a field of a result is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

SETUP = """
import pc
from pc.cache import GroupedAllocation, GroupedCacheManager
m = pc.CacheManager(8, block_size=4)
g = pc.CacheManager(8, groups=[pc.FullAttention(), pc.SlidingWindow(window=4)])
a = m.allocate("a", [1, 2, 3], extra_keys=["lora", pc.KeyAt(0, "x")])
b = g.allocate("b", [1])
"""
GOOD = """
first: int = sum(source + target for source, target in [*a.copies, *a.loads, *m.commit("a", 1), *m.preempt("a")])
slots, copies = m.append_each(["a"], [7])
print(slots.dtype, copies[:1], a.block_ids.size, a.slot_mapping.dtype, b.block_ids[0].size, b.loads[0][:1])
def f(manager: pc.CacheManager, grouped: GroupedCacheManager) -> GroupedAllocation: return grouped.resume("x")
f(m, g)
one = pc.CacheManager(8, groups=(pc.SlidingWindow(window=4),)).allocate("c", [1]).block_ids.size
"""
BAD = """
a.slot_mappings
a.slot_mapping.sizee
a.block_ids.tolistt()
a.copies[0].first
a.loads.foo
a.junctions
m.commit("a", 1).foo
m.preempt("a").foo
m.append_each([], []).slot
m.stats().hits
m.block_table("a").sizee
b.block_ids.size
b.slot_mapping[0].sizee
g.commit("b", 1)[0].foo
m.allocate("c", [1], extra_keys={"lora": "A"})
m.allocate("c", [1], salt=1.5)
"""


@pytest.mark.slow
def test_typos_are_errors_and_right_code_is_not(tmp_path):
    lines = (SETUP + GOOD + BAD).splitlines()
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-color-output", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(root / ".typecheck")},
        check=False,
    )
    wrong = {int(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("script.py:")}
    bad = {number for number, line in enumerate(lines, 1) if line in BAD.split("\n") and line}
    assert wrong == bad, done.stdout
