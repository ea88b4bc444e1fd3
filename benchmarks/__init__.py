"""What is measured, how, and what came out. Loaded as `pc_benchmarks` by `python -m pc bench`; needs a checkout."""
