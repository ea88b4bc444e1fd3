"""`python -m benchmarks NAME ...` runs a benchmark of a checkout; `python -m pc bench` runs those of operators."""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "render": ("pages.render", "numbers and charts of README and docs, from the rows: make docs"),
    "kernels": ("kernels.kernel_resources", "registers, spills and shared memory of every kernel: make kernels"),
    "launches": ("kernels.steps", "a digest of what each step of `work` launches"),
    "life": ("kernels.life", "how many kernels the life of a layer compiles"),
    "work": ("kernels.work", "executed instructions and bytes of attention steps: make work"),
    "host": ("kernels.host", "what a call costs the host: make host"),
    "gpu": ("gpu", "checks and measures the kernels on a GPU: make gpu"),
    "demo": ("models.demo", "takes rows that `pc demo` wrote into the tree"),
    "manager": ("caching.manager", "CacheManager against vLLM's: make bench-manager"),
    "traffic": ("caching.traffic", "eviction policies on 12 kinds of generated traffic, and 4 of stress"),
    "reuse": ("models.reuse", "generate with the cache, plain and with transformers' own reuse"),
    "reuse_anywhere": ("models.reuse_anywhere", "text that moved: time and loss"),
    "agents": ("models.agents", "agents' traffic and changes of their prompts: tokens computed, and lost"),
    "determinism": ("models.determinism", "the time to the first token with and without deterministic=True"),
    "generate": ("models.generate", "generate of a model of a billion parameters on a GPU"),
    "batching": ("models.batching", "generate_batch beside transformers'"),
    "quality": ("models.quality", "what a model loses when its cache holds less, or fewer bits"),
    "compressed": ("models.compressed", "a compressed document beside the whole text: bytes, and a decode over it"),
    "families": ("models.families", "every class of transformers, small, with and without the cache"),
    "vllm_replay": ("engines.vllm_replay", "a trace through vLLM's tier in host memory"),
    "vllm_scheduler": ("engines.vllm_scheduler", "a trace through vLLM's scheduler"),
    "vllm_serving": ("engines.vllm_serving", "conversations and compressed prompts behind vLLM's server"),
    "sglang_radix": ("engines.sglang_radix", "a trace through SGLang's radix cache"),
}
"""Module and subject of each benchmark; `NAME --help` says more."""


def main(arguments: list[str]) -> int:
    """Run one benchmark and return its exit code."""
    name = arguments[0] if arguments else ""
    if name not in NAMES:
        wanted = name in ("", "-h", "--help")
        lines = [f"  {name:16} {what}" for name, (_, what) in NAMES.items()]
        said = "usage: python -m benchmarks NAME ..." if wanted else f"NAME: got {name!r}, needs one of these"
        print(said, *lines, sep="\n", file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    sys.argv = [f"python -m benchmarks {name}", *arguments[1:]]
    return int(importlib.import_module(f"benchmarks.{NAMES[name][0]}").main() or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
