"""Events of the cache for routers, in the wire format of vLLM and SGLang: ZMQ and msgpack.

A message has three frames: topic, sequence number (8 bytes, big-endian), msgpack `[timestamp, [events], dp_rank]`. An
event is a map with its name under "type". A ROUTER socket replays: a request is an empty frame and a start sequence in
8 bytes, the answer an empty frame and one message for each batch from there on, then one with sequence -1 and nothing
in it.

Extra keys go out as they are; an integer that msgpack cannot carry (outside of 64 bits) as its decimal digits, a string
that is no valid Unicode as the bytes that were hashed.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...triton_ops._checks import check_integer
from ..keys import KeyAt

if TYPE_CHECKING:
    from ..manager import CacheManager

END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Publishes which blocks enter a manager's prefix cache and which leave it.

    Needs the extra `events` (pyzmq, msgpack). Events are collected as they happen and sent by `flush`, once a step.

    Args:
        manager: The manager to watch.
        endpoint: Where to bind the PUB socket, such as `tcp://*:5557`.
        replay_endpoint: Where to bind the ROUTER socket that replays; None: no replay.
        topic: First frame.
        dp_rank: Data-parallel rank named in every batch.
        buffer_batches: Batches kept for replay.
        medium: Name of the memory the blocks are in.

    Raises:
        ImportError: pyzmq or msgpack is missing.
        TypeError: A dp_rank or buffer_batches that is no integer.
        ValueError: A dp_rank that a message cannot carry, or no batch to keep.
        zmq.ZMQError: An endpoint that cannot be bound; nothing is left open.

    Attributes:
        dropped: Events that could not be packed and were left out, each with a warning.
        endpoint: Where the PUB socket is bound, with the port that a `*` stood for.
        replay_endpoint: Likewise for the ROUTER socket, None without replay.

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
        self._pending: list[dict[str, Any]] = []
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
                router.bind(replay_endpoint)
                self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
                self._replayer = threading.Thread(target=self._serve_replay, args=(router,), daemon=True)
                self._replayer.start()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._manager = manager
        manager.listeners.append(self)

    def stored(
        self, group: int, hashes: list[bytes], parent: bytes | None, token_ids: list[int], extra_keys: Any
    ) -> None:
        """Blocks of one sequence were published in the prefix cache, each the parent of the next."""
        self._add(
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
        """Blocks were evicted."""
        self._add({"type": "BlockRemoved", "block_hashes": hashes, "medium": self._medium, "group_idx": group})

    def cleared(self) -> None:
        """The manager was reset."""
        self._add({"type": "AllBlocksCleared"})

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._pending.append(event)

    def flush(self) -> int | None:
        """Sends what has happened since the last call as one batch.

        Returns:
            The batch's sequence number, None when nothing had happened.
        """
        with self._lock:
            if not self._pending:
                return None
            events, self._pending = self._pending, []
            payload = self._packed(events)
            sequence = self._sequence
            self._sequence += 1
            self._buffer.append((sequence, payload))
            self._publisher.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
            return sequence

    def _packed(self, events: list[dict[str, Any]]) -> bytes:
        """A batch; an event that cannot be packed is left out rather than every one after it."""
        now = time.time()
        try:
            payload: bytes = self._pack([now, events, self._dp_rank])
        except Exception:
            kept = [event for event in events if self._can_pack(event)]
            self.dropped += len(events) - len(kept)
            payload = self._pack([now, kept, self._dp_rank])
        return payload

    def _can_pack(self, event: dict[str, Any]) -> bool:
        try:
            self._pack(event)
        except Exception as error:
            warnings.warn(f"an event is not published: {error}: {event!r:.200}", RuntimeWarning, stacklevel=4)
            return False
        return True

    def _serve_replay(self, router: Any) -> None:
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
            except Exception as error:  # of one client; the others are served on
                warnings.warn(f"a replay was not sent: {error}", RuntimeWarning, stacklevel=2)
        router.close(linger=0)

    def close(self) -> None:
        """Sends what is pending, stops listening and closes the sockets; once is enough, twice does no harm."""
        if self._closing.is_set():
            return
        try:
            self.flush()
        finally:
            self._closing.set()
            listeners = self._manager.listeners
            listeners[:] = [listener for listener in listeners if listener is not self]
            if self._replayer is not None:
                self._replayer.join()
            self._publisher.close(linger=1000)
            self._context.term()


def _listed(extra_keys: Any) -> list[Any]:
    """A request's extra keys as msgpack can carry them; a placed key as (key, position)."""
    keys = [extra_keys] if isinstance(extra_keys, str | bytes | int | KeyAt) else list(extra_keys)
    return [_publishable((key.key, key.position) if isinstance(key, KeyAt) else key) for key in keys]


def _publishable(key: Any) -> Any:
    """A key as msgpack can carry it, the same object where it can."""
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
