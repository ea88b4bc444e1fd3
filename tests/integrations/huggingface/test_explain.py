"""Explanations of generate's prompts: the keys are those of the call, and nothing is computed or kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generate_cases import LLAMA, prompt
from image_cases import CASES, IMAGE, text
from torch.nn.modules.module import register_module_forward_pre_hook

from pc.integrations.huggingface import enable_prefix_caching


class Words:
    """A tokenizer whose words are numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens: Any) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.quick
def test_a_prompt_is_explained_under_the_keys_of_its_call() -> None:
    model, tokens = LLAMA.build(), prompt(64)
    changed = tokens.clone()
    changed[0, 37] = (int(tokens[0, 37]) + 1) % 20 + 3
    with enable_prefix_caching(model, num_blocks=64) as handle:
        assert handle.explain(tokens).reason == "never"
        model.generate(tokens, max_new_tokens=4)
        before, reports = handle.stats(), handle.last_requests
        computed: list[Any] = []
        hook = register_module_forward_pre_hook(lambda module, inputs: computed.append(module))
        try:
            found = handle.explain(changed)
            assert (found.matched, found.reason, found.position) == (37, "token", 37)  # part of a block is copied
            assert (found.here[0], found.there[0]) == (int(changed[0, 37]), int(tokens[0, 37]))
            assert handle.explain(changed[0]) == handle.explain({"input_ids": changed}) == found
            streamer = SimpleNamespace(put=computed.append, end=lambda: computed.append(None))
            assert handle.explain({"input_ids": changed, "streamer": streamer}) == found
            text = Words().decode(changed[0].tolist())
            shown = handle.explain(text, Words())
            assert shown.texts == (Words().decode(found.here), Words().decode(found.there))
            assert f"{shown.texts[0]!r}, not {shown.texts[1]!r}" in str(shown)
            with handle.salt("tenant"):
                assert handle.explain(tokens).reason == "salt"
            padded = torch.cat([tokens.new_zeros(1, 3), tokens], 1)
            mask = (torch.arange(67)[None] >= 3).long()
            assert handle.explain({"input_ids": padded, "attention_mask": mask}).matched == 63
        finally:
            hook.remove()
        assert not computed
        assert handle.stats() == before
        assert handle.last_requests == reports


def test_another_image_is_a_key_at_its_place() -> None:
    case = next(case for case in CASES if case.name == "gemma3")
    model, asked = case.build(), text(30, 1)
    with enable_prefix_caching(model) as handle:
        model.generate(**case.call([text(20, 0), 1, asked]), max_new_tokens=2, suppress_tokens=[IMAGE])
        call = case.call([text(20, 0), 2, asked])
        found = handle.explain(call)
        assert (found.reason, found.position) == ("keys", call["input_ids"][0].tolist().index(IMAGE))
        assert found.here != found.there
        assert handle.explain(case.call([text(20, 0), 1, text(31, 3)])).reason == "token"


def test_what_is_no_prompt_that_is_served_is_refused() -> None:
    model, tokens = LLAMA.build(), prompt(20)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        with pytest.raises(TypeError, match="inputs: got a text, needs a tokenizer"):
            handle.explain("3 4 5")
        chat = [{"role": "user", "content": "3 4 5"}]
        for nothing in (chat, ["3 4", "5"], {}, {"attention_mask": tokens}, 3, [], 1.5, tokens[None], None):
            with pytest.raises(ValueError, match=r"inputs: got .*, needs token ids \[1, length\] or \[length\]"):
                handle.explain(nothing)
        with pytest.raises(ValueError, match="inputs: got 2 prompts, needs one"):
            handle.explain(torch.cat([tokens, tokens + 1]))
        with pytest.raises(ValueError, match="inputs: got a call that is not served"):
            handle.explain({"input_ids": tokens, "penalty_alpha": 0.6, "top_k": 4, "use_cache": False})
        assert handle.stats().calls_handed_back == {}
    with pytest.raises(ValueError, match="cannot be served"):
        handle.explain(tokens)
