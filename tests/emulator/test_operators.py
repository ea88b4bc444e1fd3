"""Every operator's compiled kernels, in calls whose masks end at every element of a tile."""

from __future__ import annotations

import pytest

from emulator.cases import CASES, QUICK, run


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_compiled(name):
    run(name)
