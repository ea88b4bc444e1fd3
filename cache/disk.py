"""The old name of `pc.cache.tiers.disk`."""

from .tiers.disk import *  # noqa: F403
