"""The demo itself, which runs every request without and with the cache and compares tokens and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .._console import choose_device, new_progress
from ..triton_ops._core.checks import check_integer
from ._compress import show_compressed
from ._images import IMAGES, SIZE, image_prompts, load_seeing_model
from ._images import QUESTIONS as IMAGE_QUESTIONS
from ._measure import Comparison, Inputs, Measurement, MiddleFirst
from ._models import load_model, read_document
from ._report import print_tables, rows_of, save_csv, save_plot
from ._workloads import QUESTIONS, ROUNDS, Conversation, answer_ends, document_prompts, excerpt, interlude


def _choose(device_name: str | None, dtype_name: str | None) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype with these names; without a name, choose by the hardware.

    Raises:
        ValueError: The device does not exist, or the name is not a device or dtype of the demo.
    """
    try:
        device = choose_device(device_name)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    name = dtype_name or ("float32" if device.type == "cpu" else "bfloat16")
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype: got {name!r}, needs float32, bfloat16 or float16")
    return device, getattr(torch, name)


@dataclass(frozen=True)
class Plan:
    """A model and the requests that the demo sends to it.

    Attributes:
        model: The model, before its cache is enabled.
        tokenizer: The model's tokenizer.
        name: The model's name in the results.
        known_as: The model's description in the output.
        about: Description of the document or images in the output.
        options: Arguments of `enable_prefix_caching`.
        warm_up: The first prompt, which is not measured.
        requests: Number of measured requests.
        run: Sends all requests through a `Comparison`.
        prompts: Token ids of the questions about the document.
    """

    model: Any
    tokenizer: Any
    name: str
    known_as: str
    about: str
    options: dict[str, Any]
    warm_up: Inputs
    requests: int
    run: Callable[[Comparison], None]
    prompts: Sequence[list[int]] = ()


