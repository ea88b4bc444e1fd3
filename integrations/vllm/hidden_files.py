"""Files with the hidden states of prompts, for clients of a server.

A request has one safetensors file, named by its id. The bytes and the age of the files are limited.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import torch
from safetensors.torch import save_file

from .api import logger

MAX_BYTES, MAX_SECONDS, PENDING_BYTES = 10 << 30, 3600.0, 1 << 30
"""Default limits of a folder: bytes of files, their age in seconds, and bytes waiting in memory."""

SUFFIX, PART = ".safetensors", ".part"
PART_SECONDS = 600
"""A partial file that is this much older than the folder's own limit was left by a killed process."""

LONGEST = 200
"""Maximum number of characters of a request id in a file's name. A longer id is replaced by its sha256."""


def file_name(request_id: str) -> str:
    """Return a request's file name: its id in vLLM's answer ("cmpl-...-0"), percent-encoded.

    A client may choose any id. If the name is too long, the file has the id's hash.
    """
    name = quote(request_id, safe="")
    return (name if len(name) <= LONGEST else hashlib.sha256(request_id.encode()).hexdigest()) + SUFFIX


class RowsFolder:
    """A folder that one thread writes and keeps within limits. Others may read and delete its files at any time.

    A file appears only when it is complete. Several engines may share a folder; each keeps it within its own limits.
    Beyond `max_bytes` the oldest files are deleted, but never the newest. A write also deletes files older than
    `max_seconds`, if the last such check is more than a 16th of `max_seconds` ago. Rows beyond `pending_bytes` in
    memory are dropped, with one warning.

    Raises:
        OSError: The folder cannot be created or written.
        ValueError: The folder has a model, whose weights would be deleted as old files.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self.path = Path(path)
        self.max_bytes, self.max_seconds, self.pending_bytes = max_bytes, max_seconds, pending_bytes
        self._lock = threading.Lock()
        self._pending, self._warned = 0, False
        self._total, self._trim_at = 0, 0.0  # bytes found by the last scan or written since; time of the next scan
        self.path.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.path}: cannot be written")
        if (self.path / "config.json").exists():
            raise ValueError(f"pc_hidden_states_dir: got {self.path}, the folder of a model, needs one of its own")
        self._writer = ThreadPoolExecutor(1, "pc-hidden-states")

    def put(self, request_id: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Queue tensors for writing. They must not change any more. A failed write is only logged as a warning."""
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            fits = not self._pending or self._pending + nbytes <= self.pending_bytes
            self._pending += nbytes if fits else 0
        if not fits:
            if not self._warned:
                logger.warning("hidden states are dropped: more than %d bytes wait to be written", self.pending_bytes)
            self._warned = True
            return
        host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        self._writer.submit(self._write, request_id, host, dict(metadata), nbytes)

    def _write(self, request_id: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str], nbytes: int) -> None:
        """Write the file of a request, and trim the folder if it is due. The writer's thread runs this."""
        part = self.path / f".{uuid.uuid4().hex}{PART}"
        try:
            save_file(tensors, part, metadata)
            self._total += part.stat().st_size
            part.replace(self.path / file_name(request_id))
            if self._total > self.max_bytes or time.time() > self._trim_at:
                self._trim()
        except Exception as error:  # safetensors has its own error for a full disk; the engine continues
            logger.warning("hidden states of %s are not written: %s", request_id, error)
            with contextlib.suppress(OSError):
                part.unlink()
        finally:
            with self._lock:
                self._pending -= nbytes

    def _trim(self) -> None:
        """Delete expired files, partial files of killed processes, and the oldest files beyond 15/16 of the limit."""
        found = []
        for entry in os.scandir(self.path):
            if entry.name.endswith((SUFFIX, PART)):
                with contextlib.suppress(FileNotFoundError):  # a client deletes what it has read
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime, stat.st_size, entry))
        found.sort(key=lambda each: each[0], reverse=True)
        # The last 16th is room for files until the next scan, because the folder may have many files.
        kept, now, room = 0, time.time(), self.max_bytes - self.max_bytes // 16
        for modified, size, entry in found:
            is_part = entry.name.endswith(PART)
            if now - modified > self.max_seconds + PART_SECONDS * is_part or (kept and kept + size > room):
                room = room if is_part else 0  # older files are deleted too
                with contextlib.suppress(OSError):  # also a folder, or another user's file: older ones must go too
                    os.unlink(entry)
            elif not is_part:
                kept += size
        self._total, self._trim_at = kept, now + self.max_seconds / 16

    def close(self) -> None:
        """Wait until all files are written."""
        self._writer.shutdown()
