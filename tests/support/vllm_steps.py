"""vLLM's scheduler with a made-up model.

The row of a token is the token and its position, and decides the next token.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
import vllm_exact
from vllm_traffic import make_request

BLOCK, WINDOW, DRAFTS = 4, 8, 3


def following(token: int, position: int) -> int:
    """Return the model's next token after a token."""
    return (token * 31 + position * 7 + 1) % 1000


def rows_of(tokens: list[int]) -> torch.Tensor:
    """Return the model's hidden states for a sequence."""
    return torch.tensor([[float(token), float(at)] for at, token in enumerate(tokens)])


def make_scheduler(num_blocks: int, windows: int, drafts: bool) -> Any:
    """Return vLLM's scheduler for a group of full attention and some with windows; a step has room for 24 tokens."""
    from vllm.config import SpeculativeConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec

    drafting = None
    if drafts:
        drafting = SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=2)
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec([f"w{n}"], SlidingWindowSpec(sliding_window=WINDOW, **shape)) for n in range(windows)]
    groups.insert(windows // 2, KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)))
    options = {"at_once": 4, "budget": 24, "speculative_config": drafting}
    return vllm_exact.make_scheduler(num_blocks, stock=True, groups=groups, block_size=BLOCK, **options)


class Steps:
    """An engine without a model, whose runner leaves the hidden states to be stored.

    Attributes:
        runner: The runner that `PromptHiddenStates` wraps.
        counts: Numbers of "hits", "chunks", "resumed" and "rejected".
    """

    def __init__(self, num_blocks: int, windows: int = 0, drafts: bool = False, seed: int = 0) -> None:
        self.scheduler = make_scheduler(num_blocks, windows, drafts)
        self.drafts, self.rng = drafts, random.Random(seed)
        self.counts = dict.fromkeys(("hits", "chunks", "resumed", "rejected"), 0)
        self.batch = SimpleNamespace(req_ids=[])
        self.runner = SimpleNamespace(execute_model=self._execute, execute_model_state=None, input_batch=self.batch)

    def add(self, name: str, tokens: list[int], generate: int, extra: dict[str, Any] | None = None) -> Any:
        """Add a request with these `extra_args`."""
        request = make_request(name, tokens, BLOCK, generate=generate, ignore_eos=True, extra_args=extra)
        self.scheduler.add_request(request)
        return request

    def run(self, *request: Any) -> None:
        """Add a request, if one is given, and run steps until no request is left."""
        if request:
            self.add(*request)
        while self.scheduler.requests:
            self.step()

    def _tokens(self, output: Any, name: str) -> tuple[int, list[int]]:
        """Return the position of a request's first token of a step, and the step's tokens.

        Drafts follow the known ones.
        """
        request, count = self.scheduler.requests[name], output.num_scheduled_tokens[name]
        begin = self.begins[name]
        known = list(request.all_token_ids)[begin:]
        return begin, (known + list(output.scheduled_spec_decode_tokens.get(name, ())))[:count]

    def _execute(self, output: Any) -> None:
        self.batch.req_ids = sorted(output.num_scheduled_tokens)  # the batch's own order
        found = [self._tokens(output, name) for name in self.batch.req_ids]
        rows = [[float(token), float(begin + at)] for begin, tokens in found for at, token in enumerate(tokens)]
        padding = [[-1.0, -1.0]] * (len(rows) % 3)
        self.runner.execute_model_state = SimpleNamespace(hidden_states=torch.tensor(rows + padding).reshape(-1, 2))

    def step(self) -> None:
        """Schedule, execute, and pass the sampled tokens to the scheduler."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        output, requests = self.scheduler.schedule(), self.scheduler.requests
        cached = output.scheduled_cached_reqs
        self.counts["hits"] += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        self.counts["resumed"] += len(cached.resumed_req_ids)
        self.begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self.begins |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.runner.execute_model(output)
        names, sampled, guesses = list(output.num_scheduled_tokens), [], []
        for name in names:
            begin, tokens = self._tokens(output, name)
            guessed = output.scheduled_spec_decode_tokens.get(name, ())
            first = begin + len(tokens) - len(guessed)
            taken: list[int] = []
            if first >= requests[name].num_tokens:
                taken = [following(tokens[first - 1 - begin], first - 1)]
                for guess in guessed:
                    if guess != taken[-1]:
                        break
                    taken.append(following(guess, first - 1 + len(taken)))
                self.counts["rejected"] += len(guessed) - (len(taken) - 1)
            else:
                self.counts["chunks"] += 1
            sampled.append(taken)
            guess, at, mine = taken[-1] if taken else 0, first - 1 + len(taken), []
            for _ in range(DRAFTS if self.drafts and taken else 0):
                guess, at = following(guess, at) if self.rng.random() < 0.7 else 1001, at + 1
                mine.append(guess)
            guesses.append(mine)
        answer = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        self.scheduler.update_from_output(output, answer)
        if self.drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, guesses))
