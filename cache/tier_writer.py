"""The old name of `pc.cache.tiers.writer`."""

from .tiers.writer import *  # noqa: F403
