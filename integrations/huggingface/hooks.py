"""A watch over hooks on all modules, which `register_module_forward_hook` and its variants of torch add.

Such a hook belongs to no model. If it only looks at forward passes, to count or to time them, calls are served as
without it. A hook that changes inputs or outputs gives keys and values that no other call must read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from .api import global_hooks
from .calls import refuse_if

REASON = "a hook on all modules changes its forward passes"


@contextmanager
def watched_hooks(on_change: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Return a context in which `on_change` is called if a hook on all modules changes a forward pass of this thread.

    The context yields a function. It returns False once a hook has changed a pass, or hooks were added or removed.

    Raises:
        UnsupportedError: There is such a hook, and in inference mode tensors do not show whether it writes to them.
    """
    tables = global_hooks()
    if not any(tables):
        yield lambda: not any(tables)
        return
    refuse_if(torch.is_inference_mode_enabled(), "a hook on all modules is registered, in inference mode")
    thread = threading.get_ident()
    before, changes = list[Any](), list[bool]()

    def note(*values: Any) -> None:
        if threading.get_ident() == thread:
            before.append(_tensors(values))

    def compare(*values: Any) -> None:
        if threading.get_ident() == thread:
            old, new = before.pop(), _tensors(values)
            if len(old) != len(new) or any(a is not b or c != d for (a, c), (b, d) in zip(old, new, strict=True)):
                changes.append(True)
                on_change()

    with ExitStack() as registered:
        registers = (register_module_forward_pre_hook, register_module_forward_hook)
        for register, table in zip(registers, tables, strict=True):
            first = registered.enter_context(register(note))
            table.move_to_end(first.id, last=False)  # before the other hooks, and `compare` after them
            registered.enter_context(register(compare))
        own = [list(table) for table in tables]
        yield lambda: not changes and [list(table) for table in tables] == own


def _tensors(values: Any) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors in the arguments of a hook, with their versions, which a write changes.

    Tensors that were made in inference mode have no version.
    """
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in tensors]
