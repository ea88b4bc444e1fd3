"""What mkdocs does besides: lists the operators' pages, and takes tables of results into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results/"
OPERATORS = "<!-- operators -->"


def on_config(config: Any) -> Any:
    """Adds to the navigation what it does not name: operators to theirs, other pages before the changelog."""
    docs = ROOT / "docs"
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    for entry in config.nav:
        if "Operators" in entry:
            entry["Operators"] = [page for page in pages if page.startswith("ops/")]
    config.nav[-1:-1] = [page for page in pages if page not in named and not page.startswith("ops/")]
    config.nav = [entry for entry in config.nav if entry != {"Operators": []}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """The measured rows, so that a page can link to those behind its tables."""
    for path in sorted((ROOT / RESULTS).rglob("*.csv")):
        name = path.relative_to(ROOT / "benchmarks").as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuses a page that would fetch a script or a style from elsewhere when it is read."""
    found = re.findall(r'<script[^>]*src="https?:[^"]*"|<link[^>]*stylesheet[^>]*href="https?:[^"]*"', output)
    if found:
        raise ValueError(f"{page.file.src_uri}: got {found[0]}, needs what lies in the site")
    return output


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in the list of operators; links to files of the repository lead to their copies in the site."""
    if OPERATORS in markdown:
        import pc

        # By its own module: in the package, an operator and the file it is in have one name.
        entries = [f"::: {getattr(pc, name).__module__}.{name}" for name in sorted(pc.triton_ops.__all__)]
        markdown = markdown.replace(OPERATORS, "\n\n".join(entries))
    up = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"]({up}../{RESULTS}", f"]({up}results/").replace(
        f"]({up}../CHANGELOG.md", f"]({up}changelog.md"
    )
