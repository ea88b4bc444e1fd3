"""Prefix caching for HuggingFace `generate`: the KV of a prompt that was seen before is read, not computed again.

```python
from pc.integrations.huggingface import enable_prefix_caching

handle = enable_prefix_caching(model)   # model.generate as before, and faster from the second call on
handle.stats()
handle.disable()
```

Modules: `enable` puts a handle before a model's generate, through which users see `serving`. That compares the model's
`identity`, asks `support` what can be served and hands a decoding loop to one of two ways, `paged` or `contiguous`,
over blocks from a `store`; `images` is what a call shows besides tokens, `settings` what users choose, `calls` what
they are told. `batching` does the same for `generate_batch` and `transformers serve`.
"""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pc.integrations.huggingface needs {error.name}: pip install 'transformers>=5.5,<5.25'", name=error.name
    ) from error

from .batching.enable import ContinuousBatching, enable_continuous_batching
from .calls import RequestReport, ServedStats, UnsupportedError
from .compression import CompressedDocument
from .enable import PrefixCaching, enable_prefix_caching
from .paged.graphs import GraphReport

__all__ = [
    "CompressedDocument",
    "ContinuousBatching",
    "GraphReport",
    "PrefixCaching",
    "RequestReport",
    "ServedStats",
    "UnsupportedError",
    "enable_continuous_batching",
    "enable_prefix_caching",
]