def run_demo(
    model_name: str | None,
    device_name: str | None,
    dtype_name: str | None,
    max_new_tokens: int,
    block_size: int,
    output: Path,
    reuse: str = "prefix",
    image: bool = False,
    compress: bool = False,
) -> int:
    """Run the workloads, print the tables, save CSV and chart into `output`, and return the exit status.

    Args:
        model_name: Hub id or path of a model or a GGUF file. None: SmolLM2 if it is installed, else a small untrained
            model.
        device_name: "cpu" or "cuda". None: "cuda" if there is a GPU.
        dtype_name: "float32", "bfloat16" or "float16". None: float32 on a CPU, bfloat16 on a GPU.
        max_new_tokens: Maximum number of tokens in each answer.
        block_size: Number of tokens in a block.
        output: Folder of the results.
        reuse: "prefix" or "gap". With "gap", the middle of the document is evicted between the questions.
        image: Ask a vision-language model about two images instead.
        compress: Compress the document with several budgets and ask about it instead. Save nothing.
    """
    console = Console()
    try:
        from ..integrations.huggingface import enable_prefix_caching

        device, dtype = _choose(device_name, dtype_name)
        check_integer("block_size", block_size, 1)
        output.mkdir(parents=True, exist_ok=True)
        if reuse not in ("prefix", "gap"):
            raise ValueError(f"--reuse: got {reuse!r}, needs prefix or gap")
        if image and reuse == "gap":
            raise ValueError("--reuse gap: got it together with --image, needs only one of them")
        if compress and (image or reuse == "gap"):
            raise ValueError("--compress: got it together with --image or --reuse gap, needs neither")
        if image:
            plan = _plan_images(model_name, device, dtype)
        else:
            plan = _plan_document(model_name, device, dtype, reuse == "gap", max_new_tokens, block_size)
        model = plan.model
        handle = enable_prefix_caching(model, block_size=block_size, **plan.options)
    except (ImportError, OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    about_weights = f"{parameters:.1f} M parameters, {str(dtype).removeprefix('torch.')} on {device}"
    console.print(f"Model: {plan.known_as}, {about_weights}", markup=False)
    console.print(f"{plan.about}\n")

    if compress:
        with handle:
            show_compressed(console, model, handle, plan.tokenizer, QUESTIONS, plan.prompts, max_new_tokens)
        return 0

    with handle, new_progress(console) as progress:
        if handle.unsupported:
            console.print(f"[red]{handle.unsupported}[/red]")
            return 1
        task = progress.add_task("warming up", total=2 * plan.requests)

        def advance(next_step: str | None) -> None:
            progress.update(task, advance=1 if next_step is None else 0, description=next_step)

        options = {"max_new_tokens": max_new_tokens, "pad_token_id": plan.tokenizer.pad_token_id}
        comparison = Comparison(model, handle, plan.tokenizer, options, advance)
        comparison.warm_up(plan.warm_up)
        plan.run(comparison)
        advance("done")
    return _report(console, comparison.measurements, output, plan.name, dtype, device)


def _plan_document(
    model_name: str | None, device: torch.device, dtype: torch.dtype, gap: bool, max_new_tokens: int, block_size: int
) -> Plan:
    """Return the plan of questions about a document, followed by a conversation.

    With `gap` there is no conversation. Instead, a request between two questions evicts the document's middle.
    """
    model, tokenizer, name, known_as = load_model(model_name, device, dtype)
    document = read_document()
    text, what = document, "the Constitution of the United States"
    if len(tokenizer.encode(document)) + 1024 > getattr(model.config, "max_position_embeddings", 2**31):
        text, what = excerpt(document), f"Articles II to VI of {what}"
    questions = list(document_prompts(tokenizer, text))
    options: dict[str, Any] = {}
    if gap:
        # The pool has room for one request and one more block.
        capacity = -(-(max(map(len, questions)) + max_new_tokens) // block_size) + 1
        options = {"num_blocks": capacity, "policy": MiddleFirst, "reuse": "gap"}

    def inputs(prompt: list[int]) -> Inputs:
        ids = torch.tensor([prompt], device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def run(comparison: Comparison) -> None:
        other, ends = inputs(interlude(tokenizer, text)), answer_ends(model, tokenizer)
        for number, (question, prompt) in enumerate(zip(QUESTIONS, questions, strict=True), 1):
            if gap and number > 1:
                comparison.ask(other, "another request, which evicts blocks")
            comparison.measure("gap" if gap else "document", number, question, inputs(prompt), ends)
        if not gap:
            conversation = Conversation(tokenizer, document)
            for number, (said, prompt) in enumerate(zip(ROUNDS, conversation.prompts(), strict=True), 1):
                conversation.reply(comparison.measure("conversation", number, said, inputs(prompt)))

    about = f"Document: {what} ({len(text.split()):,} words)"
    count = len(QUESTIONS) + (0 if gap else len(ROUNDS))
    return Plan(
        model, tokenizer, name, known_as, about, options, inputs(tokenizer.encode("Warm up.")), count, run, questions
    )


def _plan_images(model_name: str | None, device: torch.device, dtype: torch.dtype) -> Plan:
    """Return the plan of questions about one image, then about another of the same size."""
    model, tokenizer, encode = load_seeing_model(model_name, device, dtype, read_document())

    def run(comparison: Comparison) -> None:
        for number, (question, inputs) in enumerate(image_prompts(encode), 1):
            comparison.measure("picture", number, question, inputs)

    about = f"Images: {' and '.join(IMAGES)}, drawn here, of the same size"
    warm_up = encode(torch.zeros(3, SIZE, SIZE), "Warm up.")
    count = len(IMAGES) * len(IMAGE_QUESTIONS)
    known_as = model_name or "an untrained Gemma 3 with random weights: its answers mean nothing, but its speed is real"
    return Plan(model, tokenizer, model_name or "gemma3-untrained", known_as, about, {}, warm_up, count, run)


def _report(
    console: Console, found: list[Measurement], output: Path, name: str, dtype: torch.dtype, device: torch.device
) -> int:
    """Print and save the results; return the exit status: 1 if tokens differ or no token was reused, else 0."""
    print_tables(console, found)
    rows = rows_of(found, name, dtype, device)
    save_csv(output / "demo.csv", rows)
    saved = f"{output / 'demo.csv'}"
    try:
        save_plot(output / "demo.png", rows)
        saved += f" and {output / 'demo.png'}"
    except ModuleNotFoundError as error:
        saved += f"; the plot needs {error.name}: pip install matplotlib"
    console.print(f"\nSaved {saved}", markup=False)
    different = [m for m in found if not m.ok]
    if different:
        console.print(f"[red]{len(different)} of {len(found)} answers differ with the cache[/red]")
    later = [m for m in found if m.number > 1]
    reused = not later or any(m.reused_tokens for m in later)
    if not reused:
        console.print(
            "[red]No token was reused: every prompt was computed in full.[/red] The warnings above, if any, say why."
        )
    return 0 if reused and not different else 1
