"""Events as they are sent, and metrics as a scrape returns them."""

from __future__ import annotations

import contextlib
import time

import pytest
from cache_cases import run
from processes import exit_status_of_child

import pc


def test_wire_format_and_replay():
    msgpack = pytest.importorskip("msgpack")
    zmq = pytest.importorskip("zmq")
    from pc.cache.observe.events import EventPublisher

    m = pc.CacheManager(2, block_size=4, seed=7)
    context = zmq.Context()
    publisher = EventPublisher(m, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv", dp_rank=3)
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"kv")
        while not subscriber.poll(20):  # a subscription takes a moment to arrive
            publisher.cleared()
            publisher.flush()
        while subscriber.poll(50):
            subscriber.recv_multipart()
        m.allocate("a", list(range(8)), extra_keys="lora")
        m.commit("a", 8)
        first = publisher.flush()
        hashes = m.block_hashes("a")
        m.free("a")
        m.allocate("b", [5] * 8)
        publisher.flush()
        assert publisher.flush() is None
        topic, sequence, payload = subscriber.recv_multipart()
        assert (topic, int.from_bytes(sequence, "big")) == (b"kv", first)
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 3
        (stored,) = events
        assert stored["type"] == "BlockStored"
        assert stored["block_hashes"] == hashes
        assert stored["parent_block_hash"] is None
        assert stored["token_ids"] == list(range(8))
        assert (stored["block_size"], stored["lora_name"], stored["group_idx"]) == (4, "lora", 0)
        assert stored["extra_keys"] == [["lora"], ["lora"]]
        assert (stored["hash_algorithm"], stored["hash_seed"]) == ("sha256", 7)
        _, events, _ = msgpack.unpackb(subscriber.recv_multipart()[2])
        assert [e["type"] for e in events] == ["BlockRemoved"]
        assert sorted(events[0]["block_hashes"]) == sorted(hashes)

        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        replayed = []
        while (frames := dealer.recv_multipart())[-1]:
            replayed.append(frames)
        assert [int.from_bytes(f[-2], "big") for f in replayed] == [first, first + 1]
        assert replayed[0][-1] == payload
        assert int.from_bytes(frames[-2], "big", signed=True) == -1
    finally:
        publisher.close()
        context.destroy(linger=0)
    assert m.listeners == []


@pytest.mark.parametrize(
    ("keys", "published"),
    [
        ([2**64], ["18446744073709551616"]),
        ([-(2**70)], [str(-(2**70))]),
        ([2**64 - 1, -(2**63)], [2**64 - 1, -(2**63)]),
        ([("a", (2**80,))], [["a", ["1208925819614629174706176"]]]),
        (pc.KeyAt(0, 2**64), [["18446744073709551616", 0]]),
    ],
)
def test_every_key_is_published(keys, published):
    msgpack = pytest.importorskip("msgpack")
    pytest.importorskip("zmq")
    from pc.cache.observe.events import EventPublisher

    m = pc.CacheManager(8, block_size=4, seed=2**64)
    publisher = EventPublisher(m, "tcp://127.0.0.1:*")
    try:
        m.allocate("a", list(range(8)), extra_keys=keys)
        m.commit("a", 8)
        assert publisher.flush() == 0
        _, (stored,), _ = msgpack.unpackb(publisher._buffer[0][1])
        assert stored["extra_keys"] == [published] * 2
        assert stored["hash_seed"] == str(2**64)
    finally:
        publisher.close()


