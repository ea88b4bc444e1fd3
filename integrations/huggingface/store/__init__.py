"""The store of one model's prompts.

- `storage`: the memory of blocks, in groups of layers that share a block table.
- `blocks`: the blocks of one request, and how far they are filled.
- `leases`: the requests of calls, which end even if a call is cut off.
- `kept`: the store of one model: its manager and storage, caches of past calls, hidden states.
- `tiers`: host memory, disk, and files of saved blocks.
"""
