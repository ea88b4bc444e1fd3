"""Compressed prompts in vLLM's engine, against dense attention in transformers with a mask for each layer and head."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import vllm_engine
from vllm_dense import DenseReference, Kept
from vllm_exact import check_references, lose, preempt

from pc.integrations.vllm.compression import worker
from pc.integrations.vllm.compression.scheduler import why_no_compression

SIZE = 16
FEATURES = ["attention", "eviction", "compression"]
OPTIONS = {
    "block_size": SIZE, "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 96, "features": FEATURES,
}  # fmt: skip
PRESSES = ("snapkv", "knorm", "expected_attention")
MARGIN = 2e-5


@pytest.fixture(scope="module")
def reference(model_path):
    return DenseReference(model_path("llama"))


def prompt(length, seed):
    """Tokens without a repetition: in the first layer, equal tokens have keys of one norm."""
    return random.Random(seed).sample(range(3, 500), length)


class Asked(vllm_engine.Requests):
    """Requests to an engine, their plans and their answers."""

    def __init__(self, llm):
        super().__init__(llm)
        self.plans = {}

    def add(self, name, tokens, options, **params):
        extra = {} if options is None else {"extra_args": {"pc_compress": options}}
        super().add(name, tokens, **extra | params)

    def step(self):
        super().step()
        compression = self.scheduler.compression
        for name, plan in compression.plans.items() if compression is not None else ():
            self.plans[name.rpartition("-")[0]] = plan

    def compare(self, reference, tolerance=1e-4):
        """Compare every answer, and return how many of them were of compressed prompts."""
        compressed, size = 0, self.scheduler.block_size
        for (name, index), (tokens, found) in self.answers.items():
            plan = self.plans.get(f"{index}_{name}", self.plans.get(name))
            kept = None
            if plan is not None and plan.is_compressed:
                page = size if plan.options.heads == "ada" else 0
                kept = Kept(plan.options.press, plan.tokens, plan.whole * size, plan.keep * size, page)
            expected = reference.logprobs(self.prompts[name], tokens, kept)
            if reference.margin > MARGIN:
                chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert found == pytest.approx(chosen.tolist(), abs=tolerance)
                assert (expected.max(-1).values - chosen).max() < tolerance
                compressed += kept is not None
        return compressed


@pytest.mark.parametrize("heads", ["same", "ada"])
@pytest.mark.parametrize("press", PRESSES)
def test_against_dense_attention(model_path, reference, press, heads):
    """In chunks, 16 at once, with other budgets and tails of blocks."""
    with vllm_engine.engine(model_path("llama"), **OPTIONS) as (llm, _):
        asked = Asked(llm)
        for number in range(16):
            options = {"budget": random.Random(number).choice([0.25, 0.5, 0.8]), "press": press, "heads": heads}
            asked.add(str(number), prompt(150 + 15 * number, number), options)
        assert asked.run().compare(reference) >= 12


MUTANTS = {
    "a wrong head": lambda blocks, rows: (blocks, rows.roll(1, 1)),
    "a block too few": lambda blocks, rows: (blocks[1:], rows[1:]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_packing_is_seen(model_path, reference, monkeypatch, mutant):
    """Else the other tests could not fail."""
    write = worker.write_blocks
    monkeypatch.setattr(
        worker, "write_blocks", lambda cache, blocks, rows: write(cache, *MUTANTS[mutant](blocks, rows))
    )
    with vllm_engine.engine(model_path("llama"), **OPTIONS) as (llm, _):
        asked = Asked(llm)
        asked.add("one", prompt(320, 3), {"budget": 0.5})
        asked.run()
        with pytest.raises(AssertionError):
            asked.compare(reference)


def disturbed(llm, seed, rounds=40):
    """Shared beginnings, repeated prompts, aborts, preemptions and evictions."""
    rng = random.Random(seed)
    asked = Asked(llm)
    scheduler = asked.scheduler
    roots = [prompt(400, 50 + at) for at in range(3)]
    for number in range(rounds):
        root = rng.choice(roots)
        tokens = root[: rng.randrange(100, 380)] + root[:: -rng.randrange(1, 9)][: rng.randrange(1, 50)]
        tokens = list(dict.fromkeys(tokens))
        if number % 5 == 4:
            tokens = rng.choice(list(asked.prompts.values()))
        options = {"budget": rng.choice([0.3, 0.5, 0.9]), "press": rng.choice(PRESSES)}
        options["heads"] = rng.choice(["same", "ada"])
        until = {"until": rng.choice([len(tokens) // 2, 120, len(tokens)]), "share": rng.choice([None, False])}
        asked.add(str(number), tokens, rng.choice([options | until, options, None]), priority=rng.randrange(3))
        for _ in range(rng.randrange(0, 8)):
            asked.step()
            check_references(scheduler)
        if rng.random() < 0.3 and scheduler.running:
            preempt(scheduler, rng.choice(scheduler.running).request_id)
        if rng.random() < 0.1 and scheduler.requests:
            llm.llm_engine.abort_request([rng.choice(list(scheduler.requests)).rpartition("-")[0]])
        lose(scheduler, rng.randrange(3), rng)
    return asked.run()


SCHEDULING = pytest.mark.parametrize(
    "scheduling", [contextlib.nullcontext, vllm_engine.asynchronous], ids=["sync", "async"]
)


@SCHEDULING
@pytest.mark.parametrize(
    ("seed", "more"),
    [(0, {}), (1, {"block_size": 8, "max_num_batched_tokens": 48, "scheduling_policy": "priority"})],
    ids=["", "small blocks and chunks, priorities"],
)
def test_disturbed(model_path, reference, scheduling, seed, more):
    options = OPTIONS | more
    options["num_gpu_blocks_override"] = 110 * SIZE // options["block_size"]
    with scheduling(), vllm_engine.engine(model_path("llama"), **options) as (llm, _):
        asked = disturbed(llm, seed)
        is_async = asked.core.batch_queue is not None
        assert is_async == (scheduling is vllm_engine.asynchronous)
        assert type(asked.scheduler).__name__ == ("AsyncPolicyScheduler" if is_async else "PolicyScheduler")
        assert asked.compare(reference) > 8
        assert asked.scheduler.compression.counts["recompressed_requests"]


@pytest.mark.slow
def test_runner_v2(model_path):
    """The same with vLLM's model runner V2."""
    script = Path(vllm_engine.__file__).with_name("vllm_compressing_v2.py")
    done = subprocess.run([sys.executable, script, model_path("llama"), "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answers, compressed = map(int, done.stdout.split()[-2:])
    assert answers > 8
    assert compressed > 5


@pytest.mark.parametrize("options", [{"press": "snapkv"}, {"press": "expected_attention", "heads": "ada"}], ids=str)
def test_float8(model_path, reference, options):
    """A cache in float8 rounds keys and values: answers are near those of what stays, and far from the whole prompt."""
    with vllm_engine.engine(model_path("llama"), **OPTIONS, kv_cache_dtype="fp8") as (llm, _):
        asked = Asked(llm)
        asked.add("one", prompt(330, 3), {"budget": 0.5} | options)
        (tokens, found), plan = asked.run().answers["one", 0], asked.plans["one"]
        page = SIZE if "heads" in options else 0
        distances = []
        for kept in (Kept(options["press"], plan.tokens, plan.whole * SIZE, plan.keep * SIZE, page), None):
            expected = reference.logprobs(prompt(330, 3), tokens, kept).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            distances.append(float((torch.tensor(found) - expected).abs().mean()))
    assert distances[0] < 0.3 * distances[1]


def test_samples(model_path, reference):
    """Each of several samples is that of a compressed prompt, and the packed blocks are there once."""
    with vllm_engine.engine(model_path("llama"), **OPTIONS) as (llm, _):
        asked = Asked(llm)
        asked.add("one", prompt(320, 1), {"budget": 0.5}, n=3, temperature=1.0, max_tokens=20)
        most = 0
        while asked.engine.has_unfinished_requests():
            asked.step()
            if asked.plans and all(plan.state == "compressed" for plan in asked.plans.values()):
                most = max(most, sum(block.ref_cnt > 0 for block in asked.scheduler.block_pool.blocks[1:]))
        assert most == 10 + 3 * 2
        compared = 0
        for (name, _), (tokens, found) in asked.answers.items():
            expected = reference.logprobs(asked.prompts[name], tokens, Kept("snapkv", 320, 320, 160))
            chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert found == pytest.approx(chosen.tolist(), abs=1e-4)
            compared += 1
        assert compared == 3


def test_packed_blocks_are_found_again(model_path, reference):
    """Questions about one text: the later ones compute their own tokens alone, and say what they would have said."""
    with vllm_engine.engine(model_path("llama"), **OPTIONS) as (llm, seen):
        asked, text = Asked(llm), prompt(496, 8)
        options = {"budget": 0.4, "until": 20 * SIZE + 5}
        computed = []
        for number in range(4):
            before = seen["tokens"]
            asked.add(str(number), text[: 20 * SIZE] + text[330 + 30 * number :][:40], options)
            asked.run()
            computed.append(seen["tokens"] - before)
        assert asked.compare(reference) == 4
        assert [computed[0] - each for each in computed[1:]] == [20 * SIZE] * 3


def logits_of(llm, requests, watched):
    """Logits of one request at each step, beside others."""
    from unittest import mock

    asked, rows = Asked(llm), []
    runner = asked.core.model_executor.driver_worker.worker.model_runner
    compute = runner.model.compute_logits
    with mock.patch.object(runner.model, "compute_logits", lambda *a: rows.append(compute(*a).clone()) or rows[-1]):
        for name, tokens, options in requests:
            asked.add(name, tokens, options, max_tokens=12)
        found = []
        while asked.engine.has_unfinished_requests():
            asked.step()
            names = [name.rpartition("-")[0] for name in runner.input_batch.req_ids]
            if watched in names and rows:
                found.append(rows[-1][names.index(watched)])
    return found


@pytest.mark.parametrize("heads", ["same", "ada"])
def test_neighbours_have_their_bits(model_path, heads):
    """The same batch, once with a neighbour that is compressed; all of the batch reads its prompt in one step."""
    found = []
    options = OPTIONS | {"max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    for asked in (None, {"budget": 0.4, "heads": heads}):
        with vllm_engine.engine(model_path("llama"), **options) as (llm, _):
            others = [("other", prompt(200, 1), None), ("asks", prompt(300, 2), asked), ("last", prompt(64, 3), None)]
            found.append(logits_of(llm, others, "other"))
    assert len(found[0]) == len(found[1]) > 8
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_the_switch(model_path):
    """An engine with the feature on gives a request that does not ask the same bits."""
    found = []
    for features in (FEATURES[:2], FEATURES):
        with vllm_engine.engine(model_path("llama"), **OPTIONS | {"features": features}) as (llm, _):
            found.append(logits_of(llm, [("one", prompt(300, 4), None), ("two", prompt(100, 5), None)], "one"))
    assert len(found[0]) == len(found[1]) > 8
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["gemma2", "mistral", "bloom"])
def test_models_that_are_refused(model_path, name):
    options = OPTIONS | {"max_model_len": 256, "block_size": 32, "enable_prefix_caching": False}
    with vllm_engine.engine(model_path(name), **options) as (llm, _):
        answers = [Asked(llm) for _ in range(2)]
        for options, asked in zip((None, {"budget": 0.5}), answers, strict=True):
            asked.add("one", prompt(160, 1), options)
            asked.run()
        reason = why_no_compression(answers[0].scheduler)
    assert answers[0].answers == answers[1].answers
    assert reason


def test_wrong_options_are_refused_where_the_caller_sees_it(model_path):
    with vllm_engine.engine(model_path("llama"), **OPTIONS) as (llm, _):
        for options, message in {
            2.0: "budget: got 2.0, needs more than 0 and at most 1",
            "{": "got a string that is no JSON",
            "[0.5]": "budget: got list, needs a number",
            '{"press": "snapkv"}': "got no budget, needs one",
            '{"budget": 0.5, "pres": 1}': "got 'pres', needs some of budget, press, heads, until",
            '{"budget": 0.5, "press": "snap"}': "press: got 'snap', needs one of snapkv",
            '{"budget": 0.5, "heads": "all"}': "heads: got 'all', needs one of same, ada",
            '{"budget": 0.5, "heads": "ada", "until": 9, "share": true}': "share: got true with heads 'ada'",
            '{"budget": 0.5, "until": 0}': "until: got 0, needs at least 1",
            '{"budget": 0.5, "share": true}': "share: got true for the whole prompt, needs until",
            '{"budget": true}': "budget: got bool, needs a number",
        }.items():
            with pytest.raises(ValueError, match="pc_compress") as error:
                Asked(llm).add("one", [5, 6, 7], options)
            assert message in str(error.value)


def test_what_a_budget_holds(model_path):
    """Twelve requests in 47 blocks, which hold two of them whole: fewer steps and more requests at once."""
    steps, at_once = [], []
    for budget in (None, 0.5, 0.2):
        options = OPTIONS | {"max_model_len": 384, "num_gpu_blocks_override": 48}  # one is the null block
        with vllm_engine.engine(model_path("llama"), **options) as (llm, seen):
            asked, running = Asked(llm), []
            for number in range(12):
                asked.add(str(number), prompt(256, number), budget, max_tokens=60)
            while asked.engine.has_unfinished_requests():
                asked.step()
                running.append(len(asked.scheduler.running))
            assert len(asked.answers) == 12
            steps.append(seen["steps"])
            at_once.append(sum(running) / len(running))
    print(f"steps {steps}, requests at once {at_once}")
    assert steps[1] < 0.65 * steps[0]
    assert steps[2] < 0.45 * steps[0]
    assert at_once[0] < 2.3
    assert at_once[1] > 1.5 * at_once[0]
    assert at_once[2] > 2.2 * at_once[0]


@pytest.mark.slow
def test_packing_of_a_trained_model_costs_less_than_a_tenth_of_the_prefill(model_path, trained_model, monkeypatch):
    """In CPU time of this process: all steps of 8,000 tokens, and of these what `begin_step` takes to pack them."""
    seconds, begin = [], worker.Compressor.begin_step

    def timed(self, output):
        started = time.process_time()
        begin(self, output)
        if getattr(output, "pc_packings", ()):
            seconds.append(time.process_time() - started)

    monkeypatch.setattr(worker.Compressor, "begin_step", timed)
    options = {
        "block_size": SIZE,
        "max_model_len": 8192,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 520,
    }
    options["kv_cache_memory_bytes"] = 1 << 30
    with vllm_engine.engine(str(trained_model), FEATURES, **options) as (llm, _):
        asked = Asked(llm)
        asked.add("one", random.Random(0).choices(range(3, 4000), k=8000), {"budget": 0.5}, max_tokens=2)
        started = time.process_time()
        asked.run()
        whole = time.process_time() - started
    print(f"packing took {sum(seconds) / whole:.4f} of all")
    assert len(seconds) == 1
    assert sum(seconds) < 0.1 * (whole - sum(seconds))
