"""The base of every operator: registration, launch cache, launches, checks, and codes of quantized caches."""
