"""`python -m pc explain`, which sends a file's prompts through a manager and explains where each cached prefix ends."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from .cache import CacheManager, OutOfBlocks

NAMES = ("token_ids", "prompt_token_ids", "input", "prompt", "text")
"""Fields of a line that may hold its prompt, as token ids or as text."""


def run_explain(requests: Path, tokenizer: str | None, num_blocks: int, block_size: int, policy: str) -> None:
    """Print a line for each request and a table of reasons; see the command's options.

    Raises:
        BadParameter: The file, a line of it, the tokenizer or the policy cannot be used.
    """
    encode, decode = _tokenizer(tokenizer)
    try:
        manager = CacheManager(num_blocks, block_size, policy)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--policy") from None
    lost: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for number, row in _rows(requests):
        prompt = next((row[name] for name in NAMES if row.get(name)), None)
        if prompt is None:
            raise typer.BadParameter(f"line {number} has none of {', '.join(NAMES)}", param_hint="REQUESTS")
        try:
            tokens = encode(prompt) if isinstance(prompt, str) else prompt
            keys: dict[str, Any] = {name: row.get(name) for name in ("extra_keys", "salt")}
            found = manager.explain(tokens, **keys)
            manager.allocate(number, tokens, **keys)
        except (TypeError, ValueError, OutOfBlocks) as error:
            raise typer.BadParameter(f"line {number}: {error}", param_hint="REQUESTS") from None
        manager.commit(number, len(tokens))
        manager.free(number)
        if found.reason == "token" and (tokenizer or (isinstance(prompt, str) and max(found.there) < 256)):
            found = replace(found, texts=(decode(found.here), decode(found.there)))
        typer.echo(f"{number}: {found}")
        reason = found.reason or "as far as possible"
        count[reason] += 1
        lost[reason] += len(tokens) - found.matched
    if not count:
        raise typer.BadParameter(f"{requests} holds no requests", param_hint="REQUESTS")
    typer.echo(f"\n{'reason':<16} {'requests':>8} {'tokens computed':>15}")
    for reason, number in count.most_common():
        typer.echo(f"{reason:<16} {number:>8} {lost[reason]:>15}")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of a file with their line numbers; the file may be compressed with gzip."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    row = json.loads(line.rstrip())
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"line {number}: got {type(row).__name__}, needs a JSON object in each line")
                yield number, row
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="REQUESTS") from error


def _tokenizer(name: str | None) -> tuple[Callable[[str], list[int]], Callable[[Any], str]]:
    """Return functions that encode and decode text. Without a name, each byte of UTF-8 is a token."""
    if name is None:
        return lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace")
    try:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--tokenizer") from error
    return lambda text: found(text)["input_ids"], found.decode
