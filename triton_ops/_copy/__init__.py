"""Code that the gather, scatter, copy and join operators share. It moves rows of bytes between tensors."""
