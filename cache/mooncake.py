"""The old name of `pc.cache.tiers.mooncake`."""

from .tiers.mooncake import *  # noqa: F403
