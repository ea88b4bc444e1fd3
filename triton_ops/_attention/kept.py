"""What layers share besides a plan, kept with it."""

from __future__ import annotations

import torch

from .call import PlanCall


class Kept:
    """What layers share besides a plan: made at the first of them, kept with the plan until that is refreshed.

    Attributes:
        is_captured: Whether a captured graph may read it: it is then filled anew, in place, when the plan is refreshed.
    """

    is_captured = False

    def fill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Brings it up to date with a batch of the same shapes."""
        raise NotImplementedError


def kept_with(plan: torch.Tensor) -> dict[object, Kept]:
    """What layers share besides the plan, by what it is for."""
    found: dict[object, Kept] | None = getattr(plan, "_pc_kept", None)
    if found is None:
        found = {}
        plan._pc_kept = found  # type: ignore[attr-defined]
    return found


def refresh_kept(call: PlanCall, plan: torch.Tensor) -> None:
    """Brings what is kept with a plan up to date, after the plan itself."""
    kept = kept_with(plan)
    for key, entry in list(kept.items()):
        if entry.is_captured:
            entry.fill(call.block_tables, call.seq_lens, call.query_start_loc)
        else:
            del kept[key]
