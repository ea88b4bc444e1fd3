"""Tensors besides the KV: per-token tensors along the slots of KV blocks, and outputs of encoders by content."""
