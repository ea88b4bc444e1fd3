"""The old name of `pc.cache.observe.metrics`."""

from .observe.metrics import *  # noqa: F403
