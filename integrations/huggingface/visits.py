"""The `with document:` blocks that each thread and task is in. Calls within one read a compressed document.

A context variable keeps them, so each thread and each asyncio task has its own. A new task inherits the blocks of the
task that creates it. `carry` makes new threads and functions submitted to thread pools inherit them too.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from ..seam import wrap_once
from .api import guard_managers
from .calls import UnsupportedError
from .settings import bound, inherited_settings

_lock = threading.Lock()
_open: list[Visit] = []  # blocks that have not ended, of all threads
_VISITS: ContextVar[tuple[Visit, ...]] = ContextVar("pc_documents", default=())
_APART: ContextVar[bool] = ContextVar("pc_apart", default=False)


class Visit:
    """One `with document:` block: its document, the thread and task that entered it, and whether it is open."""

    def __init__(self, document: Any) -> None:
        self.document, self.owner, self.open = document, _here(), True
        self.left_elsewhere = False  # if True, contexts that still have the block ignore it
        self._known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def has(self, module: Any) -> bool:
        """Return whether a module belongs to the document's model. The modules are searched once for each `module`."""
        found = self._known.get(module)
        if found is None:
            model = self.document.documents.model
            found = self._known[module] = model is not None and any(module is own for own in model.modules())
        return found

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
    """Open a block: let the calls of this thread or task read a document."""
    carry()
    visit = Visit(document)
    with _lock:
        _open.append(visit)
    _VISITS.set((*_VISITS.get(), visit))
    return visit


def open_visits() -> list[Visit]:
    """Return the blocks that have not ended, of all threads."""
    with _lock:
        return list(_open)


def leave(visit: Visit) -> None:
    """End a block. Any thread or task may call this, not only the one that entered the block."""
    with _lock:
        _open[:] = [other for other in _open if other is not visit]
    visit.open, visit.left_elsewhere = False, visit.owner != _here()
    _VISITS.set(tuple(other for other in _VISITS.get() if other is not visit))


def visited() -> list[Visit]:
    """Return the blocks that the caller is in, the innermost last.

    Threads and tasks that inherited a block remain in it after the block has ended. No thread or task
    remains in a block that another thread or task ended than the one that entered it.
    """
    visits = _VISITS.get()
    here = _here() if visits else None
    return [v for v in visits if v.open or not (v.left_elsewhere or v.owner == here)]


apart = functools.partial(bound, _APART, True)
"""Return a context in which this thread's forward passes run as if it had entered no document.

Probes need this because they must not read a document. Calls of `generate` over a document need it because they read
the document through their own cache.
"""


def check_forward(module: Any) -> None:
    """Refuse an attention layer's pass that would ignore the document that this thread has entered.

    Raises:
        UnsupportedError: The layer belongs to the document's model, and no call of `model.generate` runs it.
    """
    if not _VISITS.get() or _APART.get() or not getattr(module, "is_causal", True):
        return
    if any(visit.has(module) for visit in visited()):
        raise UnsupportedError(
            "a forward pass within `with document:` would not read the document: only model.generate reads it; "
            "call the model outside of the block"
        )


def may_be_within() -> bool:
    """Return whether any thread is within a document, for compiled forward passes."""
    return bool(_open)


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
    """Let new threads, and functions submitted to thread pools, inherit the documents of the calling thread.

    `Thread(target=model.generate)` within `with document:` is the usual way to stream text. From version 3.14 on,
    Python does the same for all context variables if `thread_inherit_context` is set.
    """
    guard_managers(check_manager)
    wrap_once(threading.Thread, "start", _start_within)
    wrap_once(ThreadPoolExecutor, "submit", _submit_within)


def _start_within(start: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
    """Start a thread within the documents of the caller."""
    if visited():
        thread.run = _within(thread.run)  # type: ignore[method-assign]
    start(thread)


def _submit_within(
    submit: Callable[..., Any], pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Submit a function to a thread pool, to run within the documents of the caller."""
    carried = _within(fn) if visited() else fn
    with bound(_VISITS, ()):  # a thread that the pool starts now must not inherit them: it serves others later
        return submit(pool, carried, *args, **kwargs)


def _within(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with the documents and settings of the caller."""
    visits, settings = tuple(Visit(visit.document) for visit in visited()), inherited_settings()

    def run(*args: Any, **kwargs: Any) -> Any:
        with bound(_VISITS, visits), settings():
            return function(*args, **kwargs)

    return run
