"""SGLang's whole engine on the CPU, in its own processes. It answers each of the cases that a test compares.

Usage: python sglang_engine.py MODEL ANSWERS.json [OPTION=VALUE ...]
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PAGE, CHUNK = 16, 64
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "page_size": PAGE,
    "chunked_prefill_size": CHUNK,
    "enable_mixed_chunk": True,
    "max_total_tokens": 640,
    "max_running_requests": 16,
    "schedule_conservativeness": 0.05,
    "disable_cuda_graph": True,
    "random_seed": 0,
    "watchdog_timeout": 300,
}
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SITE = Path(__file__).parent / "sglang_site"


def answers(model: str, folder: Path, ours: bool, **options: Any) -> tuple[dict[str, Any], Counter[str]]:
    """Return the engine's answers, with `pc`'s attention and eviction or SGLang's, and counts of calls of our code."""
    name = "ours" if ours else "own"
    done, counts = folder / f"{name}.json", folder / f"{name}.counts"
    chosen = {"attention_backend": "pc", "radix_eviction_policy": "pc_default"} if ours else {}
    chosen = {"attention_backend": "torch_native", "radix_eviction_policy": "lru"} | chosen | options
    run_python([__file__, model, str(done), *(f"{k}={json.dumps(v)}" for k, v in chosen.items())], counts, ours)
    return json.loads(done.read_text()), Counter(counts.read_text().split("\n") if counts.exists() else ())


def environment(counts: Path | None, ours: bool) -> dict[str, str]:
    """Return the environment of a process that uses SGLang."""
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    if ours:
        given["PC_SGLANG"] = "attention,eviction"
    if ours and counts is not None:
        given["SGLANG_COUNTS"] = str(counts)
    return given


def run_python(command: list[str], counts: Path, ours: bool) -> None:
    """Run a script to its end; if it fails, show what it wrote."""
    log = counts.with_suffix(".log")
    with log.open("w") as file:
        found = subprocess.run(
            [sys.executable, *command], env=environment(counts, ours), stdout=file, stderr=file, timeout=540
        )
    assert found.returncode == 0, log.read_text()[-4000:]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=length)


class Cases:
    """The cases. Each method is one, and its name is that of its answer."""

    def __init__(self, engine: Any, model: str) -> None:
        self.engine, self.model = engine, model

    def ask(self, prompts: list[list[int]], tokens: int = 8, **params: Any) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **params}
        found = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        return [(each["output_ids"], each["meta_info"]["cached_tokens"]) for each in found]

    def prefix_hits(self) -> Any:
        first = prompt(1, 50)
        return [self.ask([first]), self.ask([first]), self.ask([first[:40] + prompt(2, 20)])]

    def chunks(self) -> Any:
        return [self.ask([prompt(3, 300)], 4), self.ask([prompt(3, 300)], 4)]

    def together(self) -> Any:
        return self.ask([prompt(10 + n, 20 + n) for n in range(16)])

    def full_cache(self) -> Any:
        """Ask more than the pool holds, so that requests are retracted and resumed."""
        return [tokens for tokens, _ in self.ask([prompt(40 + n, 33) for n in range(16)], 40, ignore_eos=False)]

    def evicted(self) -> Any:
        """Return answers only: the policy changes what is cached, but no answer."""
        asked = [prompt(60 + n % 9, 90) for n in range(18)]
        return [self.ask([each], 4)[0][0] for each in asked]

    def aborts(self) -> Any:
        async def cut() -> Any:
            params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
            stream = await self.engine.async_generate(
                input_ids=prompt(80, 40), sampling_params=params, stream=True, rid="cut"
            )
            async for part in stream:
                if len(part["output_ids"]) >= 3:
                    self.engine.tokenizer_manager.abort_request(rid="cut")
                last = part
            return last["meta_info"]["finish_reason"]["type"]

        reason = self.engine.loop.run_until_complete(cut())
        return [reason, [tokens for tokens, _ in self.ask([prompt(80, 40)], 8)]]

    def text(self) -> Any:
        """Ask several questions after the same text."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        text = "The cache keeps keys and values of tokens that were computed before, so that prompts which begin alike "
        text += "need not be computed again. Blocks that nobody uses are evicted when others need their place. "
        asked = [text + each for each in ("The cache keeps", "Blocks are evicted when", "Prompts which begin alike")]
        return [self.ask([tokenizer(each).input_ids], 16) for each in asked]

    def streams(self) -> Any:
        params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        parts = list(self.engine.generate(input_ids=prompt(90, 30), sampling_params=params, stream=True))
        return [len(parts) > 1, parts[-1]["output_ids"]]  # a part may bring several tokens


ALWAYS = ("prefix_hits", "chunks", "together", "full_cache", "evicted", "aborts", "streams")
"""The cases for any model. `text` needs a tokenizer."""


def main(model: str, path: str, options: dict[str, Any]) -> None:
    from sglang.srt.entrypoints.engine import Engine

    only = options.pop("cases", ALWAYS)
    engine = Engine(model_path=model, **{**OPTIONS, **options})
    try:
        cases = Cases(engine, model)
        found = {name: getattr(cases, name)() for name in only}
    finally:
        engine.shutdown()
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    main(*sys.argv[1:3], {k: json.loads(v) for k, _, v in (each.partition("=") for each in sys.argv[3:])})
