"""A random walk over the options of generate, which compares calls with a cache to calls without.

Each step draws one to three of `OPTIONS` and a prompt that shares text with earlier ones. A twin of the model, which
has no cache, makes the same call. Both must give the same result, or the cached model must refuse the call by name.
With a compressed document that keeps all tokens, the twin reads the document's text before the question.

`make walk` takes 2,000 steps. `make walk SEED=20261126 ARGS="500 plain"` repeats 500 steps of a day without documents,
and `ARGS="500 documents"` repeats those with documents.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from generate_cases import CACHE, EOS, VOCAB, build_model, prompt
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria

from pc.integrations.huggingface import PrefixCaching, UnsupportedError, enable_prefix_caching

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"num_hidden_layers": 3}),
    ("Mistral", {"sliding_window": 20}),
    ("Qwen3", {"head_dim": 16}),
    ("Gemma2", {"head_dim": 32, "sliding_window": 24, "attn_implementation": "eager"}),
]
WINDOWS_ALONE = ("Mistral",)
"""Models that cannot be compressed."""
HANDLES: list[dict[str, Any]] = [
    {},
    {"deterministic": True, "chunk": 32},
    {"reuse": "gap"},
    {"num_blocks": 12},
    {"host_blocks": 32, "num_blocks": 10},
    {"block_size": 4},
]
DOCUMENT = 37


@dataclass
class Call:
    """A call of generate that options change."""

    rng: random.Random
    model: Any
    twin: Any  # the same weights without a cache, for what is computed outside of generate
    ids: torch.Tensor  # [batch, length]
    kwargs: dict[str, Any] = field(default_factory=dict)
    positional: bool = False
    name: str = "input_ids"

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    def token(self) -> int:
        return self.rng.randrange(8, VOCAB)

    def rows(self, count: int) -> None:
        """Make a batch of `count` rows with different ends."""
        tails = [prompt(3, self.rng.randrange(9)) for _ in range(count - 1)]
        self.ids = torch.cat([self.ids, *[torch.cat([self.ids[:1, :-3], tail], 1) for tail in tails]])

    def run(self, generate: Callable[..., Any]) -> Any:
        options = {"max_new_tokens": 4, **self.kwargs}
        if options.get("max_length") is not None or "generation_config" in options:
            options.pop("max_new_tokens")
        return generate(self.ids, **options) if self.positional else generate(**{self.name: self.ids}, **options)


class Halving(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped here
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, input_ids[0, -1].item() % 7 :: 7] *= 0.5
        return scores


class UpTo(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Streamer(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.seen.append(-1)


Option = Callable[[Call], None]
OPTIONS: dict[str, Option] = {}


def option(function: Option) -> Option:
    OPTIONS[function.__name__.strip("_")] = function
    return function


def setting(name: str, *values: Any) -> None:
    """Register an option that sets an argument to one of some values."""

    def choose(call: Call) -> None:
        call.kwargs[name] = call.rng.choice(values)

    OPTIONS[name] = choose


def computed(name: str, arguments: Callable[[Call], dict[str, Any]]) -> None:
    """Register an option that sets the arguments which a function returns for the call."""
    OPTIONS[name] = lambda call: call.kwargs.update(arguments(call))


setting("max_new_tokens", 1, 2, 9, 20)
setting("do_sample", True)
setting("temperature", 0.3, 1.7)
setting("top_k", 1, 5, 50)
setting("top_p", 0.3, 0.9)
setting("min_p", 0.05)
setting("typical_p", 0.5)
setting("epsilon_cutoff", 0.001)
setting("eta_cutoff", 0.001)
setting("top_h", 0.4)
setting("num_beams", 2, 3)
setting("length_penalty", 0.5, 2.0)
setting("early_stopping", True, False, "never")
setting("repetition_penalty", 1.3, 0.8)
setting("encoder_repetition_penalty", 1.2)
setting("no_repeat_ngram_size", 2, 3)
setting("encoder_no_repeat_ngram_size", 2)
setting("remove_invalid_values", True)
setting("renormalize_logits", True)
setting("exponential_decay_length_penalty", (2, 1.2))
setting("min_new_tokens", 3)
setting("eos_token_id", None, EOS, [EOS, 11, 12, 13])
setting("pad_token_id", 0, 3)
setting("max_time", 1000.0)
setting("output_scores", True)
setting("output_logits", True)
setting("output_attentions", True)
setting("output_hidden_states", True)
setting("return_dict_in_generate", True)
setting("use_cache", True, False)
setting("cache_implementation", "dynamic", "static", "offloaded")
setting("prompt_lookup_num_tokens", 2, 5)
setting("max_matching_ngram_size", 2)
setting("assistant_early_exit", 1)
setting("prefill_chunk_size", 7, 16)
setting("synced_gpus", False)
setting("disable_compile", True)
setting("use_model_defaults", True, False)
setting("logits_to_keep", 1)
setting("custom_generate", None)
setting("is_assistant", False)
setting("token_healing", False)
setting("output_router_logits", False)
setting("return_legacy_cache", False)
computed("max_length", lambda call: {"max_length": call.length + call.rng.randrange(1, 12)})
computed("min_length", lambda call: {"min_length": call.length + 4})
computed("beams_and_samples", lambda call: {"num_beams": 2, "do_sample": True})
computed("sequence_bias", lambda call: {"sequence_bias": [[[call.token()], 9.0], [[call.token()], -9.0]]})
computed("suppress_tokens", lambda call: {"suppress_tokens": [call.token() for _ in range(200)]})
computed("begin_suppress_tokens", lambda call: {"begin_suppress_tokens": [call.token() for _ in range(200)]})
computed("forced_tokens", lambda call: {"forced_bos_token_id": call.token(), "forced_eos_token_id": EOS})
computed("logits_processor", lambda call: {"logits_processor": [Halving()]})
computed("stopping_criteria", lambda call: {"stopping_criteria": [UpTo(call.length + 3)]})
computed("streamer", lambda call: {"streamer": Streamer()})
computed("mask_of_ones", lambda call: {"attention_mask": torch.ones_like(call.ids)})
computed("positions_as_usual", lambda call: {"position_ids": torch.arange(call.length).expand(call.ids.shape)})
computed("positions_elsewhere", lambda call: {"position_ids": torch.arange(call.length).expand(call.ids.shape) + 3})
computed("token_types", lambda call: {"token_type_ids": torch.zeros_like(call.ids)})
computed("embeddings", lambda call: {"inputs_embeds": call.model.get_input_embeddings()(call.ids).detach()})
computed("labels", lambda call: {"labels": call.ids.clone()})
computed("unknown_argument", lambda call: {"no_such_argument": 1})
computed("cache_of_own", lambda call: {CACHE: DynamicCache(config=call.model.config)})
computed("scores", lambda call: {"return_dict_in_generate": True, "output_scores": True, "output_logits": True})
computed("hidden_states", lambda call: {"return_dict_in_generate": True, "output_hidden_states": True})
computed("attentions", lambda call: {"return_dict_in_generate": True, "output_attentions": True})
computed("contrastive", lambda call: {"penalty_alpha": 0.6, "top_k": 4})


@option
def batch(call: Call) -> None:
    call.rows(call.rng.randrange(2, 4))


@option
def same_rows(call: Call) -> None:
    call.ids = call.ids.repeat(2, 1)


@option
def num_return_sequences(call: Call) -> None:
    call.kwargs |= {"num_return_sequences": 2, call.rng.choice(["do_sample", "num_beams"]): 3}
    if "do_sample" in call.kwargs:
        call.kwargs["do_sample"] = True


@option
def bad_words_ids(call: Call) -> None:
    call.kwargs["bad_words_ids"] = [[call.token()] for _ in range(100)] + [[call.token(), call.token()]]


@option
def guidance(call: Call) -> None:
    call.kwargs["guidance_scale"] = 1.5
    if call.rng.random() < 0.5:
        call.kwargs["negative_prompt_ids"] = prompt(9, 3).repeat(len(call.ids), 1)


@option
def watermarking(call: Call) -> None:
    call.kwargs["watermarking_config"] = transformers.WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")


@option
def prefix_allowed_tokens_fn(call: Call) -> None:
    call.kwargs["prefix_allowed_tokens_fn"] = lambda row, ids: list(range(8 + int(ids[-1]) % 5, 400, 3))


@option
def generation_config(call: Call) -> None:
    config = {"max_new_tokens": 7, "do_sample": call.rng.random() < 0.5, "pad_token_id": 0, "eos_token_id": EOS}
    call.kwargs["generation_config"] = GenerationConfig(**config)


@option
def padded_left(call: Call) -> None:
    call.rows(2)
    mask = torch.ones_like(call.ids)
    mask[0, : call.rng.randrange(1, 9)] = 0
    call.kwargs["attention_mask"] = mask


@option
def padded_alone(call: Call) -> None:
    mask = torch.ones_like(call.ids)
    mask[:, : call.rng.randrange(1, 3)] = 0
    call.kwargs["attention_mask"] = mask


@option
def padded_right(call: Call) -> None:
    call.rows(2)
    mask = torch.ones_like(call.ids)
    mask[1, -2:] = 0
    call.kwargs["attention_mask"] = mask


@option
def mask_with_holes(call: Call) -> None:
    mask = torch.ones_like(call.ids)
    mask[:, 5:8] = 0
    call.kwargs["attention_mask"] = mask


@option
def mask_of_four_dimensions(call: Call) -> None:
    mask = torch.ones(len(call.ids), 1, call.length, call.length).tril()
    call.kwargs["attention_mask"] = mask.bool()


@option
def inputs(call: Call) -> None:
    call.name = "inputs"


@option
def positional(call: Call) -> None:
    call.positional = True


@option
def assistant_model(call: Call) -> None:
    assistant = build_model("LlamaConfig", "LlamaForCausalLM", 5, num_hidden_layers=3)
    assistant.generation_config.num_assistant_tokens = call.rng.randrange(1, 5)
    call.kwargs["assistant_model"] = assistant


@option
def filled_cache(call: Call) -> None:
    cache = DynamicCache(config=call.model.config)
    with torch.no_grad():
        call.twin(call.ids[:, : call.length // 2], **{CACHE: cache})
    call.kwargs[CACHE] = cache


@option
def own_loop(call: Call) -> None:
    def loop(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([input_ids, input_ids[:, :2]], 1)

    call.kwargs["custom_generate"] = loop


@dataclass
class Walk:
    """A model with a cache, its twin without one, and the results of their calls."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)
    not_served: set[str] = field(default_factory=set)  # options with which a call fell back or was refused
    answered: torch.Tensor | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def begin(self, number: int, documents: bool) -> None:
        """Start with another model and another handle."""
        self.rng = random.Random(f"{self.seed} {number} {documents}")
        name, options = self.rng.choice([m for m in MODELS if not (documents and m[0] in WINDOWS_ALONE)])
        handle = self.rng.choice(HANDLES)
        self.enable(name, options, {} if documents and handle.get("num_blocks") else handle, documents)

    def enable(self, name: str, options: dict[str, Any], handle: dict[str, Any], documents: bool) -> None:
        """Make a model with options of its config, and enable caching with options of the handle."""
        self.model, self.twin = (build_model(f"{name}Config", f"{name}ForCausalLM", **options) for _ in range(2))
        self.about = f"{name} {handle}{' document' if documents else ''}"
        self.handle: PrefixCaching = enable_prefix_caching(self.model, **{"num_blocks": 64, **handle})
        self.text = prompt(90, self.rng.randrange(99))
        self.document = self.handle.compress(self.text[:, :DOCUMENT], budget=1.0) if documents else None
        self.answered = None

    def step(self) -> None:
        """Compare a random call."""
        rng = self.rng
        names = rng.sample(list(OPTIONS), rng.choice([1, 1, 2, 2, 3]))
        seed, question = rng.randrange(1 << 30), prompt(rng.randrange(4, 14), rng.randrange(5))
        length = DOCUMENT if self.document is not None else rng.choice([1, 16, 32, 33, 48, 64, 80])
        ids = torch.cat([self.text[:, :length], question], 1)
        if self.document is None and self.answered is not None and rng.random() < 0.3:
            ids = torch.cat([self.answered[:1], question], 1)  # the conversation continues
        self.compare(ids, names, seed)

    def compare(self, ids: torch.Tensor, names: list[str], seed: int, times: int = 1) -> None:
        """Compare a call with the options of these names, which is made `times` times over the cache."""
        want = self._outcome(self.twin, ids, names, seed)
        for _ in range(times):
            self._compare(want, ids, names, seed)

    def _compare(self, want: Any, ids: torch.Tensor, names: list[str], seed: int) -> None:
        within = self.document if self.document is not None else contextlib.nullcontext()
        before, fell_back = torch.is_grad_enabled(), sum(self.handle.stats().calls_handed_back.values())
        with within:
            got = self._outcome(self.model, ids, names, seed)
        self.tried.update(names)
        what = f"{self.about}: {' + '.join(names)} of {ids.shape[1]} tokens, seed {seed}"
        self._judge(what, want, got)
        declined = sum(self.handle.stats().calls_handed_back.values()) > fell_back
        self.counts["fell back"] += declined
        if declined or (isinstance(got, Exception) and not isinstance(want, Exception)):
            self.not_served.add(" + ".join(names))
        self.handle.manager.check()
        stats = self.handle.stats()
        # An assisted call that fails leaves a changed config in transformers itself: the twin's has then changed too.
        after = (stats.held_blocks, stats.num_requests, repr(self.model.config), torch.is_grad_enabled())
        if after != (0, 0, repr(self.twin.config), before):
            self.differing.append(f"{what}: left {after[:2]}, config or grad mode changed")

    def _outcome(self, model: Any, ids: torch.Tensor, names: list[str], seed: int) -> Any:
        call = Call(random.Random(seed), model, self.twin, ids)
        for name in names:
            OPTIONS[name](call)
        torch.manual_seed(seed)
        try:
            result = call.run(model.generate)
        except Exception as error:
            return error
        found = dict(result) if hasattr(result, "items") else {"sequences": result}
        stream = call.kwargs.get("streamer")
        return found | ({"streamed": stream.seen} if stream is not None else {})

    def _judge(self, what: str, want: Any, got: Any) -> None:
        if isinstance(want, Exception):
            self.counts["fails without a cache too" if isinstance(got, Exception) else "served, fails without"] += 1
        elif isinstance(got, Exception):
            named = isinstance(got, UnsupportedError | ValueError) and self.document is not None
            self.counts["refused" if named else "raised"] += 1
            if named:
                self.refused[str(got)[:90]] += 1
            else:
                self.differing.append(f"{what}: {type(got).__name__}: {got}"[:400])
        else:
            self.counts["same"] += 1
            self.answered = got["sequences"][:, -120:] if got["sequences"].shape[1] > 150 else got["sequences"]
            if self.document is not None:
                want = {name: value for name, value in want.items() if name != CACHE}
            if self.document is not None and want.get("hidden_states"):  # a document's tokens are not computed
                behind = got["hidden_states"][0][0].shape[1]
                own = tuple(layer[:, -behind:] for layer in want["hidden_states"][0])
                want = {**want, "hidden_states": (own, *want["hidden_states"][1:])}
            problem = difference(want, got)
            if problem is not None:
                self.counts["same"] -= 1
                self.differing.append(f"{what}: {problem}")


