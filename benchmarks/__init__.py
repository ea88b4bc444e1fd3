"""The benchmarks and their results, which no wheel contains; `python -m benchmarks` lists them."""
