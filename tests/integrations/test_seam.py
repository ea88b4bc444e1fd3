"""Checks of a framework's private names: a table lists what an adapter uses, and each difference is reported."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from types import SimpleNamespace

import pytest

from pc.integrations import seam

SOURCE = '''
import dataclasses, functools

class Pool:
    annotated: int

    def __init__(self, size, *, watch=False):
        self.size = size

    def take(self, count, block_ids=(), **kwargs):
        """Take blocks."""
        if count:  # some
            self.last = count
        return count

    @classmethod
    def of(cls, size):
        return cls(size)

class Status:
    RUNNING = 1

@dataclasses.dataclass
class Fields:
    first: int
    second: int = 0

def wrapped(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

take = wrapped(Pool.take)
'''


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Return a function that makes the module `made_engine`, a double of a framework, from any source."""
    count = itertools.count()

    def make(source=SOURCE):
        path = tmp_path / f"{next(count)}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("made_engine", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "made_engine", module)
        spec.loader.exec_module(module)
        return module

    return make


def test_a_table_that_holds(engine):
    engine()
    table = {
        "made_engine": "Status.RUNNING Fields(first second) Fields(second first ...) Pool.of(size) take(count)",
        "made_engine:Pool": "__init__(size watch) take(count block_ids) of size annotated last",
    }
    assert seam.missing(table) == []
    first, *_, last = seam.names(table)
    assert first == ("made_engine:Status.RUNNING", None, False)
    assert last == ("made_engine:Pool.last", None, False)
    assert seam.Name("made_engine:Fields", ("second", "first"), True) in list(seam.names(table))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ("give(count)", "made_engine:Pool.give: not there"),
        ("other", "made_engine:Pool.other: not there"),
        ("take(number)", "made_engine:Pool.take: has no number"),
        ("take(block_ids count)", "made_engine:Pool.take: takes self, count, block_ids, needs block_ids, count"),
        ("take(block_ids)", "made_engine:Pool.take: also requires count"),
        ("size(count)", "made_engine:Pool.size: not there"),
        ("annotated(count)", "made_engine:Pool.annotated: not there"),
    ],
)
def test_what_is_not_as_declared_is_named(engine, members, reason):
    engine()
    assert seam.missing({"made_engine:Pool": f"take(count) {members}"}) == [reason]


def test_paths_of_what_tables_declare():
    tables = {"engine.pool:Pool": "touch(blocks)", "engine.status": "Status.RUNNING find(key)"}, {"other:Pool": "size"}
    assert seam.paths(tables) == {
        "Pool": "engine.pool:Pool",
        "Status": "engine.status:Status",
        "find": "engine.status:find",
    }


def test_a_wrapper_that_passes_everything_on(engine):
    module = engine()
    take = module.Pool.take
    module.Pool.take = lambda *args, **kwargs: take(*args, **kwargs)
    assert seam.missing({"made_engine:Pool": "take(count block_ids)"}) == []


def test_a_module_that_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "made_broken.py").write_text("raise RuntimeError('no device')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    reasons = seam.missing({"made_broken": "name", "made_nowhere:Pool": "take(count) size"})
    assert reasons[0] == "made_broken:name: not there (RuntimeError: no device)"
    assert reasons[1:] == ["made_nowhere:Pool.take: not there", "made_nowhere:Pool.size: not there"]


def test_attributes_of_objects():
    block = SimpleNamespace(number=1)
    pool = SimpleNamespace(blocks=[block], queue=None)
    table = {
        "scheduler": "pool",
        "scheduler.pool": "blocks queue waiting",
        "scheduler.pool.blocks.0": "number",
        "scheduler.pool.blocks.7": "number",
        "scheduler.cache.pool": "blocks",
        "worker": "runner",
    }
    found = seam.absent({"scheduler": SimpleNamespace(pool=pool)}, table)
    assert found == [
        "scheduler.pool: has no waiting",
        "scheduler.pool.blocks.7: not there",
        "scheduler.cache.pool: not there",
    ]
    assert seam.absent({"worker": pool}, table) == ["worker: has no runner"]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('"""Take blocks."""', '"""Take blocks, and say so."""', True),
        ('        """Take blocks."""\n', "", True),
        ("  # some", "", True),
        ("if count:  # some", "if  count :\n\n            # more", True),
        ("        return count", "            return count", False),
        ("self.last = count", "self.last = count + 1", False),
        ("self.last = count", "self.last = count; self.more = count", False),
        ("            self.last = count", "            self.last = \\\n                count", True),
        ("def take(self, count,", "def take(self, count: int,", False),
    ],
)
def test_a_digest_counts_code_alone(engine, old, new, same):
    assert old in SOURCE
    written = {"made_engine:Pool.take": {"1.0": seam.digest(engine().Pool.take)}}
    engine(SOURCE.replace(old, new))
    reasons = seam.changed(written)
    assert (reasons == []) is same
    if not same:
        assert reasons[0].startswith("made_engine:Pool.take: its body is not the one of 1.0 (digest ")


def test_a_wrapped_body_is_another(engine):
    module = engine()
    written = {"made_engine:Pool.take": {"1.0": seam.digest(module.Pool.take), "1.1": "0" * 12}}
    assert seam.changed(written) == []
    take = module.Pool.take
    module.Pool.take = functools.wraps(take)(lambda *args: take(*args))
    assert seam.changed(written)[0].startswith("made_engine:Pool.take: its body is not the one of 1.0, 1.1")


def test_a_body_without_source_is_not_known(engine, monkeypatch):
    module = engine()
    written = {"made_engine:Pool.take": {"1.0": seam.digest(module.Pool.take)}}
    exec(compile("def take(self, count): pass", "<no file>", "exec"), module.__dict__)
    module.Pool.take = module.__dict__["take"]
    assert seam.changed(written) == ["made_engine:Pool.take: its source cannot be read (OSError)"]
    del module.Pool.take
    assert seam.changed(written) == ["made_engine:Pool.take: its source cannot be read (AttributeError)"]


def test_a_dataclass_has_the_digest_of_its_source(engine):
    before = seam.digest(engine().Fields)
    engine(SOURCE.replace("second: int = 0", "second: int = 1"))
    assert seam.changed({"made_engine:Fields": {"1.0": before}})
