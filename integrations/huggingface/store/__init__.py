"""The store of one model's prompts.

- `storage`: the memory of blocks, in groups of layers that share a block table.
- `blocks`: the blocks of one request, and how far they are filled.
- `kept`: the store of one model: its manager and storage, running calls, caches of past calls, hidden states.
- `tiers`: host memory, disk, and files of saved blocks.
"""
