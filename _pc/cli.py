"""The command line: one function per command, which parses and leaves the work to a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .replay import replay

app = typer.Typer(
    help="Fused attention and prefix caching for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,  # see completion.py
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pc {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Fused attention and prefix caching for PyTorch."""


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Hub id or path of a causal language model; default: a small Llama, untrained.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a cpu, bfloat16 on a GPU.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    output: Annotated[Path, typer.Option(help="Folder for the table (CSV) and the plot (PNG).")] = Path("demo_output"),
    reuse: Annotated[
        str, typer.Option(help="prefix, or gap: the document's middle is evicted between questions, the rest reused.")
    ] = "prefix",
    image: Annotated[
        bool,
        typer.Option("--image", help="Ask a model that reads images about two pictures instead."),
    ] = False,
) -> None:
    """Ask a long document six questions and hold a conversation, with and without the cache."""
    from .demo._run import run_demo

    raise typer.Exit(run_demo(model, device, dtype, max_new_tokens, block_size, output, reuse, image))


@app.command()
def bench(
    ops: Annotated[list[str] | None, typer.Argument(help="Operators, such as paged_attention; none: all.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one.")] = None,
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
def info(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Print versions, devices, kernels and cache directories: what a bug report needs."""
    import json

    from .info import collect_info, format_info

    found = collect_info()
    typer.echo(json.dumps(found, indent=2) if as_json else format_info(found))


@app.command()
def families(
    names: Annotated[list[str] | None, typer.Argument(help="Classes, such as LlamaForCausalLM; none: all.")] = None,
    output: Annotated[Path | None, typer.Option(help="Markdown file for the table.")] = None,
) -> None:
    """Build every language model class of transformers small and run it with and without prefix caching."""
    from .families import run_families

    raise typer.Exit(run_families(names or [], output))


app.command()(replay)


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print a script that completes commands and options of `pc` in a shell.

    bash: eval "$(pc completion bash)" in ~/.bashrc. zsh: the same with zsh in ~/.zshrc, behind compinit. fish: pc
    completion fish > ~/.config/fish/completions/pc.fish
    """
    from .completion import script

    try:
        typer.echo(script(shell, app), nl=False)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SHELL") from error
