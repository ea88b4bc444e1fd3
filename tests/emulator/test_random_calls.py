"""Some random calls; `python -m emulator.random_calls` continues with others."""

from __future__ import annotations

import pytest

from emulator.random_calls import CALLS, call


@pytest.mark.parametrize("name", CALLS)
def test_drawn(name):
    call(0, name)
