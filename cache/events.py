"""Events of the cache for routers, in the wire format of vLLM and SGLang: ZMQ and msgpack.

A message has three frames: topic, sequence number (8 bytes, big-endian), msgpack `[timestamp, [events], dp_rank]`. An
event is a map with its name under "type". A ROUTER socket replays: a request is an empty frame and a start sequence in
8 bytes, the answer an empty frame and one message for each batch from there on, then one with sequence -1 and nothing
in it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .hashing import KeyAt

if TYPE_CHECKING:
    from .manager import CacheManager

END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Publishes what becomes findable in a manager and what ceases to be.

    Needs the extra `events` (pyzmq, msgpack). Events are collected as they happen and sent by `flush`, once a step.

    Args:
        manager: The manager to watch.
        endpoint: Where to bind the PUB socket, such as `tcp://*:5557`.
        replay_endpoint: Where to bind the ROUTER socket that replays; None: no replay.
        topic: First frame.
        dp_rank: Data-parallel rank named in every batch.
        buffer_batches: Batches kept for replay.
        medium: Name of the memory the blocks are in.

    Attributes:
        endpoint: Where the PUB socket is bound, with the port that a `*` stood for.
        replay_endpoint: Likewise for the ROUTER socket, None without replay.
    """

    def __init__(
        self,
        manager: CacheManager,
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
            raise ImportError(f"EventPublisher needs {error.name}: pip install 'pc-kernels[events]'") from None
        self._pack = msgpack.packb
        self._topic = topic.encode()
        self._dp_rank = dp_rank
        self._medium = medium
        self._pending: list[dict[str, Any]] = []
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.bind(endpoint)
        self.endpoint = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str | None = None
        self._closing = threading.Event()
        self._replayer: threading.Thread | None = None
        if replay_endpoint is not None:
            router = self._context.socket(zmq.ROUTER)
            router.bind(replay_endpoint)
            self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._replayer = threading.Thread(target=self._serve_replay, args=(router,), daemon=True)
            self._replayer.start()
        self._manager = manager
        manager.listeners.append(self)

    def stored(
        self,
        group: int,
        hashes: list[bytes],
        parent: bytes | None,
        token_ids: list[int],
        extra_keys: Any,
    ) -> None:
        """Blocks of one sequence became findable, each the parent of the next."""
        self._add(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": token_ids,
                "block_size": self._manager.block_size,
                "lora_id": None,
                "lora_name": extra_keys if isinstance(extra_keys, str) else None,
                "medium": self._medium,
                "extra_keys": None if extra_keys is None else [_plain(extra_keys)] * len(hashes),
                "group_idx": group,
                "hash_algorithm": self._manager.hash_algorithm,
                "hash_seed": self._manager.seed,
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
            payload = self._pack([time.time(), self._pending, self._dp_rank])
            sequence, self._pending = self._sequence, []
            self._sequence += 1
            self._buffer.append((sequence, payload))
            self._publisher.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
            return sequence

    def _serve_replay(self, router: Any) -> None:
        while not self._closing.is_set():
            if not router.poll(100):
                continue
            frames = router.recv_multipart()
            client, start = frames[0], int.from_bytes(frames[-1], "big")
            with self._lock:
                batches = [batch for batch in self._buffer if batch[0] >= start]
            for sequence, payload in batches:
                router.send_multipart([client, b"", self._topic, sequence.to_bytes(8, "big"), payload])
            router.send_multipart([client, b"", b"", END, b""])
        router.close(linger=0)

    def close(self) -> None:
        """Sends what is pending and closes the sockets."""
        self.flush()
        self._manager.listeners.remove(self)
        self._closing.set()
        if self._replayer is not None:
            self._replayer.join()
        self._publisher.close(linger=1000)
        self._context.term()


def _plain(extra_keys: Any) -> list[Any]:
    """A request's extra keys as msgpack can carry them; a placed key as (key, position)."""
    keys = [extra_keys] if isinstance(extra_keys, str | bytes | int | KeyAt) else list(extra_keys)
    return [(key.key, key.position) if isinstance(key, KeyAt) else key for key in keys]
