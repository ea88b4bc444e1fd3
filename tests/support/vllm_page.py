"""The examples of docs/vllm.md: its blocks by language, and the commands of a program in them."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")

BLOCKS: defaultdict[str, list[str]] = defaultdict(list)
"""By language; without one, commands."""
for _language, _text in re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S):
    BLOCKS[_language].append(_text)


def commands(program: str) -> list[list[str]]:
    """The words of each of a program's commands in the page's blocks, variables in front of it included."""
    command = re.compile(rf"^(?:PC_\w+=\S+ )*{program} (?:\\\n|[^'\n]|'[^']*')*", re.M)
    found = [text for block in BLOCKS[""] for text in command.findall(block)]
    return [shlex.split(text.replace("\\\n", ""), comments=True) for text in found]
