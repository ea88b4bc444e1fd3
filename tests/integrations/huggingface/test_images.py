"""Prompts with images give the same tokens as without the cache, and a known image runs no vision tower."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generate_cases import CACHE, assert_same, both, cache_of, cached, enabled, first_quick, plain
from image_cases import CASES, GLM, IDEFICS, IMAGE, PALIGEMMA, STEP, TowerRuns, VisionCase, text
from processes import in_threads
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModelOutput

from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.images import VisionOutputs
from pc.integrations.huggingface.store import kept as store

BY_NAME = {case.name: case for case in CASES}
FREE: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": 8, "suppress_tokens": [IMAGE]}
ASK, AGAIN = text(30, 1), text(33, 2)


def runs(model: Any, **call: Any) -> int:
    """Compare a call with the model's own, which runs the tower once, and return how often the call itself ran it."""
    with TowerRuns(model) as tower:
        assert_same(model, **call, **FREE)
    return tower.count - 1


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_second_question_about_an_image_runs_no_tower(case: VisionCase) -> None:
    model, start = case.build(), text(20, 0)
    with enabled(model, num_blocks=200) as handle:
        want = plain(model, **case.call([start, 1, ASK]), **FREE)
        other = plain(model, **case.call([start, 2, ASK]), **FREE)
        assert not torch.equal(want, other)  # the image must matter
        assert runs(model, **case.call([start, 1, ASK])) > 0
        question = case.call([start, 1, AGAIN])
        assert runs(model, **question) == 0
        for image in (2, 3):  # other images of the same size
            assert runs(model, **case.call([start, image, ASK])) == 1
            assert handle.last_requests[0].cached_tokens <= len(start)
        assert runs(model, **question) == 0
        assert handle.last_requests[0].cached_tokens >= question["input_ids"].shape[1] // 16 * 16 - 16


