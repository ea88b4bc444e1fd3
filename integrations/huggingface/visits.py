"""The compressed documents that the calls of a thread or task read, from `with document:` to its end.

A context variable keeps them, so each thread and each asyncio task has its own. Tasks take over what the task that
creates them has entered; `carry` makes threads do the same, and what is submitted to a pool of threads.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from .api import guard_managers
from .calls import UnsupportedError
from .settings import inherited_settings

_lock = threading.Lock()
_open: list[Visit] = []  # of all threads
_VISITS: ContextVar[tuple[Visit, ...]] = ContextVar("pc_documents", default=())
_APART: ContextVar[bool] = ContextVar("pc_apart", default=False)
_entered = False  # whether some block has not ended: forward passes that are compiled depend on it


class Visit:
    """One `with document:` block, of a `CompressedDocument`."""

    def __init__(self, document: Any) -> None:
        self.document, self.owner, self.open = document, _here(), True
        self.left_elsewhere = False  # so that a context which still has it tells nothing

    def modules(self) -> Iterator[Any]:
        """Return the modules of the document's model, with what is inside them."""
        model = self.document.documents.model
        return iter(()) if model is None else model.modules()

    @property
    def in_this_thread(self) -> bool:
        """Whether the block was entered in the calling thread."""
        return self.owner[0] == threading.get_ident()


def _here() -> tuple[int, Any]:
    """Return the calling thread, and the task that it runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        task = None
    return threading.get_ident(), task


def enter(document: Any) -> Visit:
    """Let the calls of this thread or task read a document."""
    carry()
    visit = Visit(document)
    with _lock:
        _change([*_open, visit])
    _VISITS.set((*_VISITS.get(), visit))
    return visit


def _change(visits: list[Visit]) -> None:
    global _entered
    _open[:], _entered = visits, bool(visits)


def open_visits() -> list[Visit]:
    """Return the blocks of all threads that have not ended."""
    with _lock:
        return list(_open)


def leave(visit: Visit) -> None:
    """End a block, whichever thread or task it is left in."""
    with _lock:
        _change([other for other in _open if other is not visit])
    visit.open, visit.left_elsewhere = False, visit.owner != _here()
    _VISITS.set(tuple(other for other in _VISITS.get() if other is not visit))


def visited() -> list[Visit]:
    """Return the blocks that the calling thread or task is in, or began in, the innermost last."""
    here = _here()
    return [v for v in _VISITS.get() if v.open or not (v.left_elsewhere or v.owner == here)]


@contextmanager
def apart() -> Iterator[None]:
    """Let this thread's forward passes compute what they compute outside of documents.

    Probes need that, and calls that were checked, which read their document through their own cache.
    """
    before = _APART.get()
    _APART.set(True)
    try:
        yield
    finally:
        _APART.set(before)


def check_forward(module: Any) -> None:
    """Refuse an attention layer's pass that would leave out the document that this thread has entered.

    Raises:
        UnsupportedError: The layer belongs to the document's model, and no call of `model.generate` runs it.
    """
    if not _VISITS.get() or _APART.get() or not getattr(module, "is_causal", True):
        return
    if any(module is layer for visit in visited() for layer in visit.modules()):
        raise UnsupportedError(
            "a forward pass within `with document:` would not read the document: only model.generate reads it; "
            "call the model outside of the block"
        )


def may_be_within() -> bool:
    """Return whether some thread is within a document, for forward passes that are compiled."""
    return _entered


def check_manager(model: Any) -> None:
    """Refuse continuous batching of a model whose document this thread has entered.

    Raises:
        UnsupportedError: The thread is within a document of the model.
    """
    if any(visit.document.documents.model is model for visit in visited()):
        raise UnsupportedError(
            "continuous batching within `with document:` would not read the document: only model.generate reads it; "
            "use generate_batch and its managers outside of the block"
        )


def carry() -> None:
    """Let threads and pools of threads take over the documents of the thread that starts them or submits to them.

    `Thread(target=model.generate)` within `with document:` is how text is streamed. Python does the same for all
    context variables from version 3.14 on, where `thread_inherit_context` is set.
    """
    if hasattr(threading.Thread.start, "_pc_carries"):
        return
    guard_managers(check_manager)
    start, submit = threading.Thread.start, cast("Callable[..., Future[Any]]", ThreadPoolExecutor.submit)

    @functools.wraps(start)
    def start_within(self: threading.Thread) -> None:
        if visited():
            self.run = _within(self.run)  # type: ignore[method-assign]
        start(self)

    @functools.wraps(submit)
    def submit_within(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        visits = _VISITS.get()
        carried = _within(fn) if visited() else fn
        _VISITS.set(())  # a thread that the pool starts for this works for others later
        try:
            return submit(self, carried, *args, **kwargs)
        finally:
            _VISITS.set(visits)

    start_within._pc_carries = True  # type: ignore[attr-defined]
    threading.Thread.start = start_within  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_within  # type: ignore[method-assign,assignment]


def _within(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with the documents and settings of the caller."""
    visits, settings = tuple(Visit(visit.document) for visit in visited()), inherited_settings()

    def run(*args: Any, **kwargs: Any) -> Any:
        before = _VISITS.get()
        _VISITS.set(visits)
        try:
            with settings():
                return function(*args, **kwargs)
        finally:
            _VISITS.set(before)

    return run
