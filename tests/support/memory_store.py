"""An in-memory double of a Mooncake store, and blocks for tests of tiers."""

from __future__ import annotations

import ctypes

import torch

from pc.cache.tiers.tier import Layout

LAYOUT = Layout("model@1", {"key": ((4, 2), torch.bfloat16), "value": ((4,), torch.int64)})


def block(value=1.0):
    return {"key": torch.full((4, 2), value, dtype=torch.bfloat16), "value": torch.arange(4) + int(value)}


def same(a, b):
    return (
        a is not None and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in b)
    )


class MemoryStore:
    """A double of a Mooncake store. It keeps values in a dictionary and accesses only registered memory."""

    def __init__(self, values=None):
        self.values = {} if values is None else values
        self.registered = []
        self.fail_with = None
        self.calls = 0

    def register_buffer(self, address, size):
        self.registered.append((address, address + size))
        return 0

    def unregister_buffer(self, address):
        self.registered = [span for span in self.registered if span[0] != address]
        return 0

    def _each(self, keys, one):
        self.calls += 1
        if isinstance(self.fail_with, BaseException):
            raise self.fail_with
        if self.fail_with is not None:
            return [self.fail_with] * len(keys)
        return [one(*key) if isinstance(key, tuple) else one(key) for key in keys]

    def _is_registered(self, address, size):
        return any(first <= address and address + size <= end for first, end in self.registered)

    def batch_put_from(self, keys, addresses, sizes):
        def put(key, address, size):
            assert self._is_registered(address, size)
            self.values.setdefault(key, ctypes.string_at(address, size))
            return 0

        return self._each(list(zip(keys, addresses, sizes, strict=True)), put)

    def batch_get_into(self, keys, addresses, sizes):
        def get(key, address, size):
            assert self._is_registered(address, size)
            if key not in self.values:
                return -704
            if len(self.values[key]) > size:
                return -600
            ctypes.memmove(address, self.values[key], len(self.values[key]))
            return len(self.values[key])

        return self._each(list(zip(keys, addresses, sizes, strict=True)), get)

    def batch_is_exist(self, keys):
        return self._each(keys, lambda key: int(key in self.values))

    def remove(self, key):
        return self._each([key], lambda key: -704 if self.values.pop(key, None) is None else 0)[0]

    def close(self):
        self.fail_with = -900
        return 0