def test_a_slow_client_gets_a_whole_replay():
    """Sockets drop messages above their limit without a word, and the client would wait for the end forever."""
    pytest.importorskip("msgpack")
    zmq = pytest.importorskip("zmq")
    from pc.cache.observe.events import EventPublisher

    count, m, context = 6_000, pc.CacheManager(2, block_size=4), zmq.Context()
    publisher = EventPublisher(m, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    try:
        for _ in range(count):
            publisher.stored(0, [bytes(64)], None, [0] * 500, None)
            publisher.flush()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(publisher.replay_endpoint)
        for _ in range(2):  # the second request finds the first answer unread
            dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(10_000)
        time.sleep(0.3)  # nothing is read meanwhile
        for _ in range(2):
            for number in range(count + 1):
                assert dealer.poll(10_000), f"message {number} did not come"
                sequence = int.from_bytes(dealer.recv_multipart()[2], "big", signed=True)
                assert sequence == (number if number < count else -1)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_an_event_that_cannot_be_packed_does_not_stop_the_others():
    msgpack = pytest.importorskip("msgpack")
    pytest.importorskip("zmq")
    from pc.cache.observe.events import EventPublisher

    m = pc.CacheManager(8, block_size=4)
    publisher = EventPublisher(m, "tcp://127.0.0.1:*")
    try:
        publisher.removed(0, [b"x"])
        publisher.removed(0, [object()])
        publisher.cleared()
        with pytest.warns(RuntimeWarning, match="an event is not published: [Cc]an.* serialize"):
            assert publisher.flush() == 0
        assert publisher.dropped == 1
        _, events, _ = msgpack.unpackb(publisher._buffer[0][1])
        assert [event["type"] for event in events] == ["BlockRemoved", "AllBlocksCleared"]
        assert publisher.flush() is None
        publisher.removed(0, [object()])
        with pytest.warns(RuntimeWarning, match="an event is not published"):
            publisher.close()
    finally:
        publisher.close()
    assert m.listeners == []


def test_a_publisher_that_cannot_begin_leaves_nothing_behind():
    pytest.importorskip("msgpack")
    zmq = pytest.importorskip("zmq")
    from pc.cache.observe.events import EventPublisher

    m = pc.CacheManager(8, block_size=4)
    for options, error, message in (
        ({"dp_rank": 2**64}, ValueError, "dp_rank: got 18446744073709551616"),
        ({"dp_rank": "1"}, TypeError, "dp_rank: got '1'"),
        ({"buffer_batches": 0}, ValueError, "buffer_batches: got 0"),
        ({"replay_endpoint": "nowhere"}, zmq.ZMQError, "argument|nvalid"),
    ):
        with pytest.raises(error, match=message):
            EventPublisher(m, "tcp://127.0.0.1:*", **options)
    assert m.listeners == []


def test_metrics_show_the_stats():
    client = pytest.importorskip("prometheus_client")
    from pc.cache.observe.metrics import CacheCollector

    m = pc.CacheManager(4, block_size=4)
    registry = client.CollectorRegistry()
    CacheCollector(m, registry)
    for i in range(3):
        run(m, i, [i] * 12)
    m.allocate("again", [2] * 13)
    text = client.generate_latest(registry).decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    stats = m.stats()
    assert float(values['pc_cache_evictions_total{manager="0"}']) == stats.evictions > 0
    assert float(values['pc_cache_hit_tokens_total{cause="prefix",manager="0"}']) == 12
    assert float(values['pc_cache_held_blocks{manager="0"}']) == 4
    assert float(values['pc_cache_residency_ticks_bucket{le="+Inf",manager="0"}']) == stats.evictions
    assert float(values['pc_cache_residency_ticks_sum{manager="0"}']) == stats.residency_sum > 0


def test_managers_of_one_registry_are_told_apart():
    client = pytest.importorskip("prometheus_client")
    from pc.cache.observe.metrics import CacheCollector

    registry = client.CollectorRegistry()
    first, named = (CacheCollector(pc.CacheManager(8 + i), registry, name=name) for i, name in enumerate((None, "kv")))
    last = CacheCollector(pc.CacheManager(10), registry)
    with pytest.raises(ValueError, match="name: got 'kv', needs one that no other manager of pc_cache has"):
        CacheCollector(pc.CacheManager(4), registry, name="kv")

    def free_blocks():
        lines = client.generate_latest(registry).decode().splitlines()
        assert sum(line == "# TYPE pc_cache_free_blocks gauge" for line in lines) == (len(lines) > 0)
        return sorted(line for line in lines if line.startswith("pc_cache_free_blocks"))

    series = [f'pc_cache_free_blocks{{manager="{name}"}} {n}' for name, n in (("0", 8.0), ("1", 10.0), ("kv", 9.0))]
    assert free_blocks() == series
    first.close()
    first.close()
    assert free_blocks() == series[1:]
    again = CacheCollector(pc.CacheManager(11), registry)
    first.close()
    assert free_blocks()[0] == 'pc_cache_free_blocks{manager="0"} 11.0'
    for collector in (named, last, again):
        collector.close()
    assert client.generate_latest(registry) == b""


@pytest.mark.parametrize("lock", [False, True], ids=["free", "held by another thread"])
def test_a_child_process_publishes_nothing_and_waits_for_nobody(lock):
    """It lacks the threads of the sockets, and the thread that may hold the publisher's lock."""
    pytest.importorskip("msgpack")
    pytest.importorskip("zmq")
    from pc.cache.observe.events import EventPublisher

    m = pc.CacheManager(16, block_size=4)
    publisher = EventPublisher(m, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")

    def use():
        run(m, "b", [1] * 9)
        assert publisher.flush() is None
        publisher.close()
        assert m.listeners == []

    try:
        run(m, "a", list(range(9)))
        with publisher._lock if lock else contextlib.nullcontext():
            assert exit_status_of_child(use) == 0
        assert publisher.flush() == 0
        run(m, "c", [2] * 9)
        assert publisher.flush() == 1
    finally:
        publisher.close()
