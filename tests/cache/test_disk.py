"""DiskTier: what survives, and what is dropped when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import pc
from pc.cache.disk import DiskTier

KEY = bytes(range(32))


def block(value=1.0):
    return {"key": torch.full((4, 2), value, dtype=torch.bfloat16), "value": torch.arange(8)}


def same(a, b):
    return a is not None and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in b)


def test_round_trip_and_restart(tmp_path):
    tier = DiskTier(tmp_path)
    assert tier.get(KEY) is None
    assert tier.put(KEY, block())
    assert same(tier.get(KEY), block())
    again = DiskTier(tmp_path)
    assert (len(again), KEY in again, again.nbytes) == (1, True, tier.nbytes)
    assert same(again.get(KEY), block())
    again.discard(KEY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_entry_is_dropped_and_the_others_served(tmp_path, damage):
    tier = DiskTier(tmp_path)
    other = KEY[::-1]
    tier.put(KEY, block())
    tier.put(other, block(2.0))
    path = next(p for p in tmp_path.iterdir() if p.name.startswith(KEY.hex()))
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    path.write_bytes(data[: {"truncate": len(data) // 2, "empty": 0}.get(damage, len(data))])
    with pytest.warns(RuntimeWarning, match="dropped"):
        assert tier.get(KEY) is None
    assert not path.exists()
    assert tier.get(KEY) is None
    assert same(tier.get(other), block(2.0))


def test_full_disk_is_a_warning(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not tier.put(KEY, block())
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert tier.put(KEY, block())


def test_crash_in_the_middle_of_a_write_leaves_nothing_behind(tmp_path):
    code = f"""
import os, torch
from pc.cache.disk import DiskTier
tier = DiskTier({str(tmp_path)!r})
tier.put({KEY[::-1]!r}, {{"key": torch.ones(3)}})
os.replace = lambda *_: os._exit(9)
tier.put({KEY!r}, {{"key": torch.ones(3)}})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    tier = DiskTier(tmp_path)
    assert (len(tier), KEY in tier, KEY[::-1] in tier) == (1, False, True)
    assert len(list(tmp_path.iterdir())) == 1


def test_capacity_drops_what_was_used_longest_ago(tmp_path):
    tier = DiskTier(tmp_path)
    tier.put(KEY, block())
    tier = DiskTier(tmp_path, capacity_bytes=2 * tier.nbytes)
    keys = [bytes([i]) * 32 for i in range(2)]
    tier.put(keys[0], block())
    tier.get(KEY)
    tier.put(keys[1], block())
    assert (KEY in tier, keys[0] in tier, keys[1] in tier) == (True, False, True)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="capacity_bytes"):
        DiskTier(tmp_path, capacity_bytes=0)


def test_filled_from_evictions_and_restored_after_a_restart(tmp_path):
    """The loop of docs/cache.md, with one tensor as the whole KV cache."""
    tokens = list(range(12))

    def engine(tier):
        cache = torch.zeros(4, 4)
        manager = pc.CacheManager(4, block_size=4, policy="lru")

        def save(group, blocks, hashes):
            for number, key in zip(blocks.tolist(), hashes, strict=True):
                tier.put(key, {"kv": cache[number]})

        manager.on_evict = save
        return cache, manager

    cache, manager = engine(DiskTier(tmp_path))
    a = manager.allocate("a", tokens)
    cache.view(-1)[torch.from_numpy(a.slot_mapping)] = torch.arange(12.0)
    manager.commit("a", 12)
    manager.free("a")
    manager.allocate("b", [99] * 16)
    assert len(list(tmp_path.iterdir())) == 3

    cache, manager = engine(tier := DiskTier(tmp_path))
    a = manager.allocate("a", tokens)
    done = a.num_cached_tokens // 4
    for number, key in zip(a.block_ids[done:].tolist(), manager.block_hashes("a")[done:], strict=True):
        found = tier.get(key)
        if found is None:
            break
        cache[number] = found["kv"]
        done += 1
    manager.commit("a", 4 * done)
    assert done == 3
    assert cache[torch.from_numpy(a.block_ids).long()].flatten().tolist() == list(range(12))
    assert manager.allocate("c", tokens).num_cached_tokens == 11
    manager.check()
