"""What the attention operators share: checks, what runs on CPU tensors, kernels, the plan and their constants."""
