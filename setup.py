"""Gives the wheel README.md as its description, with links that work where the repository is not."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def describe(readme: str) -> str:
    """README as it is read elsewhere: of a link into the repository its text and the file's name, of a chart nothing.

    The project has no public address that a link could be completed with.
    """

    def replaced(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        return "" if image else f"{text} (`{target}`)"

    text = re.sub(r"<!-- .*? -->", "", readme)
    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]  # what is between is code
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=describe(readme), long_description_content_type="text/markdown")
