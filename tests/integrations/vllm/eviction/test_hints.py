"""Hints of callers: their envelope, which ones are rejected, and their effect on a request's blocks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import vllm_engine
from vllm_traffic import make_request

from pc.integrations.vllm.eviction import Hint, HintRange, read_hint, retention_hints


def carrying(envelope):
    return make_request("r", [1, 2, 3, 4, 5], extra_args={"kv_hints": envelope})


def test_the_whole_prompt():
    hint = read_hint(carrying(retention_hints(priority=5, ttl=60, returns=0.9)))
    assert hint == Hint((HintRange(0, None, 5, 60.0),), 0.9)


def test_ranges_fall_back_to_the_values_for_all():
    ranges = [{"start": 0, "end": 100}, {"start": 200, "priority": 9, "ttl": 5}]
    hint = read_hint(carrying(retention_hints(priority=5, ttl=60, token_ranges=ranges)))
    assert hint == Hint((HintRange(0, 100, 5, 60.0), HintRange(200, None, 9, 5.0)), None)


def test_vllms_own_field_comes_first():
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    request = carrying(retention_hints(priority=5))
    action = KvHintAction("a", "retention", "1", {"priority": 7})
    request.kv_hints = KvHintsEnvelope("1", "m", [action])
    assert read_hint(request) == Hint((HintRange(0, None, 7, None),), None)


def test_other_actions_and_other_versions_are_passed_over():
    envelope = retention_hints(priority=5)
    action = envelope["actions"][0]
    assert read_hint(carrying({**envelope, "actions": [{**action, "action_type": "prefetch"}]})) is None
    assert read_hint(carrying({**envelope, "actions": [{**action, "action_version": "2"}]})) is None
    assert read_hint(carrying({**envelope, "actions": []})) is None
    assert read_hint(make_request("r", [1])) is None
    assert read_hint(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"priority": 0}, ValueError, "priority: got 0"),
        ({"priority": 1 << 31}, ValueError, "priority: got 2147483648"),
        ({"priority": True}, TypeError, "priority: got bool"),
        ({"priority": 1.5}, TypeError, "priority: got float"),
        ({"priority": 1, "ttl": 0}, ValueError, "ttl: got 0"),
        ({"priority": 1, "ttl": float("nan")}, ValueError, "ttl: got nan"),
        ({"priority": 1, "ttl": "60"}, TypeError, "ttl: got str"),
        ({"returns": 1.1}, ValueError, "returns: got 1.1"),
        ({"returns": float("nan")}, ValueError, "returns: got nan"),
        ({"token_ranges": [{"start": 5}]}, ValueError, "priority: got None"),
        ({"priority": 1, "token_ranges": [{"start": 5, "end": 4}]}, ValueError, "start 5 and end 4"),
        ({"priority": 1, "token_ranges": [{"start": -1}]}, ValueError, "start -1"),
    ],
)
def test_wrong_values_are_named(given, error, message):
    with pytest.raises(error, match=message):
        retention_hints(**given)


@pytest.mark.parametrize("envelope", [3, "x", [1], {"actions": [3]}, {"actions": 5}])
def test_something_else_is_an_error_that_says_so(envelope):
    with pytest.raises(TypeError, match=r"kv_hints: got (int|list|a string).*, needs"):
        read_hint(carrying(envelope))


def through_the_server(envelope):
    """Return a request as vLLM's server makes it from a client's; the server's protocol rejects other values."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    sent = protocol.CompletionRequest(prompt=[1, 2, 3], vllm_xargs={"kv_hints": envelope})
    return make_request("r", [1, 2, 3], extra_args=sent.to_sampling_params(16, {}).extra_args)


