"""Prefix caching for HuggingFace `generate`: the KV of a prompt that was seen before is read, not computed again.

```python
from pc.integrations.huggingface import enable_prefix_caching

handle = enable_prefix_caching(model)  # use model.generate as before; repeated prefixes are not computed again
handle.stats()
handle.disable()
```

- `enable` replaces a model's generate with that of a handle, which is in `serving` and runs the calls.
- `identity` notices when the model has changed, and `hooks` when a hook on all modules changes a pass. `probe` checks a
  model before it is served.
- `loop` is a call as transformers prepared it, and `prompts` and `images` are what it was given.
- `engine` chooses the runner of a loop, from `runners`. `admit` finds the cached tokens of a prompt in `store`.
- `settings` has the user's options. `calls` has the reports, counts and warnings.
- `compression` reads and keeps compressed documents.
- `api` has everything private of transformers.
"""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pc.integrations.huggingface needs {error.name}: pip install 'transformers>=5.5,<5.25'", name=error.name
    ) from error

from .calls import RequestReport, ServedStats, UnsupportedError
from .compression.document import CompressedDocument
from .enable import enable_prefix_caching
from .runners.batching.enable import ContinuousBatching, enable_continuous_batching
from .runners.graphs import GraphReport
from .serving import PrefixCaching

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
