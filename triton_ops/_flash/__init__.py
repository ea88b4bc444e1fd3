"""What FlashAttention's functions are made of: calls found again, keys seen as blocks, new keys, masks and biases."""
