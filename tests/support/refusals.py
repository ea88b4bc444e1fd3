"""The errors of operators for wrong arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from row_cases import same_bits

WRONG_TYPE = re.compile(r"needs (a tensor|dtype|int32 or int64)")


def check_refused(
    function: Callable[..., Any], arguments: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """Check that a call raises this error and writes nothing.

    A wrong dtype is a TypeError, and anything else is a ValueError.

    Args:
        function: An operator.
        arguments: Right ones, by name.
        changes: Wrong values by name, or functions that change right ones.
        message: A pattern of the error.
    """
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    wrong = {name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        function(**arguments | wrong)
    assert isinstance(raised.value, TypeError) == bool(WRONG_TYPE.search(str(raised.value))), raised.value
    for name, value in before.items():
        assert same_bits(arguments[name], value), name