def test_a_client_of_the_server_sends_json():
    envelope = json.dumps(retention_hints(priority=5, ttl=60, returns=0.9))
    assert read_hint(through_the_server(envelope)) == Hint((HintRange(0, None, 5, 60.0),), 0.9)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "nonsense", "3", "[1]", '"x"', "[" * 100_000),
        json.dumps({"actions": [3]}),
        json.dumps(retention_hints(priority=5)).replace("5}", "1" + "0" * 400 + "}"),
        json.dumps(retention_hints(returns=0.5)).replace("0.5", "1" + "0" * 400),
        json.dumps(retention_hints(returns=0.5)).replace("0.5", "NaN"),
        json.dumps(retention_hints(priority=5, token_ranges=[{"start": 0}] * 5)).replace(
            '[{"start": 0},', "[" + '{"start": 0},' * 5000
        ),
        json.dumps({"actions": retention_hints(priority=5, token_ranges=[{"start": 0}] * 5)["actions"] * 1000}),
    ],
    ids=range(13),
)
def test_what_a_client_may_send_and_is_no_hint_is_an_error_that_the_scheduler_expects(text):
    with pytest.raises((TypeError, ValueError), match=r"kv_hints|priority|returns|token_ranges"):
        read_hint(carrying(text))


def test_an_unknown_word_is_refused():
    envelope = retention_hints(priority=5)
    envelope["actions"][0]["payload"]["durationn" * 1000] = 5
    with pytest.raises(ValueError, match="payload: got 'durationn") as raised:
        read_hint(carrying(envelope))
    assert len(str(raised.value)) < 200, "a client fills the log"


def test_a_payload_without_its_envelope_is_refused():
    with pytest.raises(ValueError, match=r"kv_hints: got returns, needs what retention_hints\(\) returns"):
        read_hint(carrying({"returns": 0.9}))


PROMPT = list(range(3, 163))


@pytest.fixture
def crowded(model_path, monkeypatch):
    """An engine with the priority policy and room for little more than one prompt, and a prompt that fills it."""
    monkeypatch.setenv("PC_VLLM_POLICY", "priority")
    with vllm_engine.engine(model_path("llama"), ["eviction"], num_gpu_blocks_override=14) as (llm, _):

        def hits(tokens, **params):
            return vllm_engine.generate(llm, [tokens], max_tokens=2, **params)[1][0]

        yield llm, hits


def fill(hits):
    for n in range(3):
        hits([100 + n, *PROMPT[: 32 * 5]])


FIRST_TWO_BLOCKS = [{"start": 0, "end": 64, "priority": 2}]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("hint", "kept"),
    [(None, 0), ({"priority": 5}, 128), ({"returns": 0.5}, 0), ({"token_ranges": FIRST_TWO_BLOCKS}, 64)],
)
def test_what_has_a_priority_is_kept(crowded, hint, kept):
    _, hits = crowded
    params = {} if hint is None else {"extra_args": {"kv_hints": retention_hints(**hint)}}
    assert hits(PROMPT, **params) == 0
    fill(hits)
    assert hits(PROMPT) == kept


def test_a_hint_that_cannot_be_read_does_not_stop_the_request(crowded):
    _, hits = crowded
    assert hits(PROMPT, extra_args={"kv_hints": {"actions": [3]}}) == 0
    assert hits(PROMPT, extra_args={"kv_hints": 5}) == 128


def test_what_is_known_of_a_request_is_forgotten_at_its_end(crowded):
    llm, hits = crowded
    hits(PROMPT, extra_args={"kv_hints": retention_hints(priority=5, returns=0.5)})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler._hints == {}
    assert scheduler._hinted == {}


def test_how_likely_a_conversation_goes_on_arrives_at_the_policy():
    from pc.cache.policies import LRU
    from pc.integrations.policy_pool import PolicyPool

    heard = []

    class Listens(LRU):
        def returning(self, probability):
            heard.append(probability)

        def finished(self, output_tokens):
            heard.append(output_tokens)

    state = PolicyPool(0, Listens(), lambda: 0)
    state.finished(7, 0.25)
    state.finished(3, None)
    assert heard == [0.25, 7, 3]
