"""`python -m pc.integrations.huggingface` prints the features that the installed transformers cannot serve."""

from __future__ import annotations

from .api import BATCHING, check_batching, look
from .calls import UnsupportedError
from .runners.batching.blocks import ScheduledBlocks


def main() -> int:
    """Print a line for each feature that cannot be served; return 1 if there are any."""
    framework = look()
    lacking = dict(framework.disabled)
    try:
        check_batching(ScheduledBlocks)
    except UnsupportedError as error:
        lacking[BATCHING] = str(error)
    for feature, reason in lacking.items():
        print(f"{feature}: {reason}")
    if not lacking:
        print(f"transformers {framework.version}: all features are served")
    return int(bool(lacking))


if __name__ == "__main__":
    raise SystemExit(main())
