"""Every measurement in README and docs comes from a row in the tree, and charts are drawn from the current rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness import conditions, tables
from benchmarks.kernels import steps
from benchmarks.pages import markdown, plots, render_operators
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


def test_work_was_counted_of_the_trees_sources() -> None:
    rows = [row for row in tables.read_rows(render_operators.results("work.csv")) if row["provider"] == "pc"]
    found = {(row["architecture"], row["triton"], row["case"]): row["sources"] for row in rows}
    assert found == steps.sources(), "run: make work"


def test_no_version_of_triton_executes_much_more() -> None:
    """A case that a version compiles worse needs its own constants, or must be listed here with the reason."""
    spills = {("3.6.0", "sm_90", "latent decode 1 x 1k, 128 heads")}  # spills with tiles of 64 rows, so it has 32
    rows = [row for row in tables.read_rows(render_operators.results("work.csv")) if row["provider"] == "pc"]
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


def test_times_carry_their_commit() -> None:
    files = {path.name: tables.read_rows(path) for path in markdown.RESULTS.rglob("*.csv")}
    timed = {name: rows for name, rows in files.items() if re.search(r"_(us|ms|s)\b", " ".join(rows[0]))}
    assert "demo.csv" in timed
    assert not [name for name, rows in timed.items() if not all(row.get("commit") for row in rows)]


def test_a_gpu_that_was_not_measured_is_said_to_be_missing() -> None:
    text = render_operators.render_gpu(render_docs.ROOT / "docs" / "benchmarks_gpu.md")
    assert ("Missing" in text) == (markdown.devices() == ["cpu"])


def test_a_table_gives_the_best_rival_and_the_ratio() -> None:
    base = {"case": "one", "mode": "eager", "roofline": "0.5"}
    rows = [
        base | {"provider": "pc", "p50_us": "100"},
        base | {"provider": "pc, batch-invariant", "p50_us": "10"},
        base | {"provider": "slow", "p50_us": "900"},
        base | {"provider": "fast", "p50_us": "250"},
        {"case": "one", "mode": "", "provider": "absent", "note": "n/a: holes"},
    ]
    assert render_operators.cells(rows)[-1] == ["one", "100 us", "50%", "fast, 250 us", "2.50"]


def test_results_of_a_gpu_take_the_place_of_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, page = tmp_path, tmp_path / "docs" / "benchmarks_gpu.md"
    folder = root / "benchmarks" / "results" / "a-gpu"
    folder.mkdir(parents=True)
    monkeypatch.setattr(markdown, "ROOT", root)
    monkeypatch.setattr(markdown, "RESULTS", folder.parent)
    monkeypatch.setattr(markdown, "CHARTS", root / "docs" / "images")
    conditions = "device,torch,date,commit\n"
    row = "{},{},graph,{},0.5,A GPU,2.13,2026-01-01,abc\n"
    (folder / "paged_attention.csv").write_text(
        "case,provider,mode,p50_us,roofline,"
        + conditions
        + row.format("one", "pc", 10)
        + row.format("one", "rival", 30)
    )
    (folder / "generate.csv").write_text(
        "way,request,first_token_s,tokens_per_s,same_as_transformers,model,dtype,prompt_tokens,"
        + conditions
        + "pc,1,9,1,True,M,bfloat16,100,A GPU,2,d,c\npc,2,0.02,50,True,M,bfloat16,100,A GPU,2,d,c\n"
    )
    text = render_operators.render_gpu(page)
    assert "| one | 10 us | 50% | rival, 30 us | 3.00 |" in text
    assert "| pc | 20 ms | 50.0 | yes |" in text
    assert "Missing" not in text
    assert "Not measured on a GPU" not in render_operators.render_operator(page, "paged_attention")


def test_cost_of_blocks_of_a_heads_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.operators import attention_providers as providers

    table, dense, compacted = (
        pages_tables.TABLES["sparse"],
        *(provider.name for provider in reversed(providers.attention_providers("sparse_gap_attention")[3:5])),
    )
    assert dict(table.columns)["pc / dense >"] == f"{{pc.p50_us / {dense}.p50_us:.2f}}"
    assert compacted in dict(table.columns)["pc / compaction and dense >"]
    monkeypatch.setattr(markdown, "ROOT", tmp_path)
    monkeypatch.setattr(markdown, "RESULTS", tmp_path / "results")
    page, source = tmp_path / "docs" / "sparse.md", tmp_path / "results" / "cpu" / "sparse_gap_attention.csv"
    source.parent.mkdir(parents=True)
    assert "Not measured yet" in table.render(page)
    row = "{},{},{},CPU,2.13,float32,32/8,128,16,2026-01-01,abc\n".format
    source.write_text(
        "case,provider,p50_us,device,torch,dtype,heads,head_dim,block_size,date,commit\n"
        + row("holes", "pc", 10)
        + row("holes", compacted, 10)
        + row("a head", "pc", 110)
        + row("a head", compacted, 220)
        + row("a head", dense, 100)
    )
    *_, rule, last = table.render(page).splitlines()
    assert rule.startswith("|---")
    assert last == "| a head | 110 us | 100 us | 1.10 | 0.50 |"


def test_cells_of_tables() -> None:
    row = {"n": "1234", "s": "0.5", "none": "", "way": "all", "x.n": "617", "text": "a, b"}
    for cell, text in {
        "n": "1234",
        "n:,": "1,234",
        "s:s": "500 ms",
        "text:short": "a",
        "way:words": "everything computed",
        "text:words": "`a, b`",
        "{n / x.n:.1f} of {text}": "2.0 of a, b",
        "{1 - x.n / n:.2f}": "0.50",
        "{n} ({none})": "",
        "{n / none:.2f}": "",
        "{way:if all}{n}": "1234",
        "{way:unless all}{n}": "",
    }.items():
        assert pages_tables.fill(cell, row) == text, cell
    assert pages_tables.fill("{n}, {none}", row, keep_empty=True) == "1234, "
    with pytest.raises(KeyError, match="got column 'm', needs one of n, s"):
        pages_tables.fill("{m}", row)


def test_rows_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "RESULTS", tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "rows.csv").write_text("name,size,hits\na,10,5\na,9,4\nb,9,8\n")
    section = {"@rows": "rows.csv", "@said": "nowhere", "@beside": "name / size", "name": "name"}
    table = pages_tables.Table.of(section | {"*of {size}": "{*.hits} hits", "best >": "10.hits"})
    assert table.render(Path()).splitlines() == [
        "| name | of 9 | of 10 | best |",
        "|---|---|---|--:|",
        "| a | 4 hits | 5 hits | 5 |",
        "| b | 8 hits |  |  |",
    ]
