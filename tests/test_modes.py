"""No test leaves a mode behind for the next."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("time", [1, 2])
def test_modes_of_torch_do_not_outlive_a_test(time: int) -> None:
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_autocast_enabled("cpu", True)