def difference(want: dict[str, Any], got: dict[str, Any]) -> str | None:
    """Return how a result differs, or None."""
    if not torch.equal(want["sequences"], got["sequences"]):
        return f"sequences: {got['sequences'].tolist()} not {want['sequences'].tolist()}"
    names = {*want, *got} - {CACHE, "sequences"}
    for name in sorted(names):
        if not _alike(want.get(name), got.get(name)):
            return f"{name} differs"
    own, other = got.get(CACHE), want.get(CACHE)
    if type(own) is not type(other):
        return f"{CACHE}: {type(own).__name__} not {type(other).__name__}"
    layers = zip(own.layers, other.layers, strict=True) if isinstance(own, DynamicCache) else ()
    for number, (layer, expected) in enumerate(layers):
        if layer.get_seq_length() != expected.get_seq_length():
            return f"{CACHE}, layer {number}: {layer.get_seq_length()} tokens, not {expected.get_seq_length()}"
        for keys, wanted in ((layer.keys, expected.keys), (layer.values, expected.values)):
            last = min(keys.shape[2], wanted.shape[2])  # layers with windows may keep more tokens than they need
            keys, wanted = (x[:, :, x.shape[2] - last :].transpose(1, 2) for x in (keys, wanted))
            seen = (keys != 0).any(-1).any(-1)  # columns of padding may be zero
            if not _alike(wanted[seen], keys[seen]):
                return f"{CACHE}: layer {number} differs"
    return None


