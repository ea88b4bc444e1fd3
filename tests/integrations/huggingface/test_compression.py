"""Compressed documents: attention over kept tokens is exact, and dropped tokens take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compression_cases import ASKED, CONTEXT, QUESTION, ask, assert_dense_logits, chosen_tokens
from generate_cases import FAMILIES, LLAMA, NEW_TOKENS, Family, build_model, first_quick, plain, prompt
from processes import in_threads

from pc.integrations.huggingface import (
    CompressedDocument,
    PrefixCaching,
    UnsupportedError,
    enable_prefix_caching,
)
from pc.integrations.huggingface.compression import document as document_module

REFUSED = {"mistral-window", "mpt"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("press", ["snapkv", "expected_attention", "knorm", "streaming"])
def test_logits_of_a_mask_per_head(press: str, dtype: torch.dtype) -> None:
    model = LLAMA.build().to(dtype)
    with enable_prefix_caching(model, num_blocks=64) as handle, chosen_tokens() as kept:
        document = handle.compress(CONTEXT, press, budget=0.3)
        assert [layer.sum(1).tolist() for layer in kept] == document.kept
        result = ask(model, document)
    assert_dense_logits(model, result, kept)


@pytest.mark.parametrize("family", first_quick(FAMILIES), ids=lambda f: f.name)
def test_all_tokens_kept_are_the_model_itself(family: Family) -> None:
    model = family.build()
    with enable_prefix_caching(model, num_blocks=64) as handle:
        if family.name in REFUSED:
            with pytest.raises(ValueError, match=r"model: its text cannot be compressed: "):
                handle.compress(CONTEXT)
            return
        document = handle.compress(CONTEXT, budget=1.0)
        result, expected = ask(model, document), plain(model, input_ids=QUESTION, **ASKED)
        torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), rtol=0, atol=2e-5)
        assert torch.equal(result.sequences, expected.sequences)


def test_heads_that_keep_fewer_tokens_than_a_question_has(model: Any, handle: PrefixCaching) -> None:
    with chosen_tokens() as kept:
        document = handle.compress(CONTEXT, budget=0.02)
    assert min(map(min, document.kept)) < 9
    assert_dense_logits(model, ask(model, document), kept)


def test_memory_is_freed() -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=24, num_attention_heads=8,
            num_key_value_heads=4, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    context = torch.randint(1, 128, (1, 1200))
    dense = 2 * 24 * 4 * 8 * 4 * context.shape[1]
    with enable_prefix_caching(model, num_blocks=64) as handle:
        document = handle.compress(context, budget=0.5)
    assert document.nbytes <= 0.55 * dense
    assert document.peak_nbytes <= 0.6 * dense
    counts = torch.tensor(document.kept)
    assert counts.sum(1).tolist() == [2400] * 24
    assert len(counts.unique()) > 1  # heads keep different numbers of tokens


def test_batches_beams_and_samples(model: Any, handle: PrefixCaching) -> None:
    document = handle.compress(CONTEXT, budget=0.4)
    rows = torch.cat([torch.cat([CONTEXT, prompt(9, seed)], 1) for seed in range(4)])
    together = ask(model, document, rows)
    for row, tokens in zip(rows, together.sequences, strict=True):
        assert torch.equal(ask(model, document, row[None]).sequences[0], tokens)
    whole = handle.compress(CONTEXT, budget=1.0)
    for options in (
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "do_sample": True},
    ):
        torch.manual_seed(0)
        expected = plain(model, input_ids=rows, **ASKED | options)
        torch.manual_seed(0)
        assert torch.equal(ask(model, whole, rows, **options).sequences, expected.sequences)


@pytest.mark.parametrize(("rows", "num_blocks"), [(1, 2), (2, 3)], ids=["an answer", "several answers"])
def test_answers_that_outgrow_the_blocks_are_told(model: Any, rows: int, num_blocks: int) -> None:
    options = {"max_new_tokens": 50, "do_sample": rows > 1, "num_return_sequences": rows, "eos_token_id": None}
    with enable_prefix_caching(model, num_blocks=num_blocks) as handle:
        document = handle.compress(CONTEXT, budget=0.4)
        with pytest.warns(UserWarning, match="give a larger num_blocks"):
            ask(model, document, **options)


def test_only_calls_within_it_read_it(model: Any, handle: PrefixCaching) -> None:
    document, other = handle.compress(CONTEXT, budget=0.2), handle.compress(CONTEXT, "knorm", budget=0.2)
    expected = plain(model, input_ids=QUESTION, **ASKED).sequences
    alone = [ask(model, d).sequences for d in (document, other)]
    assert not torch.equal(*alone)
    results: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}

    def work(number: int) -> None:
        for _ in range(6):
            if number == 2:
                results[2].append(model.generate(QUESTION, **ASKED).sequences)
            else:
                results[number].append(ask(model, (document, other)[number]).sequences)

    in_threads(work, *results)
    for number, tokens in enumerate((*alone, expected)):
        assert len(results[number]) == 6
        assert all(torch.equal(found, tokens) for found in results[number])
    with document:  # the inner document is read, and after its block the outer one again
        assert torch.equal(ask(model, other).sequences, alone[1])
        assert torch.equal(model.generate(QUESTION, **ASKED).sequences, alone[0])
    assert torch.equal(model.generate(QUESTION, **ASKED).sequences, expected)


def test_passes_of_another_model_search_the_documents_model_once(
    model: Any, handle: PrefixCaching, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, other, searched = handle.compress(CONTEXT), LLAMA.build(), []
    modules = type(model).modules
    monkeypatch.setattr(type(model), "modules", lambda self: searched.append(self) or modules(self))
    with document:
        searched.clear()
        for _ in range(3):
            other(prompt(8))
        assert [found is model for found in searched] == [True] * other.config.num_hidden_layers
        with pytest.raises(UnsupportedError, match=r"only model\.generate reads it"):
            model(prompt(8))


def test_an_interrupt_leaves_it_as_it_was(model: Any, handle: PrefixCaching) -> None:
    document = handle.compress(CONTEXT, budget=0.3)
    alone = ask(model, document).sequences

    class Interrupting(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] > QUESTION.shape[1] + 2:
                raise KeyboardInterrupt
            return scores

    with pytest.raises(KeyboardInterrupt):
        ask(model, document, logits_processor=transformers.LogitsProcessorList([Interrupting()]))
    assert torch.equal(ask(model, document).sequences, alone)
    assert torch.equal(model.generate(QUESTION, **ASKED).sequences, plain(model, input_ids=QUESTION, **ASKED).sequences)


def test_kept_by_text_press_and_salt(model: Any, handle: PrefixCaching) -> None:
    first = handle.compress(CONTEXT)

    def same(document: CompressedDocument) -> bool:
        layer, own = (d._content.layers[0] for d in (document, first))
        return layer is own

    assert same(handle.compress(CONTEXT[0]))
    assert not same(handle.compress(CONTEXT, "knorm"))
    assert not same(handle.compress(CONTEXT, budget=0.4))
    with handle.salt("tenant"):
        assert not same(handle.compress(CONTEXT))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="document: was computed by other weights"):
        ask(model, first)
    assert not same(handle.compress(CONTEXT))
    with handle.compress(CONTEXT):  # the changed model is probed within the block, by passes that read no document
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
        with pytest.raises(ValueError, match="document: was computed by other weights"):
            model.generate(QUESTION, **ASKED)


def test_what_is_kept_is_bounded(model: Any, handle: PrefixCaching, monkeypatch: pytest.MonkeyPatch) -> None:
    first = handle.compress(CONTEXT)
    alone = ask(model, first).sequences
    monkeypatch.setattr(document_module, "memory_budget", lambda model: int(2.5 * first.nbytes))
    for number in range(2, 5):
        handle.compress(prompt(200, number))
    again = handle.compress(CONTEXT)
    assert again._content is not first._content  # compressed again: the least recently used one was dropped
    assert handle.compress(CONTEXT)._content is again._content
    handle.reset()
    assert handle.compress(CONTEXT)._content is not again._content
    assert torch.equal(ask(model, first).sequences, alone)  # a dropped document still works for its holder


def test_questions_and_answers_are_read_by_the_next(model: Any, handle: PrefixCaching) -> None:
    document, asked = handle.compress(CONTEXT, budget=0.3), prompt(70, 6)
    first = torch.cat([CONTEXT, asked], 1)
    alone = ask(model, document, first)
    assert handle.last_requests[0].cached_spans == ((0, 200),)
    again = ask(model, document, first)
    assert handle.last_requests[0].cached_spans == ((0, 264),)  # the document, and whole blocks of 16 after it
    for one, other in ((alone, again), (alone, ask(model, document, first, num_beams=1))):
        assert torch.equal(one.sequences, other.sequences)
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), rtol=0, atol=2e-5)
    more = torch.cat([alone.sequences, prompt(5, 7)], 1)  # a further turn after the answer
    turn = ask(model, document, more)
    assert handle.last_requests[0].cached_spans == ((0, 264),)
    rows = torch.cat([torch.cat([CONTEXT, asked[:, :40], prompt(9, seed)], 1) for seed in (8, 9)])
    together = ask(model, document, rows, num_beams=2)
    assert [report.cached_spans for report in handle.last_requests] == [((0, 232),)] * 2
    assert ask(model, document, torch.cat([CONTEXT, asked[:, :16]], 1)).sequences.shape == (1, 222)
    assert handle.last_requests[0].cached_spans == ((0, 200),)  # the last token is computed, with its whole block
    model.generate(first, **ASKED)
    assert handle.last_requests[0].cached_tokens == 0  # its blocks are not found without the document
    with handle.salt("tenant"):
        ask(model, document, first)
        assert handle.last_requests[0].cached_spans == ((0, 200),)
    other = handle.compress(CONTEXT, "knorm", budget=0.3)
    ask(model, other, first)
    assert handle.last_requests[0].cached_spans == ((0, 200),)
    for ids, options, result in ((more, {}, turn), (rows, {"num_beams": 2}, together)):
        handle.reset()
        fresh = ask(model, document, ids, **options)
        assert handle.last_requests[0].cached_spans == ((0, 200),)
        assert torch.equal(fresh.sequences, result.sequences)


def test_evicted_documents_come_back_whole(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_blocks": 64, "host_blocks": 16, "disk": tmp_path}
    with enable_prefix_caching(model, **sizes) as handle:
        documents = [handle.compress(prompt(200, number)) for number in range(1, 6)]
        asked = [torch.cat([prompt(200, number), prompt(9)], 1) for number in range(1, 6)]
        answers = [ask(model, d, ids).sequences for d, ids in zip(documents, asked, strict=True)]
        bound = int(1.5 * documents[0].nbytes)
        monkeypatch.setattr(document_module, "memory_budget", lambda model: bound)
        handle.compress(prompt(200, 6))  # there is no room for all five: some move to host memory or disk
        del documents
        monkeypatch.setattr(document_module, "read", lambda *_: pytest.fail("it is computed again"))
        for number, answer in enumerate(answers, 1):
            document = handle.compress(prompt(200, number))
            assert torch.equal(ask(model, document, asked[number - 1]).sequences, answer)
    with enable_prefix_caching(model, **sizes) as handle:  # stands for a later process
        document = handle.compress(prompt(200, 6))
        with handle.salt("tenant"), pytest.raises(pytest.fail.Exception):
            handle.compress(prompt(200, 6))
        assert ask(model, document, torch.cat([prompt(200, 6), prompt(9)], 1)).sequences.shape == (1, 215)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    with enable_prefix_caching(model, **sizes) as handle, pytest.raises(pytest.fail.Exception):
        handle.compress(prompt(200, 6))


def test_files(model: Any, handle: PrefixCaching, tmp_path: Path) -> None:
    document = handle.compress(CONTEXT, budget=0.3)
    path = tmp_path / "document"
    document.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError, match="handle: got PosixPath, needs the handle of enable_prefix_caching"):
        CompressedDocument.load(path, handle)
    again = CompressedDocument.load(handle, path)
    assert (again.nbytes, again.kept, again.length) == (document.nbytes, document.kept, 200)
    assert torch.equal(ask(model, again).sequences, ask(model, document).sequences)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    (tmp_path / "short").write_bytes(data[:9])
    for name in ("damaged", "short"):
        with pytest.raises(ValueError, match="path: got a file that cannot be used"):
            CompressedDocument.load(handle, tmp_path / name)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    with pytest.raises(ValueError, match="path: got a file that cannot be used"):
        CompressedDocument.load(handle, path)


class Hooked:
    """A small press like those of kvpress. Its hooks shorten layers ("short"), set masks ("masks") or set them late."""

    def __init__(self, leaves: str) -> None:
        self.leaves = leaves
        self.cache: Any = None

    def _hook(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.cache = kwargs["past_key_values"]
        layer = self.cache.layers[module.layer_idx]
        if self.leaves == "short":
            layer.keys, layer.values = layer.keys[:, :, 50:], layer.values[:, :, 50:]
        if self.leaves == "masks":
            module.masked_key_indices = self.masked()
        module.scratch = module.rotary_emb = torch.nn.Identity()

    @staticmethod
    def masked() -> tuple[torch.Tensor, ...]:
        return torch.zeros(50).long(), torch.arange(50) % 2, torch.arange(50)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        modules = [layer.self_attn for layer in model.model.layers]
        hooks = [m.register_forward_hook(self._hook, with_kwargs=True) for m in modules]
        yield
        for hook in hooks:
            hook.remove()
        for module in modules:
            if self.leaves == "late":
                assert self.cache.layers[module.layer_idx].keys.shape[2] == 200  # all tokens are still there at the end
                module.masked_key_indices = self.masked()


@pytest.mark.parametrize("leaves", ["short", "masks", "late"])
def test_objects_of_kvpress(leaves: str, model: Any, handle: PrefixCaching) -> None:
    before = {name: sorted(vars(m)) + sorted(m._modules) for name, m in model.named_modules()}
    with chosen_tokens() as kept:
        document = handle.compress(CONTEXT, Hooked(leaves))
    assert {name: sorted(vars(m)) + sorted(m._modules) for name, m in model.named_modules()} == before
    result = ask(model, document)
    if leaves == "short":
        assert document.kept == [[150, 150]] * len(kept)
        kept = [torch.arange(200).expand(2, -1) >= 50 for _ in kept]
    else:
        assert document.kept == [[175, 175]] * len(kept)
    assert_dense_logits(model, result, kept)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((torch.zeros(2, 8).long(),)), ValueError, r"context_ids: got torch.int64 \[2, 8\], needs"),
        ((torch.zeros(1, 0).long(),), ValueError, r"context_ids: got torch.int64 \[1, 0\], needs"),
        ((torch.zeros(1, 8),), ValueError, r"context_ids: got torch.float32 \[1, 8\], needs"),
        ((CONTEXT, "snap"), ValueError, "press: got 'snap', needs one of snapkv, expected_attention"),
        ((CONTEXT, 3), TypeError, "press: got int, needs a name or"),
        ((CONTEXT, "knorm", 0), ValueError, "budget: got 0, needs more than 0"),
        ((CONTEXT, "knorm", 1.5), ValueError, "budget: got 1.5, needs"),
        ((CONTEXT, "knorm", "half"), TypeError, "budget: got str, needs a number"),
    ],
)
def test_refused_documents(handle: PrefixCaching, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        handle.compress(*arguments)


def test_refused_calls(model: Any, handle: PrefixCaching) -> None:
    document = handle.compress(CONTEXT)
    for ids, message in (
        (CONTEXT, "input_ids: got 200 tokens, needs the 200 of the compressed document and more"),
        (prompt(230, 5), "input_ids: got 230 tokens, needs the 200"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(model, document, ids)
    model.train()
    with pytest.raises(ValueError, match="model: is in training mode"):
        ask(model, document)
    model.eval()
    document.close()
    with pytest.raises(ValueError, match="document: it was closed"):
        document.nbytes  # noqa: B018
    with pytest.raises(ValueError, match="document: it was closed"):
        document.__enter__()
    handle.disable()
    with pytest.raises(ValueError, match="handle: needs a model that was not deleted"):
        handle.compress(CONTEXT)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4ForCausalLM"), reason="needs a transformers with Gemma-4")
def test_layers_with_heads_of_different_widths() -> None:
    """Transformers raises an error if code reads one width from such a config, as the check of kernels did."""
    options = {
        "num_hidden_layers": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    }  # fmt: skip
    model = build_model("Gemma4TextConfig", "Gemma4ForCausalLM", **options)
    question = torch.cat([prompt(40), prompt(9, 1)], 1)
    want = plain(model, input_ids=question)
    with enable_prefix_caching(model, num_blocks=64, reuse="anywhere") as handle:
        assert handle.unsupported is None
        with handle.compress(prompt(40), budget=1.0):
            assert torch.equal(model.generate(question, max_new_tokens=NEW_TOKENS), want)
