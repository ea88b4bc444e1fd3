"""A user's script against the manager, with correct lines and lines with a typo, which a type checker must find."""

from __future__ import annotations

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

LINES = (SETUP + GOOD + BAD).splitlines()
SCRIPT = "\n".join(LINES) + "\n"
WRONG = {number for number, line in enumerate(LINES, 1) if line and line in BAD.split("\n")}


def found(output: str) -> set[int]:
    """Return the lines of `script.py` in which a checker (mypy, pyright) found errors."""
    lines = [line.strip() for line in output.splitlines() if "script.py:" in line and " error" in line]
    return {int(line.split("script.py:")[1].split(":")[0]) for line in lines}
