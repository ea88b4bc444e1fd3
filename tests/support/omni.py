"""VLLM-Omni's cache of hidden states from its wheel, without the rest of vLLM-Omni, which needs its own vLLM."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(os.environ.get("OMNI_SRC") or Path(__file__).parents[2] / ".peers" / "vllm-omni")
VERSION = "0.30.0"


def use_omni():
    """Make the parts of vLLM-Omni that `make vllm` unpacks importable, or skip."""
    if not (FOLDER / "vllm_omni").is_dir():
        pytest.skip("vllm-omni is not unpacked: make vllm", allow_module_level=True)
    if "vllm_omni" in sys.modules:
        return
    for name in ("vllm_omni", "vllm_omni.core", "vllm_omni.utils"):  # their __init__ would import everything
        package = types.ModuleType(name)
        package.__path__ = [str(FOLDER.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["vllm_omni"].__version__ = VERSION


def restore_later(monkeypatch):
    """Restore at the end of a test the names that PC_VLLM=omni replaces, and return vLLM-Omni's modules with them."""
    parts = ("", ".manager", ".runner_mixin", ".group_view")
    modules = [importlib.import_module(f"vllm_omni.core.prefix_cache{part}") for part in parts]
    for module in modules:
        for name in ("OmniPrefixCacheManager", "check_prefix_cache_kv_groups", "get_prefix_cache_group_view"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))
    return modules


class Batch:
    """A batch with the attributes that vLLM-Omni's managers and a view over vLLM's block tables read."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.order, self.tables, self.computed = [], {}, {}

    @property
    def req_ids(self):
        return self.order

    @property
    def req_id_to_index(self):
        return {name: row for row, name in enumerate(self.order)}

    @property
    def num_computed_tokens_cpu(self):
        return np.array([self.computed[name] for name in self.order], np.int32)

    @property
    def block_table(self):
        rows = [self.tables[name] for name in self.order]
        cells = np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], np.int32)
        return [types.SimpleNamespace(block_table=types.SimpleNamespace(np=cells))]

    def batch_req_ids(self):
        return list(self.order)

    def slots(self, name, begin, end):
        size = self.block_size
        return [self.tables[name][at // size] * size + at % size for at in range(begin, end)]

    def step_slots_cpu(self, names, counts):
        import torch

        found = [
            slot
            for name in names
            for slot in self.slots(name, self.computed[name], self.computed[name] + counts.get(name, 0))
        ]
        return torch.tensor(found, dtype=torch.int64)
