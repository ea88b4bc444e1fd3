"""Parts of FlashAttention's functions: arguments, keys viewed as blocks, writes of new keys, masks and biases."""
