"""Parts of FlashAttention's functions: cached choices, keys viewed as blocks, new keys, masks and biases."""
