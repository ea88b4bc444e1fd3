"""MooncakeTier with a real store, between two processes on this machine; test_tier.py has the other tests."""

from __future__ import annotations

import subprocess
import sys

import mooncake_servers
import pytest

SCRIPT = """
import sys, time, warnings, torch
from pc.cache.tiers.mooncake import MooncakeTier
from pc.cache.tiers.tier import Layout
role, metadata, master = sys.argv[1:]
layout = Layout("model@1", {"kv": ((1024,), torch.float32)})
tier = MooncakeTier.connect(
    layout, metadata, master, segment_bytes=(64 << 20) if role == "put" else 0, transfer_bytes=16 << 20, batch_blocks=8
)
keys = [bytes([i]) * 32 for i in range(20)]
rows = lambda i: torch.arange(1024.0) + i
if role == "put":
    took = tier.put_many({key: {"kv": rows(i)} for i, key in enumerate(keys)})
    print(len(took), flush=True)
    sys.stdin.readline()
else:
    def equal():
        found = tier.get_many([*keys, b"none"])
        return [None if tensors is None else torch.equal(tensors["kv"], rows(i)) for i, tensors in enumerate(found)]
    print(sum(tier.contains_many([*keys, b"none"])), equal().count(True), equal()[-1], flush=True)
    other = MooncakeTier(tier._store, Layout("model@2", layout.tensors))
    print(other.get(keys[0]), flush=True)
    sys.stdin.readline()  # meanwhile the store is killed
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print(equal().count(False), tier.put(b"new", {"kv": rows(1)}), keys[0] in tier, len(caught), flush=True)
    print(time.monotonic() - begin < 60, flush=True)
import os
os._exit(0)  # the store's own shutdown waits for a master that is gone
"""


@pytest.fixture
def servers(tmp_path):
    with mooncake_servers.running(tmp_path) as addresses:
        yield addresses


def test_a_second_process_gets_what_the_first_put_and_survives_the_store(servers):
    *addresses, master = servers
    start = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    writer = subprocess.Popen([sys.executable, "-c", SCRIPT, "put", *addresses], **start)
    reader = None
    try:
        assert writer.stdout.readline() == "20\n"
        reader = subprocess.Popen([sys.executable, "-c", SCRIPT, "get", *addresses], **start)
        assert reader.stdout.readline() == "20 20 None\n"
        assert reader.stdout.readline() == "None\n"
        mooncake_servers.kill(master)
        reader.stdin.write("\n")
        reader.stdin.flush()
        wrong, took, there, warned = reader.stdout.readline().split()
        assert (wrong, took, there) == ("0", "False", "False")
        assert int(warned) >= 1
        assert reader.stdout.readline() == "True\n"
    finally:
        for process in (writer, reader):
            if process is not None:
                process.kill()
                process.communicate()
