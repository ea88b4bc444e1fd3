"""Runs every request twice, without and with the cache, and compares tokens and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ._gap import MiddleFirst, blocks_for
from ._models import DOCUMENT, load_model, read_document
from ._report import print_tables, save_csv, save_plot
from ._workloads import QUESTIONS, ROUNDS, Conversation, document_prompts, interlude


@dataclass(frozen=True)
class Measurement:
    """One request, asked without and with the cache.

    Attributes:
        workload: Of `_report.TITLES`.
        number: Of the request in its workload, from 1.
        prompt_tokens: Length of the prompt.
        reused_spans: Ranges [start, end) of it that were read from the cache.
        plain_seconds: Time to first token without the cache.
        cached_seconds: Time to first token with it.
        verdict: "yes" when all tokens are the same, else where they part and why that is or is not rounding.
        ok: Whether the verdict is acceptable.
    """

    workload: str
    number: int
    prompt_tokens: int
    reused_spans: tuple[tuple[int, int], ...]
    plain_seconds: float
    cached_seconds: float
    verdict: str
    ok: bool

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were read from the cache."""
        return sum(end - start for start, end in self.reused_spans)

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came with the cache."""
        return self.plain_seconds / self.cached_seconds


class _FirstToken:
    """A streamer that notes when the first token arrived; generate puts the prompt before it."""

    def __init__(self) -> None:
        self._puts = 0
        self._start = time.perf_counter()
        self.seconds = float("nan")

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter() - self._start

    def end(self) -> None:
        """Nothing is held back."""


def _ask(generate: Callable[..., Any], prompt: list[int], device: torch.device, **options: Any) -> tuple[Any, float]:
    """Greedy answer to a prompt, and seconds to its first token."""
    ids = torch.tensor([prompt], device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock = _FirstToken()
    result = generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, streamer=clock, **options
    )
    return result, clock.seconds


def compare_tokens(reference: list[int], got: list[int], logits: Callable[[int], torch.Tensor]) -> tuple[str, bool]:
    """Whether two greedy answers are the same, or part only where rounding decides.

    Args:
        reference: Tokens without the cache.
        got: Tokens with it.
        logits: Gives the reference's logits `[vocabulary]` for the token at an index.

    Returns:
        What to print, and whether it is acceptable: in float32 only equal tokens are; in float16 and bfloat16 the first
        difference may lie where the two highest logits are closer than the rounding error of the higher.
    """
    if reference == got:
        return "yes", True
    pairs = zip(reference, got, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(got)))
    scores = logits(at)
    top = scores.float().topk(2).values
    gap, rounding = (top[0] - top[1]).item(), top[0].abs().item() * torch.finfo(scores.dtype).eps
    if scores.dtype != torch.float32 and gap <= rounding:
        return f"to token {at}: two logits {gap:.2g} apart, rounding {rounding:.2g}", True
    return f"NO, from token {at}", False


def _choose(device_name: str | None, dtype_name: str | None) -> tuple[torch.device, torch.dtype]:
    """Device and dtype, from their names or by what is there.

    Raises:
        ValueError: There is no such device or dtype.
    """
    kind = device_name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {kind!r}, needs cpu or cuda")
    device = torch.device(kind)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: got {kind!r}, but this machine has no GPU that PyTorch can use")
    name = dtype_name or ("float32" if device.type == "cpu" else "bfloat16")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype: got {name!r}, needs float32, bfloat16 or float16")
    return device, getattr(torch, name)


def run_demo(
    model_name: str | None,
    device_name: str | None,
    dtype_name: str | None,
    max_new_tokens: int,
    block_size: int,
    output: Path,
    reuse: str = "prefix",
) -> int:
    """Runs the workloads, prints the tables and saves CSV and plot into `output`; the process's exit code.

    Args:
        model_name: Hub id or path; None: a small one of random weights.
        device_name: "cpu" or "cuda"; None: a GPU where there is one.
        dtype_name: "float32", "bfloat16" or "float16"; None: by the device.
        max_new_tokens: Of each answer.
        block_size: Tokens of a block.
        output: Folder of the results.
        reuse: "prefix", or "gap": the middle of the document is evicted between the questions.
    """
    console = Console()
    try:
        from ..integrations.huggingface import enable_prefix_caching

        device, dtype = _choose(device_name, dtype_name)
        output.mkdir(parents=True, exist_ok=True)
        if reuse not in ("prefix", "gap"):
            raise ValueError(f"--reuse: got {reuse!r}, needs prefix or gap")
        model, tokenizer = load_model(model_name, device, dtype)
        document = read_document()
        questions = list(document_prompts(tokenizer, document))
        evicting: dict[str, Any] = {}
        if reuse == "gap":
            room = blocks_for(max(map(len, questions)), max_new_tokens, block_size)
            evicting = {"num_blocks": room, "policy": MiddleFirst, "reuse": "gap"}
        handle = enable_prefix_caching(model, block_size=block_size, **evicting)
    except (ImportError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    name = model_name or "a Llama with untrained, random weights (its answers mean nothing, its work is real)"
    console.print(f"Model: {name}, {parameters:.1f} M parameters, {str(dtype).removeprefix('torch.')} on {device}")
    console.print(f"Document: the Constitution of the United States ({DOCUMENT}, {len(document.split()):,} words)\n")

    plain = type(model).generate
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    measurements: list[Measurement] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with handle, Progress(*columns, console=console) as progress:
        if handle.unsupported:
            console.print(f"[red]{handle.unsupported}[/red]")
            return 1
        task = progress.add_task("warming up", total=2 * (len(QUESTIONS) + len(ROUNDS)))
        for generate in (model.generate, lambda **kw: plain(model, **kw)):
            _ask(generate, tokenizer.encode("Warm up."), device, **options)

        def measure(workload: str, number: int, prompt: list[int]) -> list[int]:
            def reference(**extra: Any) -> tuple[Any, float]:
                return _ask(lambda **kw: plain(model, **kw), prompt, device, **options, **extra)

            def logits(index: int) -> torch.Tensor:
                result, _ = reference(return_dict_in_generate=True, output_logits=True)
                scores: torch.Tensor = result.logits[index][0].to(dtype)
                return scores

            progress.update(task, description=f"{workload} {number}, without the cache")
            expected, plain_seconds = reference()
            progress.update(task, advance=1, description=f"{workload} {number}, with the cache")
            got, cached_seconds = _ask(model.generate, prompt, device, **options)
            answer = expected[0, len(prompt) :].tolist()
            verdict, ok = compare_tokens(answer, got[0, len(prompt) :].tolist(), logits)
            spans = tuple(span for request in handle.last_requests for span in request.cached_spans)
            measurements.append(
                Measurement(workload, number, len(prompt), spans, plain_seconds, cached_seconds, verdict, ok)
            )
            progress.advance(task)
            return list(answer)

        other = interlude(tokenizer, document)
        for number, prompt in enumerate(questions, 1):
            if reuse == "gap" and number > 1:
                progress.update(task, description="another request, for which blocks are evicted")
                _ask(model.generate, other, device, **options)
            measure("gap" if reuse == "gap" else "document", number, prompt)
        conversation = Conversation(tokenizer, document)
        for number, prompt in enumerate(conversation.prompts(), 1):
            conversation.reply(measure("conversation", number, prompt))
        progress.update(task, description="done")

    print_tables(console, measurements)
    save_csv(output / "demo.csv", measurements, name=model_name or "llama-25m-untrained", dtype=dtype, device=device)
    saved = f"{output / 'demo.csv'}"
    try:
        save_plot(output / "demo.png", output / "demo.csv")
        saved += f" and {output / 'demo.png'}"
    except ModuleNotFoundError as error:
        saved += f"; the plot needs {error.name}: pip install matplotlib"
    console.print(f"\nSaved {saved}", markup=False)
    different = [m for m in measurements if not m.ok]
    if different:
        console.print(f"[red]{len(different)} of {len(measurements)} answers differ with the cache[/red]")
    return 1 if different else 0
