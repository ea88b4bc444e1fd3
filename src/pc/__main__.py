"""The command line, `pc` or `python -m pc`: a function for each command parses its options and calls another module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from . import __version__

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(f"python -m pc needs {error.name}: pip install typer rich matplotlib") from error

SHELLS = ("bash", "zsh", "fish")
POLICIES = (
    "arc", "belady", "default", "fifo", "hazard", "lfu", "lru", "next_turn", "priority", "s3fifo",
)  # fmt: skip
"""Values of `--policies`, listed here so that completion imports no policy. A test compares them with `POLICIES`."""

app = typer.Typer(
    help="Fused attention and prefix caching for PyTorch.", no_args_is_help=True, pretty_exceptions_enable=False
)


def _one_of(*values: str) -> Callable[[str], list[str]]:
    """Return a function that completes an option's value to one of `values`."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def _option(text: str, *values: str) -> Any:
    """Return a command-line option with a help text. A shell completes its value to one of `values`."""
    return typer.Option(help=text, autocompletion=_one_of(*values))


Device = Annotated[str | None, _option("Default: cuda if there is a GPU, else cpu.", "cpu", "cuda")]


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
    device: Device = None,
    dtype: Annotated[
        str | None, _option("Default: float32 on a CPU, bfloat16 on a GPU.", "float32", "bfloat16", "float16")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in each answer.")] = 24,
    block_size: Annotated[int, typer.Option(help="Number of tokens in a block.")] = 16,
    output: Annotated[Path, typer.Option(help="Folder for the table (CSV) and the plot (PNG).")] = Path("demo_output"),
    reuse: Annotated[
        str,
        _option("prefix or gap. gap evicts the middle of the document between questions.", "prefix", "gap"),
    ] = "prefix",
    image: Annotated[
        bool, typer.Option("--image", help="Ask a vision-language model about two images instead.")
    ] = False,
    compress: Annotated[
        bool, typer.Option("--compress", help="Compress the document instead; show memory and answers per budget.")
    ] = False,
) -> None:
    """Ask a model six questions about a long document and hold a conversation, with and without the cache."""
    from .demo._run import run_demo

    raise typer.Exit(run_demo(model, device, dtype, max_new_tokens, block_size, output, reuse, image, compress))


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="Operators, such as paged_attention. Default: all.")] = None,
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer cases, each for less time.")] = False,
    case: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    provider: Annotated[str | None, typer.Option(help="Other implementations to time, by a part of the name.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the rows (CSV).")] = Path("bench_output"),
    threads: Annotated[int, typer.Option(min=1, help="Number of PyTorch's threads on a CPU.")] = 1,
    peers: Annotated[Path | None, typer.Option(help="Folder with wheels of other projects to compare with.")] = None,
) -> None:
    """Time operators beside other implementations. Results are checked first. Needs a checkout of the repository."""
    from .bench import run_bench

    raise typer.Exit(run_bench(ops or [], device, quick, case, provider, output, threads, peers))


@app.command()
def check(
    quick: Annotated[bool, typer.Option("--quick", help="Run only the checks of enable_prefix_caching.")] = False,
    device: Device = None,
) -> None:
    """Check every kernel on this device against PyTorch. The exit status is 1 if a result is wrong."""
    from .check import run_check

    raise typer.Exit(run_check(device, quick))


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, devices, kernels and cache directories, for a bug report."""
    import json

    from .info import collect_info, format_info

    found = collect_info()
    typer.echo(json.dumps(found, indent=2) if as_json else format_info(found))


@app.command()
def warmup(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a causal language model. Only its config is read.")],
    device: Device = None,
    dtype: Annotated[
        str | None, _option("Dtype of queries. Default: the config's.", "bfloat16", "float16", "float32")
    ] = None,
    cache_dtype: Annotated[str | None, _option("Dtype of the cache, if it is quantized.", "float8", "int8")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Number of tokens in a block.")] = 16,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Number of devices that share the heads.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that compile in parallel.")] = 4,
) -> None:
    """Compile the kernels of a model's attention layers into Triton's cache, before its first request."""
    from .warm import run_warmup

    raise typer.Exit(run_warmup(model, device, dtype, cache_dtype, block_size, tensor_parallel, workers))


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Argument(help="A .jsonl or .jsonl.gz file. Each line is a request with hash_ids, or a session.")
    ],
    policies: Annotated[
        str,
        _option(
            "Names, separated by commas. belady knows all later requests, next_turn each conversation's next.",
            *POLICIES,
        ),
    ] = "lru,default",
    capacity: Annotated[
        str,
        typer.Option(
            help="Capacities, separated by commas: a share of the whole trace's unique blocks (1%) or a number of "
            "blocks (4096)."
        ),
    ] = "1%,3%,10%,30%",
    part: Annotated[
        str, typer.Option(help="Range of requests to replay: 50%-100% is the trace's second half.")
    ] = "0%-100%",
    csv_file: Annotated[Path | None, typer.Option("--csv", help="File to write the results to.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File for a chart of hit rate against capacity; adds lru and belady.")
    ] = None,
    hints: Annotated[
        str,
        typer.Option(
            help="Hints passed as free(returns=...), separated by commas: none, oracle (the trace's own future), or "
            "a number such as 0.8: a noisy hint with this area under the ROC curve."
        ),
    ] = "none",
    block_size: Annotated[
        int | None, typer.Option(help="Number of tokens in a block, if the file does not say.")
    ] = None,
) -> None:
    """Replay a request trace through eviction policies and print hit rates at several capacities."""
    from .replay import run_replay

    run_replay(trace, policies, capacity, part, csv_file, plot, hints, block_size)


@app.command()
def explain(
    requests: Annotated[
        Path,
        typer.Argument(help="A .jsonl or .jsonl.gz file. Each line has a prompt: input, prompt, text or token_ids."),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub id or folder of a tokenizer. Default: each byte of a text is a token.")
    ] = None,
    num_blocks: Annotated[int, typer.Option("--blocks", min=1, help="Number of blocks in the cache.")] = 4096,
    block_size: Annotated[int, typer.Option(min=1, help="Number of tokens in a block.")] = 16,
    policy: Annotated[str, _option("Eviction policy.", *POLICIES)] = "default",
) -> None:
    """Send prompts through a cache in order and print, for each, why the cached prefix ends where it does."""
    from .explain import run_explain

    run_explain(requests, tokenizer, num_blocks, block_size, policy)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=_one_of(*SHELLS))],
) -> None:
    """Print a shell script that completes commands and options of `pc`.

    For bash, put `eval "$(pc completion bash)"` into ~/.bashrc.
    For zsh, put `eval "$(pc completion zsh)"` into ~/.zshrc, after compinit.
    For fish, run `pc completion fish > ~/.config/fish/completions/pc.fish`.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    if shell not in SHELLS:
        raise typer.BadParameter(f"shell: got {shell!r}, needs one of {', '.join(SHELLS)}", param_hint="SHELL")
    typer.echo(get_completion_script(prog_name="pc", complete_var="_PC_COMPLETE", shell=shell))


def main() -> None:
    """Run the command line."""
    app(prog_name="pc")


if __name__ == "__main__":
    main()
