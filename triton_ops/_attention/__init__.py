"""Code that attention operators share: checks, computation on CPU tensors, launches, plans and their constants."""
