"""Tiers below the cache: host memory, disk, Mooncake."""
