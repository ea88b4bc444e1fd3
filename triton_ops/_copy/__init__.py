"""Moves rows of bytes between tensors: what the gather, scatter, copy and join operators share."""
