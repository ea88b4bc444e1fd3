"""A program that runs an engine whose KV connector shares blocks, and prints its answers and counts as JSON.

Usage: python vllm_shared.py MODEL OPTIONS, where OPTIONS is `{"tier": ..., "prompts": [...], "engine": {...}}`.
"""

from __future__ import annotations

import json
import os
import sys

import vllm_engine


class Lossy:
    """A tier that loses blocks after it has reported them, as a store does that dies or evicts in between."""

    def __new__(cls, layout, options):
        from pc.cache.tiers.disk import DiskTier

        class Tier(DiskTier):
            left = int(options.get("left", 0))

            def get_many(self, keys):
                found = []
                for key in keys:
                    Tier.left -= 1
                    found.append(self.get(key) if Tier.left >= 0 else self.discard(key))
                return found

        return Tier(options["path"], layout)


def transfer(extra):
    """Return vLLM's configuration of the connector."""
    return {
        "kv_connector": "TierConnector",
        "kv_connector_module_path": "pc.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def answer(model, options, wait=None):
    """Return the tokens of each prompt, its cached tokens, and how many were computed.

    With "stops", each prompt is asked alone. After each, a line is printed and `wait` is called.
    """
    given = {"kv_transfer_config": transfer(options["tier"])} | options.get("engine", {})
    with vllm_engine.engine(model, ["attention"], **given) as (llm, seen):
        tokens, cached = [], []
        for part in (
            [[prompt] for prompt in options["prompts"]] if wait and options.get("stops") else [options["prompts"]]
        ):
            found, hits = vllm_engine.generate(llm, part, max_tokens=options.get("max_tokens", 12))
            tokens, cached = tokens + found, cached + hits
            if wait and options.get("stops"):
                print("STOP", flush=True)
                wait()
        return {"tokens": tokens, "cached": cached, "computed": seen["tokens"], "preemptions": seen["preemptions"]}


if __name__ == "__main__":
    vllm_engine.prepare()
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    options = json.loads(sys.argv[2])
    print("RESULT", json.dumps(answer(sys.argv[1], options, lambda: sys.stdin.readline())), flush=True)
    os._exit(0)  # a store's shutdown would wait for its dead master
