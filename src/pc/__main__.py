"""`python -m pc` and `pc`: one function per command, which parses and leaves the work to a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from . import __version__

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(f"python -m pc needs {error.name}: pip install typer rich matplotlib") from error

SHELLS = ("bash", "zsh", "fish")
POLICIES = (
    "arc", "belady", "default", "fifo", "hazard", "lfu", "lru", "next_turn", "priority", "s3fifo",
)  # fmt: skip
"""What `--policies` offers, without importing them: a test compares it with `pc.cache.policies`."""

app = typer.Typer(
    help="Fused attention and prefix caching for PyTorch.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _one_of(*values: str) -> Callable[[str], list[str]]:
    """Completes an option's value."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Fused attention and prefix caching for PyTorch."""


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Hub id or path of a causal language model, GGUF too; default: SmolLM2-135M-Instruct."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Default: cuda where there is one, else cpu.", autocompletion=_one_of("cpu", "cuda")),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Default: float32 on a cpu, bfloat16 on a GPU.",
            autocompletion=_one_of("float32", "bfloat16", "float16"),
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    output: Annotated[Path, typer.Option(help="Folder for the table (CSV) and the plot (PNG).")] = Path("demo_output"),
    reuse: Annotated[
        str,
        typer.Option(
            help="prefix, or gap: the document's middle is evicted between questions, the rest reused.",
            autocompletion=_one_of("prefix", "gap"),
        ),
    ] = "prefix",
    image: Annotated[
        bool, typer.Option("--image", help="Ask a model that reads images about two of them instead.")
    ] = False,
    compress: Annotated[
        bool, typer.Option("--compress", help="Ask over compressed documents instead: memory and answers by budget.")
    ] = False,
) -> None:
    """Ask a long document six questions and hold a conversation, with and without the cache."""
    from .demo._run import run_demo

    raise typer.Exit(run_demo(model, device, dtype, max_new_tokens, block_size, output, reuse, image, compress))


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="Operators, such as paged_attention; none: all.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; default: a GPU where there is one.", autocompletion=_one_of("cpu", "cuda")),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases and little time.")] = False,
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    provider: Annotated[str | None, typer.Option(help="Besides pc, only providers whose name contains this.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the rows (CSV).")] = Path("bench_output"),
    threads: Annotated[int, typer.Option(min=1, help="Of PyTorch on a cpu.")] = 1,
    peers: Annotated[Path | None, typer.Option(help="Folder of other projects' wheels to measure beside pc.")] = None,
) -> None:
    """Measure operators against their rivals; numbers are checked first. Needs a checkout."""
    from .bench import run_bench

    raise typer.Exit(run_bench(ops or [], device, quick, case, provider, output, threads, peers))


@app.command()
def check(
    quick: Annotated[bool, typer.Option("--quick", help="Only what enable_prefix_caching checks once.")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Default: cuda where there is one, else cpu.", autocompletion=_one_of("cpu", "cuda")),
    ] = None,
) -> None:
    """Check that every kernel gives what PyTorch gives on this device; exit status 1 where one does not."""
    from .check import run_check

    raise typer.Exit(run_check(device, quick))


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Print versions, devices, kernels and cache directories: what a bug report needs."""
    import json

    from .info import collect_info, format_info

    found = collect_info()
    typer.echo(json.dumps(found, indent=2) if as_json else format_info(found))


@app.command()
def warmup(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a causal language model; its config is read.")],
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of queries; default: the config's.", autocompletion=_one_of("bfloat16", "float16")),
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="Of a quantized cache.", autocompletion=_one_of("float8", "int8"))
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share the heads.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile at once.")] = 4,
) -> None:
    """Compile the kernels of a model's layers into Triton's cache, ahead of its first request."""
    from .warm import run_warmup

    raise typer.Exit(run_warmup(model, device, dtype, cache_dtype, block_size, tensor_parallel, workers))


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A .jsonl or .jsonl.gz: hash_ids a line, or sessions with requests.")],
    policies: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas; belady knows the future, next_turn when each conversation goes on.",
            autocompletion=_one_of(*POLICIES),
        ),
    ] = "lru,default",
    capacity: Annotated[
        str, typer.Option(help="Shares of the whole trace's unique blocks (1%) or blocks (4096), separated by commas.")
    ] = "1%,3%,10%,30%",
    part: Annotated[
        str, typer.Option(help="Requests to replay, as shares of the trace: 50%-100% is its second half.")
    ] = "0%-100%",
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate against capacity here, with lru and belady.")] = None,
    hints: Annotated[
        str,
        typer.Option(
            help="What free(returns=) says, separated by commas: none, oracle (the trace's own future), or a "
            "noisy bit's area under the ROC curve, such as 0.8."
        ),
    ] = "none",
    block_size: Annotated[int | None, typer.Option(help="Tokens a block, where the file does not say.")] = None,
) -> None:
    """Replay a request trace through eviction policies: hit rates at several capacities."""
    from .replay import run_replay

    run_replay(trace, policies, capacity, part, csv_file, plot, hints, block_size)


@app.command()
def explain(
    requests: Annotated[
        Path, typer.Argument(help="A .jsonl or .jsonl.gz: a line a request, with input, prompt or text, or token_ids.")
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub id or folder; without one, bytes of a text are its tokens.")
    ] = None,
    num_blocks: Annotated[int, typer.Option("--blocks", min=1, help="Of the cache.")] = 4096,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    policy: Annotated[
        str, typer.Option(help="Which block is evicted first.", autocompletion=_one_of(*POLICIES))
    ] = "default",
) -> None:
    """Send prompts through a cache in order and say why each is not cached further, with both texts."""
    from .explain import run_explain

    run_explain(requests, tokenizer, num_blocks, block_size, policy)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=_one_of(*SHELLS))],
) -> None:
    """Print a script that completes commands and options of `pc` in a shell.

    bash: put `eval "$(pc completion bash)"` into ~/.bashrc. zsh: put the same with zsh into ~/.zshrc, behind compinit.
    fish: pc completion fish > ~/.config/fish/completions/pc.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        raise typer.BadParameter(f"shell: got {shell!r}, needs one of {', '.join(SHELLS)}", param_hint="SHELL")
    typer.echo(get_completion_script(prog_name="pc", complete_var="_PC_COMPLETE", shell=shell))


def main() -> None:
    """Runs the command line."""
    app(prog_name="pc")


if __name__ == "__main__":
    main()
