"""The runners of a call of generate: `run` takes a loop as transformers prepared it and runs it over a store's blocks.

- `contiguous`: the model's own attention over copies of blocks; `batch` and `layout` make the cache, `moved` serves
  reuse="anywhere".
- `deterministic`: each row alone, in chunks at fixed places.
- `document`: behind a compressed document.
- `paged`: packed passes over the blocks themselves, on devices with kernels; its forward pass is in `packed`, `passes`,
  `graphs` and `dispatch`.
- `batching`: the same passes under transformers' continuous batching.
"""
