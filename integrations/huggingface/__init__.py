"""Prefix caching for HuggingFace `generate`: the KV of a prompt that was seen before is read, not computed again.

```python
from pc.integrations.huggingface import enable_prefix_caching

handle = enable_prefix_caching(model)   # model.generate as before, and faster from the second call on
handle.stats()
handle.disable()
```

Modules, in the order data flows: `_support` decides what can be served, `_generation` turns a batch into block tables
and slots, `_batch` brings them to the devices, `_paged` writes and reads the blocks inside the model's layers,
`_graphs` runs decode steps and captures them where `_capturable` allows it, `_handle` ties all to one model.
"""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pc.integrations.huggingface needs {error.name}: pip install 'pc-kernels[hf]'", name=error.name
    ) from error

from .handle import PrefixCaching, RequestReport, enable_prefix_caching
from .paged.graphs import GraphReport

__all__ = ["GraphReport", "PrefixCaching", "RequestReport", "enable_prefix_caching"]
