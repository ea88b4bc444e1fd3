"""Tensors besides the KV: per-token ones along the slots of the KV blocks, and outputs of encoders by their content."""
