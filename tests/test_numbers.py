"""Every measurement in README and docs comes from a row in the tree, and charts are drawn from the current rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.harness import conditions, tables
from benchmarks.kernels import steps
from benchmarks.kernels.launches import run_on_cpu
from benchmarks.pages import markdown, plots
from benchmarks.pages import render as render_docs
from benchmarks.pages import tables as pages_tables

pytestmark = pytest.mark.quick  # each page, name and command

PAGES = [pytest.param(page, id=page.relative_to(render_docs.ROOT).as_posix()) for page in render_docs.pages()]
AGAIN = "run: python -m benchmarks render"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_its_rows_render_it(page: Path) -> None:
    assert render_docs.render_page(page) == page.read_text(encoding="utf-8"), AGAIN


@pytest.mark.parametrize("page", PAGES)
def test_no_measurement_stands_outside_of_rendered_text(page: Path) -> None:
    found = render_docs.unrendered_measurements(page)
    assert not found, f"render these from rows, or say `<!-- not measured: why -->` in the line: {found}"


@pytest.mark.parametrize("chart", [pytest.param(path, id=path.name) for path in render_docs.charts()])
def test_a_chart_is_drawn_from_the_rows_in_the_tree(chart: Path) -> None:
    source, _ = render_docs.charts()[chart]
    assert plots.drawn_from(chart) == plots.digest(source), AGAIN
    text = chart.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert all(color in text for color in plots.DARK), "colors that the dark page replaces"


def test_a_chart_shows_the_rows(tmp_path: Path) -> None:
    source, target = tmp_path / "op.csv", tmp_path / "op.svg"
    source.write_text("case,provider,mode,p50_us\none,pc,eager,1234.5\none,rival,eager,98.7\n")
    plots.plot_operator(source, target)
    first = target.read_text()
    assert re.search(r"1\.23 ms", first)
    assert re.search(r"98\.7 us", first)
    assert plots.drawn_from(target) == plots.digest(source)
    plots.plot_operator(source, target)
    assert target.read_text() == first, "drawn twice, the same"
    source.write_text("case,provider,mode,p50_us\none,pc,eager,9.5\n")
    assert plots.drawn_from(target) != plots.digest(source)


@pytest.mark.parametrize(
    ("line", "states"),
    [
        ("It is 12x faster.", True),
        ("It takes 3.5 ms.", True),
        ("It moves 4.3 TB/s.", True),
        ("It costs 40 % less.", True),
        ("With 90 % of its blocks absent it costs about a tenth.", False),
        ("It is 1,200 times sooner.", True),
        ("Eight questions, 9,700 tokens, blocks of 16, torch 2.13.", False),
        ("Up to 12 x. <!-- not measured: a bound -->", False),
        ("Heads 8x128, `5 ms` in code.", False),
    ],
)
def test_what_counts_as_a_measurement(line: str, states: bool, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{line}\n")
    assert bool(render_docs.unrendered_measurements(page)) is states


@pytest.mark.skipif(torch.version.hip is not None, reason="chooses kernels for CUDA")
def test_counts_are_of_the_trees_sources(tmp_path: Path) -> None:
    """Work of all steps, and kernels of the first kind of layer, in one process, because its imports take longest.

    The digest of all sources, which no assertion reads, is left out.
    """
    layer, *_ = tables.read_rows(tables.RESULTS / "life.csv")
    life = ["life", layer["layer"], "--output", str(tmp_path / "life.csv")]
    code = "from benchmarks.__main__ import main; from benchmarks.harness import conditions; conditions.sources = str; "
    said = run_on_cpu("-c", code + f"main({life}); main(['launches'])").splitlines()
    (found,) = tables.read_rows(tmp_path / "life.csv")
    assert found["missing"] == ""
    assert found["kernels"] == layer["kernels"], "run: python -m benchmarks life"
    rows = [row for row in tables.read_rows(tables.RESULTS / "work.csv") if row["provider"] == "pc"]
    counted = {(row["architecture"], row["triton"], row["case"]): row["sources"] for row in rows}
    assert counted == {tuple(key): value for key, value in json.loads(said[-1])}, "run: make work"


def test_no_version_of_triton_executes_much_more() -> None:
    """A case that a version compiles worse needs its own constants, or must be listed here with the reason."""
    spills = {("3.6.0", "sm_90", "latent decode 1 x 1k, 128 heads")}  # spills with tiles of 64 rows, so it has 32
    rows = [row for row in tables.read_rows(tables.RESULTS / "work.csv") if row["provider"] == "pc"]
    found = {(row["triton"], row["architecture"], row["case"]): int(row["instructions"]) for row in rows}
    newest = max(steps.VERSIONS, key=markdown.by_version)
    assert {version for version, *_ in found} == set(steps.VERSIONS)
    much = {key for key, count in found.items() if count > 1.06 * found[(newest, *key[1:])]}
    assert much == spills


def test_rows_say_whether_what_they_measure_has_changed() -> None:
    row, operator = {"commit": "abc"}, Path("results/cpu/copy_blocks.csv")
    now = {"sources": conditions.sources()}
    assert markdown.commits(operator, [row | now]) == "commit abc"
    assert markdown.commits(operator, [row]) == "commit abc (the measured code has changed since)"
    of_cache = {"sources": re.sub("cache:[0-9a-f]+", "cache:0", now["sources"])}
    assert markdown.commits(operator, [row | of_cache]) == "commit abc"
    assert markdown.commits(Path("results/cpu/manager.csv"), [row | of_cache]) != "commit abc"
    assert markdown.commits(Path("results/cpu/reuse.csv"), [row | of_cache]) != "commit abc"
    of_vllm = {"sources": re.sub("integrations/vllm:[0-9a-f]+", "integrations/vllm:0", now["sources"])}
    assert markdown.commits(Path("results/cpu/reuse.csv"), [row | of_vllm]) == "commit abc"
    assert markdown.commits(Path("results/cpu/vllm_serving.csv"), [row | of_vllm]) != "commit abc"


def test_times_carry_their_commit() -> None:
    files = {path.name: tables.read_rows(path) for path in tables.RESULTS.rglob("*.csv")}
    timed = {name: rows for name, rows in files.items() if re.search(r"_(us|ms|s)\b", " ".join(rows[0]))}
    assert "demo.csv" in timed
    assert not [name for name, rows in timed.items() if not all(row.get("commit") for row in rows)]


def test_columns_of_the_sparse_table_are_providers() -> None:
    from benchmarks.operators import attention_providers

    providers = [provider.name for provider in attention_providers.attention_providers("sparse_gap_attention")]
    columns = pages_tables.TABLES["sparse"].columns
    named = {name.strip() for _, cell in columns for name in re.findall(r"([^{}/]+)\.p50_us", cell)}
    assert len(named) == 3
    assert named <= {*providers}
