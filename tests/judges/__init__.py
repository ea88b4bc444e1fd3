"""Others' tests over this package, unchanged but for device and import: `python -m judges` with tests/ on the path."""
