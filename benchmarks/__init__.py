"""What is measured, how, and what came out. `python -m benchmarks` lists them; in no wheel."""
