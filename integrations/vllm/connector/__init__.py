"""KV of vLLM's blocks in a tier of `pc.cache`, a directory or a Mooncake store, which several engines share."""

from .connector import TierConnector

__all__ = ["TierConnector"]
