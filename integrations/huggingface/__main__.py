"""`python -m pc.integrations.huggingface` prints the features that the installed transformers cannot serve."""

from __future__ import annotations

from .api import look


def main() -> int:
    """Print a line for each feature that cannot be served; return 1 if there are any."""
    framework = look()
    for feature, reason in framework.disabled.items():
        print(f"{feature}: {reason}")
    if not framework.disabled:
        print(f"transformers {framework.version}: all features are served")
    return int(bool(framework.disabled))


if __name__ == "__main__":
    raise SystemExit(main())
