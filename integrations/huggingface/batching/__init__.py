"""Continuous batching: transformers' own loop, scheduler and server over this library's blocks and operators.

`enable` puts a handle before a model's `init_continuous_batching`, from where `generate_batch` and `transformers serve`
get their manager; `session` is that manager; `blocks` answers its scheduler from what sessions have in common
(`shared`); `step` runs the forward pass of a batch; `versions` checks the private interfaces that all this builds on.
"""
