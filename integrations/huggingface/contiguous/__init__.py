"""The way that every model with a transformers cache can go: cached tokens are copied into the cache it would have had.

The decoding loop, the model's own attention and its masks stay transformers'. Before the prompt is computed a cache is
laid out with what blocks hold (`layers`, `layout`); then its complete blocks are written (`storage`) and published.
`serve` serves the loops of a model; `call` is one call of generate over a `batch` of `prompts`, which are `requests` of
the manager. `store` has the blocks and what is beside them, `tiers` evicted ones; `probe` looks at a model beforehand.
"""
