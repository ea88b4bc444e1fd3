"""The old name of `pc.cache.tiers.memory`."""

from .tiers.memory import *  # noqa: F403
