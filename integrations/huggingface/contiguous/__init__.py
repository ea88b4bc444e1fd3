"""The way that every model with a transformers cache can go: cached tokens are copied into the cache it would have had.

The decoding loop, the model's own attention and its masks stay transformers'. Before the prompt is computed a cache is
laid out with the keys, values and states that blocks hold (`layers`, `rows`); when it has been computed its complete
blocks are written (`storage`, `states`) and become findable; `call` does that for one call of generate. `probe` finds
out whether a model goes on from a cached prefix as if it had computed it.
"""
