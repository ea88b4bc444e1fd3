"""Calls that a KeyboardInterrupt cannot leave half done: the main thread handles signals, so another does the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class _Worker:
    """A thread that runs one function after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="pc-uninterrupted", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self._jobs.get().run()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        job = _Job(function, arguments)
        self._jobs.put(job)
        try:
            job.done.acquire()
        except BaseException:  # not raised before the work is done: what it holds is the caller's to give back
            while not job.finished:
                time.sleep(1e-4)
            raise
        if job.error is not None:
            raise job.error
        return job.result


class _Job:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        try:
            self.result = self._function(*self._arguments)
        except BaseException as error:
            self.error = error
        del self._function, self._arguments
        self.finished = True
        self.done.release()


_worker: _Worker | None = None


def uninterrupted(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a short function to its end, even when a KeyboardInterrupt arrives while the caller waits for it."""
    global _worker
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    if _worker is None or not _worker.thread.is_alive():  # none survives a fork
        _worker = _Worker()
    result: T = _worker.call(function, arguments)
    return result
