"""Objects of NVIDIA's kvpress as presses: logits equal those of kvpress' decoding. `make kvpress` installs and runs it.

Beside some chosen presses, these are all presses that kvpress' tests run: each of their matrix, alone and wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvpress
import numpy as np
import pytest
import torch
import transformers
from generate_cases import CACHE, LLAMA, Family, prompt
from tests.default_presses import default_presses  # of kvpress' sources

from pc.integrations.huggingface import enable_prefix_caching

CONTEXT = prompt(300)
QUESTION = prompt(9, 1)
QWEN = Family("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16})
HALF = {"compression_ratio": 0.5}


def snap() -> Any:
    return kvpress.SnapKVPress(**HALF, window_size=32)


PRESSES: dict[str, Callable[[], Any]] = {
    "knorm": lambda: kvpress.KnormPress(**HALF),
    "snapkv": snap,
    "tova": lambda: kvpress.TOVAPress(**HALF),
    "streaming": lambda: kvpress.StreamingLLMPress(**HALF),
    "expected attention": lambda: kvpress.ExpectedAttentionPress(**HALF),
    "keydiff": lambda: kvpress.KeyDiffPress(**HALF),
    "lagkv": lambda: kvpress.LagKVPress(**HALF, lag_size=64),
    "cur": lambda: kvpress.CURPress(**HALF),
    "pyramidkv": lambda: kvpress.PyramidKVPress(**HALF, window_size=32),
    "chunkkv": lambda: kvpress.ChunkKVPress(snap(), chunk_length=20),
    "block": lambda: kvpress.BlockPress(kvpress.KnormPress(**HALF), block_size=64),
    "criticalkv": lambda: kvpress.CriticalKVPress(snap()),
    "composed": lambda: kvpress.ComposedPress([kvpress.KnormPress(0.3), kvpress.StreamingLLMPress(0.3)]),
    "key rerotation": lambda: kvpress.KeyRerotationPress(kvpress.KnormPress(**HALF)),
    "adakv": lambda: kvpress.AdaKVPress(snap()),
    "adakv expected": lambda: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(**HALF)),
    "critical adakv": lambda: kvpress.CriticalAdaKVPress(snap()),
    "dms": lambda: kvpress.DMSPress(kvpress.RandomPress(seed=0), threshold=0.5, sliding_window_size=64),
    "kvzip": lambda: kvpress.KVzipPress(**HALF),
}
BY_HEAD = ("adakv", "adakv expected", "critical adakv", "dms", "kvzip")


class Tokenizer:
    """The part of a tokenizer that KVzip uses."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name: str) -> Tokenizer:
        return cls()

    def encode(self, text: str, **_: Any) -> torch.Tensor:
        return torch.tensor([[ord(character) for character in text]], dtype=torch.int64)


def attributes(model: Any) -> list[list[str]]:
    return [sorted(vars(module)) + sorted(module._modules) for module in model.modules()]


@torch.no_grad()
def of_kvpress(model: Any, press: Any, answer: torch.Tensor) -> torch.Tensor:
    """Return kvpress' logits after the question and after each token of an answer."""
    cache = transformers.DynamicCache()
    with press(model):
        model.model(input_ids=CONTEXT, **{CACHE: cache}, cache_position=torch.arange(CONTEXT.shape[1]))
    turned, logits = isinstance(press, kvpress.KeyRerotationPress), []
    begin = cache.get_seq_length() if turned else CONTEXT.shape[1]
    # Tokens are fed singly: a mask is made for the first layer only, and PyramidKV's layers differ in length.
    for at, token in enumerate([*QUESTION[0], *answer[:-1]], begin):
        place = torch.tensor([[at]])
        logits.append(model(input_ids=token.view(1, 1), **{CACHE: cache}, position_ids=place).logits[:, -1])
    return torch.stack(logits[QUESTION.shape[1] - 1 :], 1)


def compare(make: Callable[[Any], Any], family: Family, by_head: bool | None = None) -> None:
    """Compare the logits of a document that a press compressed with those of the press' own decoding."""
    model = family.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        before = attributes(model)
        document = handle.compress(CONTEXT, make(model))
        assert attributes(model) == before
        counts = torch.tensor(document.kept)
        if by_head is not None:
            assert counts.float().mean() < 0.95 * CONTEXT.shape[1]
            assert (len(counts.unique()) > 1) >= by_head
        with document:
            result = model.generate(
                torch.cat([CONTEXT, QUESTION], 1), max_new_tokens=5, min_new_tokens=5, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
    other = family.build()
    expected = of_kvpress(other, make(other), result.sequences[0, -5:])
    torch.testing.assert_close(torch.stack(result.logits, 1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", [LLAMA, QWEN], ids=lambda family: family.name)
@pytest.mark.parametrize("name", PRESSES)
def test_logits_of_its_own_decoding(name: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.presses.kvzip_press.AutoTokenizer", Tokenizer)
    compare(lambda model: PRESSES[name](), family, name in BY_HEAD)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda press: press,
    "composed": lambda press: kvpress.ComposedPress([press]),
    "key rerotation": kvpress.KeyRerotationPress,
    "adakv": kvpress.AdaKVPress,
    "chunk": lambda press: kvpress.ChunkPress(press, chunk_length=24),
    "criticalkv": kvpress.CriticalKVPress,
    "critical adakv": kvpress.CriticalAdaKVPress,
    "dms": lambda press: kvpress.DMSPress(press, threshold=-0.5, sliding_window_size=32),
    "merging": kvpress.MergingPress,
    "entropy gated": kvpress.EntropyGatedChunkKVPress,
}
UNCOMPOSED = (kvpress.KVzipPress, kvpress.FastKVzipPress, kvpress.KVComposePress)


def takes(wrapper: str, press: type) -> bool:
    """Return whether a wrapper takes a press, as in `test_presses_run` of kvpress' tests."""
    return wrapper == "alone" or (
        not issubclass(press, UNCOMPOSED) if wrapper == "composed" else issubclass(press, kvpress.ScorerPress)
    )


@pytest.mark.parametrize(
    ("wrapper", "press", "options"),
    [
        pytest.param(wrapper, each["cls"], options, id=f"{wrapper}-{each['cls'].__name__}-{i}")
        for wrapper in WRAPPERS
        for each in default_presses
        if takes(wrapper, each["cls"])
        for i, options in enumerate(each["kwargs"])
    ],
)
def test_presses_of_its_matrix(
    wrapper: str, press: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpress.presses.kvzip_press.AutoTokenizer", Tokenizer)

    def make(model: Any) -> Any:
        torch.manual_seed(0)
        np.random.seed(0)
        made = press(**options)
        if wrapper != "alone":
            made.post_init_from_model(model)
        return WRAPPERS[wrapper](made)

    compare(make, LLAMA)


def test_a_press_that_fails_leaves_the_model_as_it_was() -> None:
    class Failing(kvpress.KnormPress):  # type: ignore[misc,name-defined]
        def score(self, module: Any, *args: Any) -> torch.Tensor:
            module.masked_key_indices = None
            if module.layer_idx:
                raise KeyboardInterrupt
            return super().score(module, *args)

    model = LLAMA.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        before = attributes(model)
        with pytest.raises(KeyboardInterrupt):
            handle.compress(CONTEXT, Failing(0.5))
        assert attributes(model) == before
        assert not any(module._forward_hooks for module in model.modules())
        assert len(handle.compress(CONTEXT, kvpress.KnormPress(0.5)).kept) == 2
