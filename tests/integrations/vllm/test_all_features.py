"""All features at once in vLLM's engine, with a server's kinds of requests: the tokens are vLLM's own."""

from __future__ import annotations

import json
import re

import pytest
import torch
import vllm_engine
from safetensors.torch import save_file
from vllm_models import SIZES

from pc.triton_ops._core.runtime import INTERPRET

pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRET, reason="kernels in the interpreter: test_interpreter.py")]

TIGHT = 12
"""So few blocks that requests are preempted and prompts evicted."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A LoRA adapter of attention queries and values, large enough to change the answers."""
    folder = tmp_path_factory.mktemp("adapter")
    rank, width = 8, SIZES["hidden_size"]
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(described | {"target_modules": ["q_proj", "v_proj"]}))
    generator, tensors = torch.Generator().manual_seed(3), {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, out in (("q_proj", width), ("v_proj", width // 2)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = 0.2 * torch.randn(rank, width, generator=generator)
            tensors[f"{place}.lora_B.weight"] = 0.2 * torch.randn(out, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


FEATURES = ["attention", "eviction", "hidden_states"]


def prompts():
    made = vllm_engine.random_prompts(1, 100, 70, 120, 40)
    return [*made, made[0][:64] + made[1], made[0][:96] + made[3]]


def ask(llm, batch, lora=None, **params):
    """Return the tokens of all samples; all requests also ask for hidden states."""
    from vllm import SamplingParams

    from pc.integrations.vllm.hidden_states import ASKED

    given = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "extra_args": {ASKED: True}} | params
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in batch], SamplingParams(**given), use_tqdm=False, lora_request=lora
    )
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def ask_and_leave(llm, batch):
    """Abort some requests while they wait, while they are computed and while they answer."""
    from pc.integrations.vllm.hidden_states import ASKED

    asked = vllm_engine.Requests(llm)
    for number, prompt in enumerate(batch):
        asked.add(f"left-{number}", prompt, max_tokens=30, extra_args={ASKED: True})
    for leaving, steps in ((5, 1), (2, 5), (0, 0)):
        asked.engine.abort_request([f"left-{leaving}"])
        for _ in range(steps):
            asked.step()
    return {name: tokens for (name, _), (tokens, _) in asked.run().answers.items()}


def run(model, adapter, ours):
    """Return the answers with all features, or with vLLM alone, the rows of hidden states, and the counts."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    from pc.integrations.vllm.hidden_states import take_hidden_states

    options = {"skip_tokenizer_init": False, "num_gpu_blocks_override": TIGHT, "max_num_batched_tokens": 256}
    options |= {"enable_lora": True, "max_lora_rank": 8}
    lora = LoRARequest("other", 1, adapter)
    with vllm_engine.engine(model, FEATURES if ours else [], **options) as (llm, seen):

        def constrained(**how):
            return ask(llm, prompts(), structured_outputs=StructuredOutputsParams(**how), ignore_eos=False)

        said = {
            "plain": ask(llm, prompts(), max_tokens=80),
            "again": ask(llm, prompts(), max_tokens=80),
            "adapter": ask(llm, prompts(), lora, max_tokens=80),
            "behind the adapter": ask(llm, prompts(), max_tokens=80),
            "adapter again": ask(llm, prompts(), lora, max_tokens=80),
            "samples": [ask(llm, [prompt], n=3, temperature=0.8, seed=5) for prompt in prompts()],
            "choice": constrained(choice=["yes", "no"]),
            "regex": constrained(regex="[a-c]{3}-[0-9]{2}"),
        }
        tokenizer = llm.get_tokenizer()  # the last token is the end token
        for answer in said["choice"]:
            assert tokenizer.decode(answer[0][:-1]) in ("yes", "no")
        for answer in said["regex"]:
            assert re.fullmatch("[a-c]{3}-[0-9]{2}", tokenizer.decode(answer[0][:-1]))
        rows = take_hidden_states(llm) if ours else {}
        said["left"] = ask_and_leave(llm, prompts())
        said["after"] = ask(llm, prompts(), max_tokens=80)
        late = take_hidden_states(llm) if ours else {}
        assert "left-5" not in late, "rows of a prompt that was aborted before it was computed"
        assert said["left"].keys() == {"left-1", "left-3", "left-4"}
        free = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == TIGHT - 1, "blocks of aborted requests are not free"
    return said, rows, seen


def test_tokens_are_those_of_vllm_alone(model_with_tokenizer, adapter):
    theirs, _, seen = run(model_with_tokenizer, adapter, False)
    assert not seen["attention"]
    ours, rows, seen = run(model_with_tokenizer, adapter, True)
    assert seen["attention"] > 0
    assert seen["preemptions"] > 0
    for name, said in theirs.items():
        assert ours[name] == said, name
    assert ours["plain"] == ours["again"] == ours["behind the adapter"] == ours["after"]
    assert ours["adapter"] == ours["adapter again"] != ours["plain"]
    assert all(len({str(sample) for sample in each[0]}) > 1 for each in ours["samples"]), "samples do not differ"
    # Five times the prompts, three samples of each, and the prompts twice with constraints.
    assert len(rows) == (5 + 3 + 2) * len(prompts())
    lengths = sorted(len(prompt) for prompt in prompts())
    for each in rows.values():
        assert each["hidden_states"].shape[0] in lengths


def test_samples_and_constraints_have_rows_of_the_prompt(model_with_tokenizer):
    """Each of n samples is a separate request in vLLM. All have the rows of the one prompt."""
    from pc.integrations.vllm.hidden_states import take_hidden_states

    with vllm_engine.engine(model_with_tokenizer, FEATURES, max_num_batched_tokens=256) as (llm, _):
        ask(llm, prompts()[:1])
        (expected,) = take_hidden_states(llm).values()
        ask(llm, prompts()[:1], n=3, temperature=0.8, seed=5)
        found = take_hidden_states(llm)
    assert len(found) == 3
    for rows in found.values():
        torch.testing.assert_close(rows["hidden_states"], expected["hidden_states"], rtol=1e-3, atol=1e-3)