@pytest.mark.parametrize("case", first_quick(CASES), ids=lambda c: c.name)
def test_batches_with_several_images(case: VisionCase) -> None:
    model, start = case.build(), text(20, 0)
    calls = [
        case.call([start, 1, ASK], [start, 2, ASK], [text(30, 5)]),
        case.call([text(5, 3), 1, text(4, 4), 1, AGAIN]),  # the same image twice
        case.call([text(5, 3), 1, text(4, 4), 2, ASK], [3, ASK], [start, 1, AGAIN]),
        case.call([text(80, 6), 4], [text(80, 6), 5]),  # images at the end: rows are computed separately
        case.call([text(37, 7), 4, text(9, 8)], [text(37, 7), 5, text(9, 8)]),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with enabled(model, num_blocks=16) as handle:  # fewer blocks than the calls together need
            for again in range(2):
                for call in calls:
                    assert runs(model, **call) == 0 or not again
            assert_same(model, **calls[0], do_sample=True, top_k=40, max_new_tokens=8)
            assert handle.stats().hit_tokens > 0
            assert handle.stats().evictions > 0
            handle.reset()  # nothing is cached: one row computes the shared prefix for the other
            want, got = both(model, **calls[3], **FREE, return_dict_in_generate=True, output_logits=True)
            for a, b in zip(want.logits, got.logits, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


MODES = {
    "beams": {"num_beams": 3},
    "several answers": {"num_return_sequences": 3, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_modes(name: str, options: dict[str, Any]) -> None:
    case, start = BY_NAME[name], text(20, 0)
    if name == "qwen3.5" and options.keys() & {"prompt_lookup_num_tokens", "guidance_scale"}:
        pytest.skip("states cannot be rolled back; transformers' own guidance fails on its positions")
    model = case.build()
    calls = [case.call([start, 1, ASK])]
    if "prompt_lookup_num_tokens" not in options:
        calls.append(case.call([start, 1, ASK], [start, 2, text(3, 1), 3, AGAIN]))
    with enabled(model, num_blocks=200) as handle:
        for _ in range(2):
            for call in calls:
                assert_same(model, **call, **options, max_new_tokens=8)
        assert handle.last_requests[0].cached_tokens
        assert handle.stats().calls_handed_back == {}


def test_beams_of_several_images_that_transformers_repeats_one_by_one() -> None:
    """GLM-4V gives each beam one image twice."""
    model = GLM.build()
    with enabled(model, num_blocks=200) as handle:
        for images, reasons in ((1, {}), (2, {"it repeats several images of a prompt in another order": 1})):
            call = GLM.call([text(20, 0), 1, *([text(4, 4), 2] if images == 2 else []), ASK])
            assert_same(model, **call, **FREE)
            assert_same(model, **call, **FREE, num_beams=2)
            assert handle.stats().calls_handed_back == reasons


def assert_same_logits(model: Any, call: dict[str, Any]) -> None:
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    want, got = both(model, **call, **(FREE | options))
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)


def test_types_decide_how_an_image_attends() -> None:
    """Without token types, Gemma 3 attends causally within images, and then adjacent images do not see each other."""
    case = BY_NAME["gemma3"]
    model = case.build()
    first, *others = (case.call([text(30, 0), 1, image, ASK]) for image in (1, 1, 2, 1))
    with enabled(model, num_blocks=200) as handle:
        assert_same_logits(model, {name: value for name, value in first.items() if name != "token_type_ids"})
        for call in others:
            assert_same_logits(model, call)
        assert handle.stats().calls_handed_back == {}


def test_zeros_as_types_make_tokens_see_later_ones() -> None:
    """PaliGemma's processor gives zeros. PaliGemma 2 attends causally only without them."""
    model = PALIGEMMA.build()
    with enabled(model, num_blocks=200) as handle:
        for images in ([], [1]):
            for typed in (False, True):
                for end in (ASK, AGAIN, ASK):
                    call = PALIGEMMA.call([*images, text(60, 0), end])
                    types = {"token_type_ids": torch.zeros_like(call["input_ids"])} if typed else {}
                    assert_same_logits(model, {n: v for n, v in call.items() if n != "token_type_ids"} | types)
        assert handle.stats().calls_handed_back == {"token types could change a token's KV": 6}
        assert handle.stats().hit_tokens > 0


@pytest.mark.parametrize("kind", [torch.tensor, list])
def test_as_many_local_patches_as_images(kind: Callable[[list[int]], Any]) -> None:
    """An image of Step 3.7 consists of a view of all and of any number of patches."""
    model = STEP.build()
    with enabled(model, num_blocks=200) as handle:
        for counts in ([1, 1], [2, 0], [1, 0, 2]):
            for patches in ((4, 5, 6), (4, 7, 6), (4, 5, 6)):
                row: list[Any] = [text(20, 0)]
                for image, count in enumerate(counts, 1):
                    row += [image, torch.full((16 * count,), IMAGE), text(5, image)]
                call = STEP.call(row) | {"num_local_patches": kind(counts)}
                call["pixel_values_local"] = torch.cat([STEP.image(patch) for patch in patches[: sum(counts)]])
                assert_same_logits(model, call)
        assert handle.stats().calls_handed_back == {}
        assert handle.stats().hit_tokens > 0


def test_rows_with_fewer_images_than_others() -> None:
    """The processor of Idefics 3 fills them up with images of zeros, which the vision tower leaves out."""
    model = IDEFICS.build()
    rows: list[Any] = [[text(20, 0), 1, ASK, 2], [text(30, 2), 4], [text(60, 1)]]
    with enabled(model, num_blocks=200) as handle:
        for count in (2, 3, 2, 3):
            call = IDEFICS.call(*rows[:count])
            pixels = torch.zeros(count, 2, *call["pixel_values"].shape[1:])
            pixels[0], pixels[1, 0] = call["pixel_values"][:2], call["pixel_values"][2]
            assert_same_logits(model, call | {"pixel_values": pixels})
        assert handle.stats().calls_handed_back == {}
        assert min(report.cached_tokens for report in handle.last_requests) > 20


@pytest.mark.parametrize("case", first_quick(CASES), ids=lambda c: c.name)
def test_next_round_and_text_before_an_image(case: VisionCase) -> None:
    model, start = case.build(), text(40, 0)
    first = case.call([start, 1, ASK])
    with enable_prefix_caching(model, num_blocks=200) as handle:
        answer = assert_same(model, **first, **FREE)[0, first["input_ids"].shape[1] :]
        length = first["input_ids"].shape[1] + len(answer)
        assert runs(model, **case.call([start, 1, ASK, answer, text(9, 3)])) == 0
        assert handle.last_requests[0].cached_tokens >= length // 16 * 16 - 16
        round_two = case.call([start, 1, ASK, answer, 2, ASK])
        assert runs(model, **round_two) == 1
        assert_same(model, **case.call([start, text(9, 9)]), **FREE)
        if case.name != "qwen3.5":  # its states are only kept at the end of a prompt
            assert handle.last_requests[0].cached_tokens == 32


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3.5"])
def test_positions_that_the_model_keeps_from_its_last_call(name: str) -> None:
    """A forward pass over a returned cache, by hand, derives its positions from the model's `rope_deltas`."""
    case = BY_NAME[name]
    model, call = case.build(), case.call([text(20, 0), 1, ASK], [text(20, 0), AGAIN])
    plain(model, **call, **FREE)
    want = model.model.rope_deltas
    assert want.unique().numel() == 2
    with enabled(model, num_blocks=200) as handle:  # tests the model
        assert model.model.rope_deltas is want
        for _ in range(2):
            model.generate(**call, **FREE)
            assert torch.equal(model.model.rope_deltas, want)
        assert handle.explain(case.call([text(60, 0)])).matched
        assert torch.equal(model.model.rope_deltas, want)
        if name == "qwen2.5-vl":  # recurrent states cannot be compressed
            handle.compress(text(40, 2)[None])
        assert torch.equal(model.model.rope_deltas, want)


def test_hit_needs_no_features_that_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["llava"]
    model = case.build()
    monkeypatch.setattr(store, "memory_budget", lambda model: 0)
    with enable_prefix_caching(model, num_blocks=200):
        model.generate(**case.call([2, ASK]), **FREE)  # the first run of a tower adds hooks to it
        ids = case.call([1, ASK])
        assert runs(model, **ids) > 0
        assert runs(model, **ids) == 0
        assert runs(model, **case.call([text(3, 0), 1, ASK])) == 1


@pytest.mark.slow
def test_content_decides_and_not_the_tensor() -> None:
    case = BY_NAME["gemma3"]
    model, call = case.build(), case.call([text(20, 0), 1, ASK])
    with enable_prefix_caching(model) as handle:
        assert_same(model, **call, **FREE)
        call["pixel_values"] = call["pixel_values"].transpose(2, 3).contiguous().transpose(2, 3)
        assert runs(model, **call) == 0
        call["pixel_values"][0, 0, 0, 0] += 1.0
        assert runs(model, **call) == 1
        assert handle.last_requests[0].cached_tokens <= 20
        with handle.salt("tenant"):
            assert cached(model, handle, **call, **FREE) == 0
        with torch.no_grad():
            model.model.vision_tower.embeddings.patch_embedding.bias.add_(0.5)
        assert runs(model, **call) > 0
        assert handle.last_requests[0].cached_tokens == 0


def test_first_image_leaves_cached_text() -> None:
    case = BY_NAME["llava"]
    model = case.build()
    with enable_prefix_caching(model) as handle:
        assert_same(model, **case.call([text(40, 0)]), **FREE)
        model.generate(**case.call([text(3, 0), 1, ASK]), **FREE)
        model.generate(**case.call([text(40, 0)]), **FREE)
        assert handle.last_requests[0].cached_tokens == 32
        model.generate(**case.call([text(3, 0), 1, AGAIN]), **FREE)
        assert handle.last_requests[0].cached_tokens == 16


def test_tower_with_an_empty_list_of_deep_features() -> None:
    case = BY_NAME["qwen3-vl"]
    model = case.build()
    model.base_model.visual.deepstack_visual_indexes = []
    with enable_prefix_caching(model) as handle:
        assert_same(model, **case.call([text(20, 0), 1, ASK]), **FREE, times=2)
        assert handle.last_requests[0].cached_tokens >= 32


def test_output_of_a_tower_with_a_required_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """The towers of Gemma 3n and PerceptionLM come from timm. Their outputs cannot be made without hidden states."""
    case = BY_NAME["llava"]
    model = case.build()
    encode = model.model.get_image_features

    @functools.wraps(encode)
    def of_timm(*args: Any, **kwargs: Any) -> Any:
        pooled = encode(*args, **kwargs).pooler_output
        return TimmWrapperModelOutput(last_hidden_state=pooled[0], pooler_output=pooled)

    monkeypatch.setattr(model.model, "get_image_features", of_timm)
    with enabled(model, num_blocks=200) as handle:
        assert_same(model, **case.call([text(20, 0), 1, ASK]), **FREE, times=2)
        assert handle.last_requests[0].cached_tokens >= 32


def test_grid_is_part_of_an_image() -> None:
    case = BY_NAME["qwen2.5-vl"]
    model, call = case.build(), case.call([1, ASK])
    turned = call | {"image_grid_thw": torch.tensor([[1, 6, 4]])}
    assert not torch.equal(plain(model, **call, **FREE), plain(model, **turned, **FREE))
    with enable_prefix_caching(model) as handle:
        for _ in range(2):
            for one in (call, turned):
                assert_same(model, **one, **FREE)
        assert handle.last_requests[0].cached_tokens == 32
        without = {k: v for k, v in call.items() if k != "mm_token_type_ids"}  # then positions are those of text
        assert cached(model, handle, **without, **FREE) == 0


def test_cache_of_a_result_goes_on_behind_an_image() -> None:
    case = BY_NAME["qwen2.5-vl"]
    model, call = case.build(), case.call([text(20, 0), 1, ASK])
    expected = None
    with enable_prefix_caching(model):
        for _ in range(2):
            for result in both(model, **call, **FREE, return_dict_in_generate=True):
                longer = torch.cat([result.sequences, text(5, 1)[None]], 1)
                got = plain(model, input_ids=longer, **{CACHE: cache_of(result)}, **FREE)
                expected = got if expected is None else expected
                assert torch.equal(got, expected)


NOT_SERVED = {
    "positions": ("position_ids", lambda call: {"position_ids": torch.arange(56)[None, None].expand(4, 1, 56)}),
    "chunks": ("chunks of a prompt", lambda call: {"prefill_chunk_size": 24}),
    "videos": (
        "videos",
        lambda call: {
            "pixel_values_videos": call["pixel_values"],
            "video_grid_thw": call["image_grid_thw"],
            "input_ids": torch.cat([torch.full((1, 6), 291), call["input_ids"]], 1),
            "attention_mask": torch.ones(1, 62),
            "mm_token_type_ids": torch.cat([torch.full((1, 6), 2), call["mm_token_type_ids"]], 1),
        },
    ),
}


@pytest.mark.parametrize(("reason", "change"), NOT_SERVED.values(), ids=NOT_SERVED.keys())
def test_what_is_not_served_goes_to_the_model(reason: str, change: Any) -> None:
    case = BY_NAME["qwen2.5-vl"]
    model, call = case.build(), case.call([text(20, 0), 1, ASK])
    call |= change(call)
    with enable_prefix_caching(model) as handle:
        with pytest.warns(UserWarning, match=reason):
            assert_same(model, **call, **FREE)
        assert handle.stats().calls_served == 0


@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_calls_that_fall_back_late_get_their_images(name: str) -> None:
    case = BY_NAME[name]
    model, call = case.build(), case.call([text(20, 0), 1, ASK], [2, text(3, 0), 3, AGAIN])
    with enabled(model, num_blocks=1) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in ({}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
            assert_same(model, **call, **options)
        assert handle.stats().calls_served == 0


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=lambda o: next(iter(o))
)
def test_embeddings_with_an_image_go_to_the_model(options: dict[str, Any]) -> None:
    case = BY_NAME["llava"]
    model, call = case.build(), case.call([text(20, 0), 1, ASK])
    call["inputs_embeds"] = model.get_input_embeddings()(call.pop("input_ids"))
    with enable_prefix_caching(model), pytest.warns(UserWarning, match="inputs_embeds of your own with images"):
        assert_same(model, **call, **FREE, **options)


def test_tokens_that_stand_for_no_image() -> None:
    case = BY_NAME["llava"]
    model, call = case.build(), case.call([text(20, 0), 1, ASK])
    fewer = call | {"input_ids": call["input_ids"].clone()}
    fewer["input_ids"][0, 20] = 11
    with enabled(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="do not match"):
            model.generate(**fewer, **FREE)
        masked = call | {"attention_mask": call["attention_mask"].clone()}
        masked["attention_mask"][0, 22] = 0
        assert_same(model, **masked, **FREE)
        assert handle.stats().calls_served == 0
        alone = {k: v for k, v in call.items() if k != "pixel_values"}  # placeholders then have their own embeddings
        assert_same(model, **alone, **FREE)
        assert cached(model, handle, **call, **FREE) == 16
        assert int((call["input_ids"] == IMAGE).sum()) == 16


def test_right_padding_and_holes_behind_an_image() -> None:
    case = BY_NAME["llava"]
    model, call = case.build(), case.call([text(20, 0), 1, ASK], [1, ASK])
    right = {k: v if k == "pixel_values" else v.flip(1) for k, v in call.items()}
    hole = case.call([text(20, 0), 1, ASK])
    hole["attention_mask"][0, 40:50] = 0
    with enable_prefix_caching(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert_same(model, **right, **FREE)
            assert_same(model, **hole, **FREE)
        assert handle.stats().calls_handed_back == {}
        assert handle.last_requests[0].cached_tokens == 32


def test_outputs_of_the_tower_keep_to_their_budget() -> None:
    """A cached output is 48 bytes, and the budget has room for three. The least recently used one is evicted."""
    batch = torch.randn(5, 4, 3)
    keys = [(bytes([i]), 0, 4) for i in range(5)]
    outputs = VisionOutputs(3 * 48 + 47)
    outputs.put(dict(zip(keys[:3], batch, strict=False)))
    first = outputs.get(keys[:1])[keys[0]]
    assert first is not None
    outputs.put({keys[3]: batch[3], keys[4]: torch.ones(8, 8)})  # the second exceeds the budget alone
    found = outputs.get([*keys, (keys[0][0], 0, 3)])
    assert [rows is not None for rows in found.values()] == [True, False, True, True, False, False]
    for at in (0, 2, 3):
        rows = found[keys[at]]
        assert rows is not None
        assert torch.equal(rows, batch[at])
        assert rows.untyped_storage().nbytes() == 48  # not the batch's
    outputs.put({keys[0]: batch[4]})  # a cached output stays
    assert outputs.get(keys[:1])[keys[0]] is first
    assert sum(rows.nbytes for rows in outputs._rows.values()) == 3 * 48
    outputs.put({(keys[0][0], 0, 12): torch.ones(12, 3)})  # needs the room of all three
    assert sum(rows.nbytes for rows in outputs._rows.values()) == 3 * 48
    assert set(outputs.get(keys).values()) == {None}


@pytest.mark.slow
def test_threads_ask_about_different_images() -> None:
    case = BY_NAME["gemma3"]
    model = case.build()
    calls = [case.call([text(20, 0), number % 3, text(9, number)]) for number in range(6)]
    want = [plain(model, **call, **FREE) for call in calls]
    same: list[bool] = []

    def work(offset: int) -> None:
        for at in range(6):
            which = (offset + at) % 6
            same.append(torch.equal(model.generate(**calls[which], **FREE), want[which]))

    with enabled(model, num_blocks=40):
        in_threads(work, *range(3))
        assert same == [True] * 18
