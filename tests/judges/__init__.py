"""Other projects' tests run over this package; only device and import change.

`python -m judges`, with tests/ on the path.
"""
