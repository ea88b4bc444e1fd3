"""Continuous batching: transformers' own loop, scheduler and server over this library's blocks and operators.

- `enable` checks transformers' private interfaces and replaces a model's `init_continuous_batching`, from where
  `generate_batch` and `transformers serve` get their manager.
- `session` has this manager, which runs the batches.
- `blocks` has the cache that the manager's scheduler sees.
"""
