"""Prefix caching for HuggingFace `generate`: the KV of a prompt that was seen before is read, not computed again.

```python from pc.integrations.huggingface import enable_prefix_caching handle = enable_prefix_caching(model)   # use
model.generate as before; repeated prefixes are not computed again handle.stats() handle.disable() ```

Modules:
- `enable`: puts a handle before a model's generate; `serving` runs its calls.
- `identity`: notices when the model has changed. `support`: decides which calls can be served.
- `paged`, `contiguous`: the two ways to run a decoding loop over blocks. `store`: the blocks' manager and requests.
- `images`: images of a call. `settings`: the user's options. `calls`: reports, counts and warnings.
- `batching`: the same for `generate_batch` and `transformers serve`.
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
