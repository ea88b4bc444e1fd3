"""The runners of a call of generate. Each has a function that runs a `Loop` over the blocks of a store.

- `contiguous`: the model's own attention over copies of blocks; `batch` and `layout` make the cache, `moved` serves
  reuse="anywhere".
- `deterministic`: each row separately, in chunks at fixed positions.
- `document`: for calls over a compressed document.
- `paged`: packed passes over the blocks themselves, on devices with kernels; its forward pass is in `packed`, `passes`,
  `graphs` and `dispatch`.
- `batching`: the same passes under transformers' continuous batching.
"""
