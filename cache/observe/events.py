"""Events of the cache for routers, in the wire format of vLLM and SGLang: ZMQ and msgpack.

A message has three frames: topic, sequence number (8 bytes, big-endian), and msgpack `[timestamp, [events], dp_rank]`.
An event is a map with its name under "type". A ROUTER socket replays messages. Its request is an empty frame and a
start sequence in 8 bytes. Its answer is an empty frame and a message for each batch from there on, then an empty
message with sequence -1.

Extra keys are sent unchanged, with two exceptions. An integer outside of 64 bits is sent as decimal digits. A string
that is not valid Unicode is sent as the bytes that were hashed.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...triton_ops._core.checks import check_integer
from ..forks import repair_after_fork
from ..keys import KeyAt

if TYPE_CHECKING:
    from ..manager import CacheManager

END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """A publisher of events about blocks that enter or leave a manager's prefix cache.

    It needs the extra `events` (pyzmq, msgpack). Events are collected as they happen. Call `flush` once a step to send
    them. After `os.fork()`, the child's publisher is closed.

    Args:
        manager: The manager to watch.
        endpoint: Address to bind the PUB socket to, such as `tcp://*:5557`.
        replay_endpoint: Address to bind the ROUTER socket for replays to. None: no replay.
        topic: First frame of each message.
        dp_rank: Data-parallel rank to send with every batch.
        buffer_batches: Number of batches kept for replay.
        medium: Name of the memory that holds the blocks.

    Raises:
        ImportError: pyzmq or msgpack is missing.
        TypeError: `dp_rank` or `buffer_batches` is not an integer.
        ValueError: A message cannot carry `dp_rank`, or `buffer_batches` is below 1.
        zmq.ZMQError: An endpoint cannot be bound. Nothing is left open.

    Attributes:
        dropped: Number of events that could not be packed and were dropped, each with a warning.
        endpoint: Address of the PUB socket, with the actual port in place of a `*`.
        replay_endpoint: Address of the ROUTER socket; None without replay.

    Examples:
        >>> from pc.cache.observe.events import EventPublisher
        >>> manager = pc.CacheManager(num_blocks=8, block_size=4)
        >>> publisher = EventPublisher(manager, "tcp://127.0.0.1:*")
        >>> allocation, merged = manager.allocate("a", range(9)), manager.commit("a", 9)
        >>> publisher.flush()  # once a step: what was published
        0
        >>> publisher.close()
    """

    def __init__(
        self,
        manager: CacheManager[Any, Any, Any],
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        dp_rank: int | None = None,
        buffer_batches: int = 10_000,
        medium: str = "GPU",
    ) -> None:
        try:
            msgpack, zmq = import_module("msgpack"), import_module("zmq")
        except ImportError as error:
            raise ImportError(f"EventPublisher needs {error.name}: pip install pyzmq msgpack") from None
        self._dp_rank = None if dp_rank is None else check_integer("dp_rank", dp_rank, -(1 << 63), 64)
        buffer_batches = check_integer("buffer_batches", buffer_batches, 1)
        self._pack = msgpack.packb
        self._topic = topic.encode()
        self._medium = medium
        self._pending: deque[dict[str, Any]] = deque()  # its methods are atomic
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._lock = threading.Lock()
        self.dropped = 0
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self.replay_endpoint: str | None = None
        self._closing = threading.Event()
        self._replayer: threading.Thread | None = None
        try:
            self._publisher.bind(endpoint)
            self.endpoint: str = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
            if replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                # Above its limit a socket drops messages silently, so each client's queue has room for two replays.
                router.setsockopt(zmq.SNDHWM, min(2 * (buffer_batches + 1), (1 << 31) - 1))
                router.bind(replay_endpoint)
                self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
                self._replayer = threading.Thread(target=self._serve_replay, args=(router,), daemon=True)
                self._replayer.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._manager = manager
        repair_after_fork(self)
        manager.listeners.append(self)

    def _after_fork(self) -> None:
        """Close the publisher in a child process, which lacks the threads of the sockets."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closing.set()
        self._stop_listening()

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: Any
    ) -> None:
        """Record that blocks of one sequence were published. Each is the parent of the next."""
        self._pending.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": token_ids,
                "block_size": self._manager.block_size,
                "lora_id": None,
                "lora_name": _publishable(extra_keys) if isinstance(extra_keys, str) else None,
                "medium": self._medium,
                "extra_keys": None if extra_keys is None else [_listed(extra_keys)] * len(hashes),
                "group_idx": group,
                "hash_algorithm": self._manager.hash_algorithm,
                "hash_seed": _publishable(self._manager.seed),
            }
        )

    def removed(self, group: int, hashes: list[bytes]) -> None:
        """Record that blocks were evicted."""
        event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": self._medium, "group_idx": group}
        self._pending.append(event)

    def cleared(self) -> None:
        """Record that the manager was reset."""
        self._pending.append({"type": "AllBlocksCleared"})

    def flush(self) -> int | None:
        """Send the events since the last call as one batch.

        Returns:
            The batch's sequence number; None if there were no events.
        """
        with self._lock:
            events = [self._pending.popleft() for _ in range(len(self._pending))]
            if not events or self._closing.is_set():
                return None
            payload = self._packed(events)
            sequence = self._sequence
            self._sequence += 1
            self._buffer.append((sequence, payload))
            self._publisher.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
            return sequence

    def _packed(self, events: list[dict[str, Any]]) -> bytes:
        """Return a packed batch. An event that cannot be packed is dropped, so that later events are not lost too."""
        now = time.time()
        try:
            payload: bytes = self._pack([now, events, self._dp_rank])
        except Exception:
            kept = [event for event in events if self._can_pack(event)]
            self.dropped += len(events) - len(kept)
            payload = self._pack([now, kept, self._dp_rank])
        return payload

    def _can_pack(self, event: dict[str, Any]) -> bool:
        """Return whether an event can be packed; warn if it cannot."""
        try:
            self._pack(event)
        except Exception as error:
            warnings.warn(f"an event is not published: {error}: {event!r:.200}", RuntimeWarning, stacklevel=4)
            return False
        return True

    def _serve_replay(self, router: Any) -> None:
        """Answer requests for replays until the publisher is closed. A thread runs this."""
        while not self._closing.is_set():
            if not router.poll(100):
                continue
            client, *_, start_frame = router.recv_multipart()
            start = int.from_bytes(start_frame, "big")
            with self._lock:
                batches = [batch for batch in self._buffer if batch[0] >= start]
            try:
                for sequence, payload in batches:
                    router.send_multipart([client, b"", self._topic, sequence.to_bytes(8, "big"), payload])
                router.send_multipart([client, b"", b"", END, b""])
            except Exception as error:  # an error of one client must not end the service for the others
                warnings.warn(f"a replay was not sent: {error}", RuntimeWarning, stacklevel=2)
        router.close(linger=0)

    def close(self) -> None:
        """Send pending events, stop listening and close the sockets. A second call does nothing."""
        if self._closing.is_set():
            return
        try:
            self.flush()
        finally:
            self._closing.set()
            self._stop_listening()
            if self._replayer is not None:
                self._replayer.join()
            self._publisher.close(linger=1000)
            self._context.term()

    def _stop_listening(self) -> None:
        listeners = self._manager.listeners
        listeners[:] = [listener for listener in listeners if listener is not self]


def _listed(extra_keys: Any) -> list[Any]:
    """Return a request's extra keys in a form that msgpack can carry. A `KeyAt` becomes (key, position)."""
    keys = [extra_keys] if isinstance(extra_keys, str | bytes | int | KeyAt) else list(extra_keys)
    return [_publishable((key.key, key.position) if isinstance(key, KeyAt) else key) for key in keys]


def _publishable(key: Any) -> Any:
    """Return a key in a form that msgpack can carry; the same object if possible."""
    if isinstance(key, int) and not -(2**63) <= key < 2**64:
        return str(key)
    if isinstance(key, str) and not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            return key.encode("utf-8", "surrogatepass")
    if isinstance(key, tuple | list):
        return [_publishable(part) for part in key]
    return key
