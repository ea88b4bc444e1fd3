"""DiskTier: which files survive, which are dropped when something is wrong, and which are never touched."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time
import warnings

import pytest
import torch
from memory_store import LAYOUT, block, same
from processes import exit_status_of_child

from pc.cache.tiers.disk import DiskTier
from pc.cache.tiers.payload import pack
from pc.cache.tiers.tier import Layout

KEY = bytes(range(32))
OTHER = KEY[::-1]


def files(path):
    return sorted(p for p in path.rglob("*") if not p.is_dir())


def test_round_trip_and_restart(tmp_path):
    tier = DiskTier(tmp_path, LAYOUT)
    assert tier.get(KEY) is None
    assert tier.put(KEY, block())
    assert same(tier.get(KEY), block())
    again = DiskTier(tmp_path, LAYOUT)
    assert (len(again), KEY in again, again.nbytes) == (1, True, tier.nbytes)
    assert same(again.get(KEY), block())
    again.discard(KEY)
    assert files(tmp_path) == []
    assert (len(again), again.nbytes) == (0, 0)


def test_files_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        DiskTier(tmp_path / "cache", LAYOUT).put(KEY, block())
    finally:
        os.umask(before)
    for path in ((tmp_path / "cache"), *(tmp_path / "cache").rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "another's"])
def test_damaged_entry_is_dropped_and_the_others_served(tmp_path, damage):
    tier = DiskTier(tmp_path, LAYOUT)
    tier.put(KEY, block())
    tier.put(OTHER, block(2.0))
    path, other = tier._path(KEY), tier._path(OTHER)
    data = bytearray(path.read_bytes() if damage != "another's" else other.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    path.write_bytes(data[: {"truncate": len(data) // 2, "empty": 0}.get(damage, len(data))])
    with pytest.warns(RuntimeWarning, match="dropped"):
        assert tier.get(KEY) is None
    assert not path.exists()
    assert tier.get(KEY) is None
    assert same(tier.get(OTHER), block(2.0))
    assert tier.nbytes == other.stat().st_size


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, error):
    tier = DiskTier(tmp_path, LAYOUT)

    def fail(descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    if isinstance(error, OSError):
        with pytest.warns(RuntimeWarning, match="No space left"):
            assert not tier.put(KEY, block())
    else:
        with pytest.raises(KeyboardInterrupt):
            tier.put(KEY, block())
    monkeypatch.undo()
    assert files(tmp_path) == []
    assert tier.put(KEY, block())


def test_crash_in_the_middle_of_a_write_leaves_nothing_behind(tmp_path):
    def crash():
        tier = DiskTier(tmp_path)
        tier.put(OTHER, {"key": torch.ones(3)})
        os.replace = lambda *_: os._exit(9)
        tier.put(KEY, {"key": torch.ones(3)})

    assert exit_status_of_child(crash) == 9
    assert len(files(tmp_path)) == 2
    tier = DiskTier(tmp_path)
    assert (len(tier), KEY in tier, OTHER in tier) == (1, False, True)
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("age", [0, 7200], ids=["now", "since two hours"])
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_start_leaves_alone_what_another_is_writing(tmp_path, monkeypatch, moment, age):
    tier, proceed = DiskTier(tmp_path, LAYOUT), getattr(os, moment)

    def start_another(*args):
        (partial,) = files(tmp_path)
        os.utime(partial, (time.time() - age,) * 2)
        DiskTier(tmp_path, LAYOUT)
        proceed(*args)

    monkeypatch.setattr(os, moment, start_another)
    assert tier.put(KEY, block())
    assert same(DiskTier(tmp_path, LAYOUT).get(KEY), block())


def test_nothing_else_in_the_directory_is_touched(tmp_path):
    names = ["video.mp4.partial", "ab-cd.safetensors", f"{KEY.hex()}-2.block", "notes.block", f"{'ab' * 99}-1.block"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / "x.partial").mkdir()
    (tmp_path / f"{KEY.hex()}-1.block").mkdir()
    (tmp_path / f"{OTHER.hex()}-1.block").symlink_to("/nonexistent")
    (tmp_path / "target").write_text("mine")
    (tmp_path / "ab-1.block").symlink_to(tmp_path / "target")
    tier = DiskTier(tmp_path, capacity_bytes=1)
    assert len(tier) == 0
    for key in (KEY, OTHER, b"\xab"):
        assert key not in tier
        assert tier.get(key) is None
    assert [(tmp_path / name).read_text() for name in [*names, "target"]] == ["mine"] * (len(names) + 1)
    with pytest.warns(RuntimeWarning, match="not kept on disk"):
        assert not tier.put(KEY, block())


def test_blocks_that_fail_alike_are_one_warning(tmp_path):
    tier = DiskTier(tmp_path / "there")
    entries = {bytes([number]): block() for number in range(12)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            (tmp_path / "there").rename(tmp_path / "away")
            assert tier.put_many(entries) == set()
            (tmp_path / "away").rename(tmp_path / "there")
            assert tier.put(KEY, block())
            tier.discard(KEY)
    assert len(said) == 2  # one each time
    assert "No such file or directory" in str(said[0].message)


def test_an_empty_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path: got '', needs a directory"):
        DiskTier("", LAYOUT)
    assert not list(tmp_path.iterdir())


def test_files_that_vanish(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, LAYOUT)
    tier.put_many({KEY: block(), OTHER: block()})
    lstat, gone = os.lstat, []

    def vanish(path, **options):
        if not gone and str(path).endswith(".block"):
            gone.append(path)
            os.unlink(path)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", vanish)
    again = DiskTier(tmp_path, LAYOUT)
    monkeypatch.undo()
    assert len(again) == 1
    for path in files(tmp_path):
        path.unlink()
    assert again.get_many([KEY, OTHER]) == [None, None]
    assert (len(again), again.nbytes) == (0, 0)
    assert tier.put(KEY, block())
    assert same(again.get(KEY), block())


def test_files_of_other_users_are_read_and_left_alone(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, LAYOUT)
    tier.put_many({KEY: block(), OTHER: block()})
    tier._path(OTHER).write_bytes(b"damaged")
    own, count = os.geteuid(), len(files(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    theirs = DiskTier(tmp_path, LAYOUT, capacity_bytes=1)
    assert len(theirs) == 0
    assert same(theirs.get(KEY), block())
    with pytest.warns(RuntimeWarning, match="dropped"):
        assert theirs.get(OTHER) is None
    theirs.discard(KEY)
    assert len(files(tmp_path)) == count


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs to become another user")
def test_a_directory_that_is_not_ours():
    layout, found = Layout("m", {"a": ([3], torch.float32)}), []
    with tempfile.TemporaryDirectory() as path:  # other users can reach it, unlike tmp_path
        DiskTier(path, layout).put(KEY, {"a": torch.ones(3)})
        folder = os.path.join(path, layout.digest)
        name = os.path.join(folder, os.listdir(folder)[0])
        for mode, readable in ((0o777, 0o600), (0o777, 0o644), (0o555, 0o644), (0o555, 0o600)):
            for place in (path, folder):
                os.chmod(place, mode)
            os.chmod(name, readable)
            os.seteuid(65534)
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    tier = DiskTier(path, layout, capacity_bytes=100 if mode == 0o555 else 1000)
                    got, took = tier.get(KEY) is not None, tier.put(OTHER, {"a": torch.ones(3)})
                    refused = DiskTier(path, Layout("n", layout.tensors)).put(KEY, {"a": torch.ones(3)})
                found.append((got, took, refused, len(caught) > 0, os.path.exists(name)))
                tier.discard(OTHER)
            finally:
                os.seteuid(0)
    assert found == [
        (False, True, True, False, True),
        (True, True, True, False, True),
        (True, False, True, True, True),
        (False, False, True, True, True),
    ]


def test_capacity_drops_what_was_used_longest_ago(tmp_path):
    tier = DiskTier(tmp_path, LAYOUT)
    tier.put(KEY, block())
    tier = DiskTier(tmp_path, LAYOUT, capacity_bytes=2 * tier.nbytes)
    keys = [bytes([i]) * 32 for i in range(2)]
    tier.put(keys[0], block())
    tier.get(KEY)
    tier.put(keys[1], block())
    assert (KEY in tier, keys[0] in tier, keys[1] in tier) == (True, False, True)
    assert len(files(tmp_path)) == 2
    for path in files(tmp_path):
        assert tier.nbytes == 2 * path.stat().st_size
    assert not DiskTier(tmp_path, LAYOUT, capacity_bytes=10).put(keys[0], block())
    assert files(tmp_path) == []
    with pytest.raises(ValueError, match="capacity_bytes"):
        DiskTier(tmp_path, LAYOUT, capacity_bytes=0)
    with pytest.raises(TypeError, match="layout: got str"):
        DiskTier(tmp_path, "model")


def test_entries_that_cannot_be_read_for_a_while_count_on(tmp_path, monkeypatch):
    """They are still on disk, so the capacity must include them."""
    size = len(pack(KEY, block(), LAYOUT))
    tier = DiskTier(tmp_path, LAYOUT, capacity_bytes=4 * size)
    keys = [bytes([i]) * 32 for i in range(8)]
    assert tier.put_many({key: block() for key in keys[:4]}) == set(keys[:4])

    def fail(*args, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    assert tier.get_many(keys[:4]) == [None] * 4
    monkeypatch.undo()
    assert (len(tier), tier.nbytes) == (4, 4 * size)
    tier.put_many({key: block() for key in keys[4:]})
    assert len(files(tmp_path)) == 4


def test_a_file_whose_status_cannot_be_read_is_closed(tmp_path, monkeypatch):
    """On NFS, that happens to files that another machine has deleted."""
    tier = DiskTier(tmp_path, LAYOUT)
    tier.put(KEY, block())
    opened = []

    def fail(descriptor):
        opened.append(descriptor)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "fstat", fail)
    assert tier.get(KEY) is None
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(opened[0])
    assert same(tier.get(KEY), block())


@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["layout", "no layout"])
def test_a_machine_with_another_byte_order_finds_nothing(tmp_path, monkeypatch, layout):
    """Tensors are stored as they are in memory."""

    def tier():
        return DiskTier(tmp_path, layout and Layout(layout.model, layout.tensors))

    assert tier().put(KEY, block())
    monkeypatch.setattr(sys, "byteorder", "big")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tier().get(KEY) is None
    assert tier().put(OTHER, block())
    assert same(tier().get(OTHER), block())
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tier().get(OTHER) is None


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskTier(tmp_path / "file" / "cache", LAYOUT)


@pytest.mark.parametrize(("locks", "text"), [(True, ""), (False, "being written")])
def test_only_old_partial_files_are_removed_if_no_lock_shows_their_writer(tmp_path, monkeypatch, locks, text):
    """A writer locks its file after it has made it, and some file systems have no locks."""

    def refuse(*args):
        raise OSError(errno.ENOLCK, "no locks on this file system")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / f"{KEY.hex()}-1.block.{'0' * 16}.partial"
    path.write_text(text)
    DiskTier(tmp_path)
    assert path.exists()
    os.utime(path, (0, 0))
    DiskTier(tmp_path)
    assert not path.exists()


@pytest.mark.slow
def test_processes_that_write_the_same_keys(tmp_path):
    code = f"""
import sys, torch
from pc.cache.tiers.disk import DiskTier
tier = DiskTier({str(tmp_path)!r}, capacity_bytes=6000)
for turn in range(60):
    key = bytes([turn % 20]) * 16
    tier.put(key, {{"a": torch.full((64,), float(turn % 20))}})
    found = tier.get(bytes([turn * 7 % 20]) * 16)
    assert found is None or (found["a"] == turn * 7 % 20).all()
"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running = [subprocess.Popen([sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE) for _ in "ab"]
        for process in running:
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
    assert [path for path in files(tmp_path) if path.suffix == ".partial"] == []
