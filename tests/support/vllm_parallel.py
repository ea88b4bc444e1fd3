"""Run as a program: tokens of an engine of two tensor-parallel workers with pc's backend and policy, as JSON.

Workers are processes of their own, which find the plugin by its entry point, as those of a server do.
"""

from __future__ import annotations

import json
import os
import sys

import vllm_engine


def attention_class(model):
    """The class of the first layer's attention, in a worker."""
    return next(type(module.impl).__name__ for module in model.modules() if hasattr(module, "impl"))


if __name__ == "__main__":
    vllm_engine.prepare()
    own = {"PC_VLLM": "attention,eviction,compression", "PC_VLLM_POLICY": "lru"}
    os.environ.update(own | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    from vllm import LLM

    prompts = vllm_engine.random_prompts(1, 57, 33, 160)
    llm = LLM(model=sys.argv[1], **{**vllm_engine.OPTIONS, "tensor_parallel_size": int(sys.argv[2])})
    found = [vllm_engine.generate(llm, prompts) for _ in range(2)]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    compressed = vllm_engine.generate(llm, prompts[2:], extra_args={"pc_compress": 0.5})[0]
    counts = scheduler.compression.counts["compressed_requests"]
    kinds = llm.apply_model(attention_class)
    said = {"found": found, "attention": kinds, "scheduler": type(scheduler).__name__}
    print("RESULT", json.dumps(said | {"compressed": compressed, "counts": counts}))
