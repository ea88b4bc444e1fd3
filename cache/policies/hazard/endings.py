"""What the end of a request says of its blocks: their class and factors, before their uses are known."""

from __future__ import annotations

from bisect import bisect

from .tables import FINE_OUTPUT_BOUNDS, HINT_BOUNDS, OUTPUT_BOUNDS, OUTPUTS, TRAITS, USES

Ending = tuple[int, int, bool]
"""The kind of a block used once, the trait of a tail with no new blocks, whether the caller said that it is over."""
UNTOLD: Ending = (0, TRAITS, False)
"""Of a request whose end nobody told."""


def ending_of(returns: float | None, output_tokens: int) -> Ending:
    """From the caller's hint and the tokens generated."""
    hint = 0 if returns is None else 1 + bisect(HINT_BOUNDS, returns)
    kind = USES * (hint * OUTPUTS + bisect(OUTPUT_BOUNDS, output_tokens))
    return kind, TRAITS + 8 * bisect(FINE_OUTPUT_BOUNDS, output_tokens), returns == 0


ENDINGS = [ending_of(None, output_tokens) for output_tokens in range(FINE_OUTPUT_BOUNDS[-1])]
"""Of requests without a hint."""
