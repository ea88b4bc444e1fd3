"""Two stages of real transformers models give the same result with caching on or off in each.

The thinker's hidden states are the talker's input embeddings. A stage caches its keys and values as per-token tensors
too, so that it computes only the suffix of a prompt.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import pc

transformers = pytest.importorskip("transformers")

from generate_cases import CACHE  # noqa: E402

BLOCK, PROMPT, NEW = 8, 45, 3


class Stage:
    """A causal model that computes what its caches lack.

    Args:
        model: A LlamaModel.
        enable_prefix_caching: Whether requests find what others left.
        num_blocks: Of its caches.
    """

    def __init__(self, model, enable_prefix_caching, num_blocks=40):
        self.model, self.caching, self.num_blocks = model, enable_prefix_caching, num_blocks
        self.computed = 0
        self.reset()

    def reset(self):
        self.manager = pc.CacheManager(self.num_blocks, BLOCK)
        self.tensors = pc.TensorCache(self.manager, self.num_blocks, BLOCK)

    def begin(self, request, tokens, inputs):
        """Return the hidden states of a whole prompt. `inputs` returns the embeddings of positions."""
        if not self.caching:
            self.reset()
        return self.compute(request, self.manager.allocate(request, tokens), len(tokens), inputs)

    def append(self, request, token, inputs):
        """Append a token and return the hidden states of all tokens."""
        allocation = self.manager.append(request, [token])
        return self.compute(request, allocation, self.manager.num_tokens(request), inputs)

    def compute(self, request, allocation, length, inputs):
        self.tensors.prepare(allocation)
        [(start, end)] = allocation.compute_spans
        self.computed += end - start
        cache = transformers.DynamicCache()
        if start:
            past = self.tensors.load(request, self.names(), num_tokens=start)
            for layer in range(len(self.model.layers)):
                keys, values = (past[f"kv.{layer}.{part}"].transpose(0, 1)[None] for part in ("keys", "values"))
                cache.update(keys, values, layer)
        positions = torch.arange(start, end)
        out = self.model(
            inputs_embeds=inputs(positions)[None], position_ids=positions[None], **{CACHE: cache}, use_cache=True
        )
        kv = [
            {part: getattr(layer, part)[0, :, start:].transpose(0, 1) for part in ("keys", "values")}
            for layer in cache.layers
        ]
        step = pc.Step.of({request: allocation}, {"hidden": out.last_hidden_state[0], "kv": kv, "past": cache})
        whole = self.tensors.join(step, ["hidden"])[request]["hidden"] if start else out.last_hidden_state[0]
        others = self.tensors.store(step)
        assert set(others) == {"past"}
        self.manager.commit(request, length)
        assert whole.shape[0] == length
        return whole

    def names(self):
        return [f"kv.{layer}.{part}" for layer in range(len(self.model.layers)) for part in ("keys", "values")]

    def free(self, request):
        self.manager.free(request)
        self.manager.check()


class Pipeline:
    """The thinker and the talker, decoding greedily."""

    def __init__(self, models, thinker_caches, talker_caches, num_blocks=40):
        thinker, talker, self.bridge, self.head = models
        self.thinker = Stage(thinker, thinker_caches, num_blocks)
        self.talker = Stage(talker, talker_caches, num_blocks)

    @torch.no_grad()
    def run(self, request, prompt):
        """Return the talker's tokens, and both stages' hidden states of the last step."""
        tokens = list(prompt)
        embed = self.thinker.model.embed_tokens
        thought = self.thinker.begin(request, tokens, lambda at: embed(torch.tensor(tokens)[at]))
        spoken = self.talker.begin(request, tokens, lambda at: self.bridge(thought[at]))
        generated = []
        for _ in range(NEW):
            token = int(self.head(spoken[-1]).argmax())
            generated.append(token)
            tokens.append(token)
            thought = self.thinker.append(request, token, lambda at: embed(torch.tensor(tokens)[at]))
            spoken = self.talker.append(request, token, lambda at, thought=thought: self.bridge(thought[at]))
        self.thinker.free(request)
        self.talker.free(request)
        return generated, thought, spoken


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    thinker = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    talker = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    parts = thinker, talker, torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    return tuple(part.double().eval() for part in parts)


def prompts():
    generator = np.random.default_rng(0)
    document = generator.integers(0, 64, PROMPT).tolist()
    return [document, [*document[:30], 1, 2, 3], document, [*document, 5, 6, 7, 8], [9] * 11, document[:17]]


@pytest.fixture(scope="module")
def uncached(models):
    pipeline = Pipeline(models, False, False)
    return [pipeline.run(i, prompt) for i, prompt in enumerate(prompts())]


@pytest.mark.parametrize("num_blocks", [40, 8], ids=["roomy", "evicting"])
@pytest.mark.parametrize(("thinker", "talker"), list(itertools.product([True, False], repeat=2)))
def test_outputs_do_not_depend_on_caching(models, uncached, thinker, talker, num_blocks):
    pipeline = Pipeline(models, thinker, talker, num_blocks)
    for i, (prompt, (tokens, thought, spoken)) in enumerate(zip(prompts(), uncached, strict=True)):
        got_tokens, got_thought, got_spoken = pipeline.run(i, prompt)
        assert got_tokens == tokens
        torch.testing.assert_close(got_thought, thought, rtol=0, atol=1e-12)
        torch.testing.assert_close(got_spoken, spoken, rtol=0, atol=1e-12)
    total = sum(len(prompt) + NEW for prompt in prompts())
    for stage, caches in ((pipeline.thinker, thinker), (pipeline.talker, talker)):
        assert stage.computed < total if caches else stage.computed == total


def test_rows_of_a_hit_are_the_first_requests_bit_for_bit(models):
    pipeline, document = Pipeline(models, True, True), prompts()[0]
    _, first, _ = pipeline.run("first", document)
    _, second, _ = pipeline.run("second", [*document[:40], 1, 2])
    assert torch.equal(first[:40], second[:40])
