"""Our Triton kernels in vLLM's engine, in Triton's interpreter, give the tokens of vLLM's compiled backend."""

from __future__ import annotations

import pytest
import vllm_engine

from pc.triton_ops._core.runtime import INTERPRET

pytestmark = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")


def test_kernels_in_the_interpreter(model_path):
    """Prefill, a mixed step, decode, and prefix hits; plans are built once a step and passed to the kernels."""
    from unittest import mock

    from pc.integrations.vllm.attention import PagedAttention

    forward, plans = PagedAttention.forward, []

    def watched(self, layer, query, key, value, kv_cache, step, *args, **kwargs):
        if step is not None:
            plans.append(step.plans[self.window].data_ptr())
        return forward(self, layer, query, key, value, kv_cache, step, *args, **kwargs)

    prompts = vllm_engine.random_prompts(1, 57, 33)
    found = []
    for ours in (False, True):
        with (
            mock.patch.object(PagedAttention, "forward", watched),
            vllm_engine.engine(model_path("llama"), ["attention"] if ours else []) as (llm, seen),
        ):
            found.append([vllm_engine.generate(llm, prompts, max_tokens=3) for _ in range(2)])
    assert found[0] == found[1]
    assert found[1][1][1] == [32, 32]
    assert seen["attention"] == 2 * seen["steps"] == len(plans)
    assert all(first == second for first, second in zip(plans[::2], plans[1::2], strict=True)), "a plan for each layer"
