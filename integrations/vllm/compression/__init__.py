"""Compression of prompts inside vLLM: each KV head of a request keeps the tokens it needs, other blocks are freed.

`options` reads what a request asks for. `scheduler` decides when a prompt is compressed and which blocks hold the kept
tokens. `worker` scores tokens and packs the kept ones.
"""

from .options import CompressionOptions, read_options

__all__ = ["CompressionOptions", "read_options"]
