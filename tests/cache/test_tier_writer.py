"""TierWriter: no caller waits for the disk, and every lost block is counted or logged."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from processes import exit_status_of_child, in_threads

from pc.cache.tiers.disk import DiskTier
from pc.cache.tiers.memory import MemoryTier
from pc.cache.tiers.tier import Tier
from pc.cache.tiers.writer import TierWriter

KEYS = [bytes([i]) * 32 for i in range(200)]
SIZE = 64
_FILE = TierWriter.put_many.__code__.co_filename
_SOURCE = Path(_FILE).read_text().splitlines()


def block(value=1.0):
    return {"kv": torch.full((SIZE // 4,), float(value))}


class SlowTier(Tier):
    """A tier whose writes wait until they are allowed, and may fail."""

    def __init__(self):
        self.entries = {}
        self.leave = threading.Event()
        self.writing = threading.Event()
        self.error = None
        self.refuse = set()

    def put_many(self, entries):
        self.writing.set()
        assert self.leave.wait(10)
        if self.error is not None:
            raise self.error
        took = {key: dict(tensors) for key, tensors in entries.items() if key not in self.refuse}
        self.entries.update(took)
        return set(took)

    def get(self, key):
        return self.entries.get(key)

    def __contains__(self, key):
        return key in self.entries

    def discard(self, key):
        self.entries.pop(key, None)


@pytest.fixture
def slow():
    tier = SlowTier()
    yield tier
    tier.leave.set()


def value_of(tensors):
    return None if tensors is None else tensors["kv"][0].item()


def test_queued_blocks_are_found_before_they_are_written(slow):
    writer = TierWriter(slow)
    assert writer.put_many({KEYS[i]: block(i) for i in range(3)}) == set(KEYS[:3])
    assert slow.writing.wait(10)
    assert writer.put(KEYS[3], block(3))
    assert writer.put(KEYS[0], block(0))
    assert writer.put(KEYS[9], {})
    assert writer.get(KEYS[9]) == {}
    writer.discard(KEYS[9])
    assert slow.entries == {}
    assert len(writer) == 4
    assert writer.contains_many(KEYS[:5]) == [True] * 4 + [False]
    for _ in range(2):
        found = writer.get_many(KEYS[:5])
        assert [value_of(each) for each in found] == [0, 1, 2, 3, None]
        found[1]["kv"].zero_()  # the caller's own
    assert not writer.flush(timeout=0.01)
    slow.leave.set()
    assert writer.flush()
    assert (len(writer), writer.nbytes, writer.written, writer.refused) == (0, 0, 4, 0)
    assert sorted(slow.entries) == KEYS[:4]
    assert [value_of(found) for found in writer.get_many(KEYS[:5])] == [0, 1, 2, 3, None]
    assert writer.close()


def test_a_full_queue_refuses_blocks(slow):
    writer = TierWriter(slow, max_bytes=3 * SIZE)
    assert writer.put_many({key: block() for key in KEYS[:5]}) == set(KEYS[:3])
    assert not writer.put(KEYS[5], block())
    assert writer.nbytes == 3 * SIZE
    assert KEYS[4] not in writer
    assert writer.refused == 3
    slow.leave.set()
    writer.flush()
    assert writer.put(KEYS[5], block())
    assert not writer.put(KEYS[6], {"kv": torch.ones(SIZE)})
    writer.close()
    assert sorted(slow.entries) == [*KEYS[:3], KEYS[5]]
    assert not writer.put(KEYS[7], block())
    assert writer.put_many({KEYS[7]: block()}) == set()


@pytest.mark.parametrize("error", [OSError("full"), SystemExit(3), ValueError("odd")], ids=repr)
def test_an_exception_of_the_tier_is_counted_and_the_worker_goes_on(slow, error):
    writer = TierWriter(slow)
    slow.leave.set()

    def write(key):
        writer.put(key, block())
        writer.flush()

    slow.error = error
    with pytest.warns(RuntimeWarning, match="1 blocks were not written"):
        write(KEYS[0])
    assert writer.last_error is error
    assert (writer.failed, writer.written, writer.nbytes) == (1, 0, 0)
    slow.error, slow.refuse = None, {KEYS[2]}
    write(KEYS[1])
    write(KEYS[2])
    assert (writer.failed, writer.written, writer.refused, len(writer)) == (1, 1, 1, 0)
    assert writer.close()


def test_warnings_that_are_errors_do_not_end_the_worker(slow):
    slow.leave.set()
    slow.error = OSError("full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with TierWriter(slow) as writer:
            for key in KEYS[:3]:
                writer.put(key, block())
                writer.flush()
    assert writer.failed == 3


def test_a_copy_that_fails_leaves_the_queue_as_it_was(slow, monkeypatch):
    writer = TierWriter(slow)

    def fail(tensors):
        raise KeyboardInterrupt

    monkeypatch.setattr("pc.cache.tiers.writer.host_copy", fail)
    with pytest.raises(KeyboardInterrupt):
        writer.put(KEYS[0], block())
    monkeypatch.undo()
    assert (writer.nbytes, len(writer)) == (0, 0)
    assert KEYS[0] not in writer
    slow.leave.set()
    assert writer.put(KEYS[0], block())
    assert writer.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_a_worker_that_cannot_start_blocks_nobody(slow, monkeypatch, error):
    """The block is refused. If it were queued, `flush` and `close` would wait forever."""
    writer, start, before = TierWriter(slow), threading.Thread.start, {*threading.enumerate()}
    slow.leave.set()

    def fail(thread):
        if isinstance(error, KeyboardInterrupt):
            start(thread)  # the interrupt comes after the thread has started
        raise error

    monkeypatch.setattr(threading.Thread, "start", fail)
    if isinstance(error, RuntimeError):
        with pytest.warns(RuntimeWarning, match="no block is written in the background: can't start new thread"):
            assert not writer.put(KEYS[0], block())
        assert writer.refused == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            writer.put(KEYS[0], block())
    monkeypatch.undo()
    assert (len(writer), writer.nbytes) == (0, 0)
    assert writer.flush(timeout=5)
    assert writer.put(KEYS[1], block())
    assert writer.flush(timeout=5)
    assert sorted(slow.entries) == [KEYS[1]]
    for thread in {*threading.enumerate()} - before - {writer._worker}:
        thread.join(5)  # it may have written the block, and ends then
    assert {*threading.enumerate()} - before == {writer._worker}
    assert writer.close(timeout=5)


def test_a_warning_that_cannot_be_shown_does_not_end_the_worker(slow):
    def fail(*args, **options):
        raise ValueError("I/O operation on closed file")

    slow.leave.set()
    slow.error = OSError("full")
    writer = TierWriter(slow)
    for key in KEYS[:2]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = fail
            assert writer.put(key, block())
            assert writer.flush(timeout=5)
    assert writer.failed == 2


def test_an_interrupt_at_any_line_of_put_blocks_nobody(slow):
    """Not at lines that only leave the lock, where an interrupt cannot come."""
    slow.leave.set()
    stopped = True
    for number in range(1, 60):
        writer, count = TierWriter(slow), 0

        def trace(frame, event, arg, number=number):
            nonlocal count
            if frame.f_code.co_filename != _FILE:
                return None
            if event == "line" and not _SOURCE[frame.f_lineno - 1].lstrip().startswith("with "):
                count += 1
                if count == number:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            writer.put(KEYS[0], block())
        except KeyboardInterrupt:
            pass
        else:
            stopped = False
        finally:
            sys.settrace(None)
        assert writer.put(KEYS[1], block())
        assert writer.flush(timeout=5)
        assert writer.nbytes == 0
        assert KEYS[1] in slow.entries
        assert writer.close(timeout=5)
        if not stopped:
            break
    assert number > 10


def test_discarded_blocks_are_gone_from_queue_and_tier(slow):
    writer = TierWriter(slow)
    writer.put(KEYS[0], block())
    assert slow.writing.wait(10)
    writer.put(KEYS[1], block())
    writer.discard(KEYS[1])
    assert writer.nbytes == SIZE
    thread = threading.Thread(target=writer.discard, args=(KEYS[0],))
    thread.start()
    slow.leave.set()
    thread.join(10)
    assert not thread.is_alive()
    writer.close()
    assert slow.entries == {}


def test_threads_that_put_get_and_discard(tmp_path):
    tier = DiskTier(tmp_path)
    wrong = []

    def work(number):
        for turn in range(30):
            mine = KEYS[number * 40 + turn % 40]
            assert writer.put(mine, block(number))
            if value_of(writer.get(mine)) != number:
                wrong.append(mine)
            if turn % 3 == 0:
                writer.discard(mine)
                if writer.get(mine) is not None:
                    wrong.append(mine)

    with TierWriter(tier) as writer:
        in_threads(work, *range(4))
    assert wrong == []
    assert len(tier) == 80
    assert writer.nbytes == 0


def test_a_child_process_has_an_empty_queue_and_a_worker_of_its_own(slow):
    writer = TierWriter(slow)
    writer.put(KEYS[0], block())
    assert slow.writing.wait(10)
    writer.put(KEYS[1], block())

    def put_another():
        slow.leave.set()
        assert len(writer) == writer.nbytes == 0
        assert writer.put(KEYS[2], block())
        assert writer.close()
        assert set(slow.entries) == {KEYS[2]}

    assert exit_status_of_child(put_another) == 0
    slow.leave.set()
    writer.close()
    assert set(slow.entries) == set(KEYS[:2])  # the parent writes what it has queued


@pytest.mark.parametrize("kind", [TierWriter, DiskTier, MemoryTier])
def test_a_child_process_waits_for_no_thread_that_it_lacks(kind, tmp_path):
    tier = MemoryTier(4) if kind is MemoryTier else DiskTier(tmp_path)
    tier = TierWriter(tier) if kind is TierWriter else tier
    held, leave = threading.Event(), threading.Event()

    def hold():
        with tier._changed if kind is TierWriter else tier._lock:
            held.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)

    def use():
        assert tier.put(KEYS[0], block())
        assert value_of(tier.get(KEYS[0])) == 1

    try:
        assert exit_status_of_child(use) == 0
    finally:
        leave.set()
        thread.join()


def test_bad_arguments():
    with pytest.raises(TypeError, match="tier: got dict"):
        TierWriter({})
    with pytest.raises(ValueError, match="max_bytes: got 0"):
        TierWriter(SlowTier(), max_bytes=0)