def _alike(want: Any, got: Any) -> bool:
    if isinstance(want, tuple | list):
        same = type(got) is type(want) and len(want) == len(got)
        return same and all(_alike(a, b) for a, b in zip(want, got, strict=True))
    if isinstance(want, torch.Tensor) and want.is_floating_point():
        if not isinstance(got, torch.Tensor) or want.shape != got.shape:
            return False
        return torch.allclose(want, got, rtol=1e-3, atol=1e-4, equal_nan=True)
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and torch.equal(want, got)
    return bool(want == got)


KINDS = {"plain": (False,), "documents": (True,), "both": (False, True)}


def walk(calls: int, seed: int, kinds: tuple[bool, ...] = (False, True)) -> Walk:
    """Take `calls` steps. Each 20 steps use the next entry of `kinds`, which says whether they are over a document."""
    found = Walk(seed)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(calls):
            if number % 20 == 0:
                if number:
                    found.handle.disable()
                found.begin(number // 20, documents=kinds[number // 20 % len(kinds)])
            found.step()
    return found


def main() -> int:
    """Print the results; return 1 if a call with a cache differed."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    seed = int(os.environ.get("SEED") or datetime.date.today().strftime("%Y%m%d"))
    found = walk(calls, seed, KINDS[sys.argv[2] if len(sys.argv) > 2 else "both"])
    print(f"seed {seed}, {calls} calls, {len(found.tried)} of {len(OPTIONS)} options:", dict(found.counts))
    for reason, count in found.refused.most_common():
        print(f"  refused {count}: {reason}")
    for problem in found.differing:
        print("DIFFERS", problem)
    return int(bool(found.differing))


if __name__ == "__main__":
    raise SystemExit(main())
