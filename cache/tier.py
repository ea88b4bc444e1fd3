"""The old name of `pc.cache.tiers.tier`."""

from .tiers.tier import *  # noqa: F403
