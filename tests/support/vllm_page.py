"""Examples of the pages about vLLM: their blocks by language, and the commands of a program in them."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("vllm*.md")))
"""All pages about vLLM."""

BLOCKS: defaultdict[str, list[str]] = defaultdict(list)
"""Blocks by language; those without a language are commands."""
for _language, _text in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S):
    BLOCKS[_language].append(_text)


def commands(program: str) -> list[list[str]]:
    """Return the words of each command of a program in the pages' blocks, with the variables before it."""
    command = re.compile(rf"^(?:PC_\w+=\S+ )*{program} (?:\\\n|[^'\n]|'[^']*')*", re.M)
    found = [text for block in BLOCKS[""] for text in command.findall(block)]
    return [shlex.split(text.replace("\\\n", ""), comments=True) for text in found]
