"""Continuous batching: transformers' own loop, scheduler and server over this library's blocks and operators.

- `enable` checks the private interfaces, and puts a handle before a model's `init_continuous_batching`. From there
  `generate_batch` and `transformers serve` get their manager.
- `session` is this manager and runs its batches.
- `blocks` answers its scheduler.
"""
