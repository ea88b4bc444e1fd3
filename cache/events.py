"""The old name of `pc.cache.observe.events`."""

from .observe.events import *  # noqa: F403
