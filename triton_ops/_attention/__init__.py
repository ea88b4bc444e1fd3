"""What the attention operators share: argument checks, the CPU reference, the kernels, the plan and their constants."""
