"""If a private name of vLLM is absent or changed, its feature is off, vLLM's code serves, and the log says so."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from unittest import mock

import omni
import pytest
from vllm_exact import ExactEngine, following

from pc.integrations import seam
from pc.integrations import vllm as adapter
from pc.integrations.vllm import api, features

PARTS = ("eviction.gap", "eviction.anywhere", "eviction.chunks", "eviction.explain")
NAMES = [(feature, name) for feature, table in api.NAMES.items() for name in seam.names(table)]
EVICTION = [(feature, name) for feature, name in NAMES if feature.partition(".")[0] == "eviction"]


@pytest.fixture(autouse=True)
def log_again(monkeypatch):
    """Make each test log which features are off, whatever others have logged."""
    monkeypatch.setattr(api, "_logged", set())


@functools.cache
def is_served(feature):
    """Return whether this release has all that a feature needs."""
    if api.PACKAGES.get(feature) == "vllm-omni":
        omni.use_omni()
    return not api.why_not(feature)


def replaced(path, found):
    """Replace what code finds under a name of vLLM: by a value, or by an exception that is raised."""
    find, assigns = seam.find, seam._assigns

    def find_other(asked):
        if isinstance(found, Exception) and f"{asked}.".startswith(f"{path}."):
            raise found
        return found if asked == path else find(asked)

    patch = {"find": find_other, "_assigns": lambda kind, name: f"{kind}.{name}" != path and assigns(kind, name)}
    return mock.patch.multiple(seam, **patch)


def without_parameter(path, name):
    """Return the signature of a function of vLLM without a parameter that we use."""
    signature = inspect.signature(seam.find(path))
    return signature.replace(parameters=[each for each in signature.parameters.values() if each.name != name])


def test_the_installed_release_has_what_the_tables_name():
    off = {feature: api.why_not(feature) for feature in api.NAMES if not is_served(feature)}
    assert set(off) <= {"offload"}, off


# The scheduler of an engine, whose tokens depend on every block.

PROMPTS = [list(range(3, 90)), [*range(3, 60), *range(500, 540)], list(range(3, 90)), list(range(200, 330))] * 2
OPTIONS = {"num_blocks": 14, "policy": "lru", "reuse": "prefix", "more": {"pc_chunk": 32}}


def answers(**options):
    """Return an engine's scheduler, its answers to prompts that share blocks and evict, and its blocks."""
    engine, tables = ExactEngine(**OPTIONS | options), []
    for number, prompt in enumerate(PROMPTS):
        engine.add(f"r{number}", prompt, pc_explain=True)
        if number % 2:
            engine.run()
            tables.append(dict(engine.tables))
    return engine.scheduler, (engine.said, tables, dict(engine.computed))


@functools.cache
def stock_answers():
    scheduler, found = answers(stock=True)
    assert type(scheduler).__module__ == "vllm.v1.core.sched.scheduler"
    said, _, computed = found
    assert [said[f"r{number}"] for number in range(len(PROMPTS))] == [following(each, 4) for each in PROMPTS]
    assert sum(computed.values()) < sum(map(len, PROMPTS))  # there are hits
    return found


def parts_of(scheduler):
    """Return which parts of the eviction feature a scheduler has."""
    if not hasattr(scheduler, "jumps"):
        return []
    jumps = scheduler.jumps
    found = {
        "eviction.gap": jumps is not None,
        "eviction.anywhere": jumps is not None and not jumps.cannot_move,
        "eviction.explain": scheduler._misses is not None,
    }
    return ["eviction", *(name for name, there in found.items() if there)]


def test_all_parts_are_on_where_nothing_is_wrong(warnings):
    scheduler, found = answers(more={})
    assert parts_of(scheduler) == ["eviction", "eviction.gap", "eviction.anywhere", "eviction.explain"]
    assert found == stock_answers()
    scheduler, _ = answers()
    assert scheduler.chunks.chunk == 32
    assert not warnings


def check_off(off, reason, warnings):
    """Check that these features are off and all others on, that requests get vLLM's answers, and the log."""
    off |= {part for part in PARTS if off & set(api.SHARED[part])}
    if "eviction" in off:
        off = {"eviction", *PARTS}
    elif "eviction.gap" in off:
        off = {*off, "eviction.anywhere"}
    for asynchronous in (False, True):
        scheduler, found = answers(asynchronous=asynchronous, more={"pc_chunk": 32} if "eviction.chunks" in off else {})
        on = {"eviction", *PARTS} - {"eviction.chunks"} - off
        assert set(parts_of(scheduler)) == on
        assert getattr(scheduler, "chunks", None) is None
        if "eviction" in off:
            assert type(scheduler).__module__.startswith("vllm.")
            assert type(scheduler.kv_cache_manager.block_pool).__module__ == "vllm.v1.core.block_pool"
        assert found[0] == stock_answers()[0]
        if not asynchronous:
            assert found == stock_answers()
    lines = [line for line in warnings if " is off, and vLLM's own code runs in its place: " in line]
    assert lines
    assert len(set(lines)) == len(lines)
    assert all(reason in line and line.partition(" ")[0] in off for line in lines)


PATHS = sorted({name.path for _, name in EVICTION})


@pytest.mark.parametrize("path", PATHS)
def test_without_a_name_vllms_own_scheduler_serves(path, warnings):
    with replaced(path, AttributeError()):
        check_off({feature for feature, name in EVICTION if f"{name.path}.".startswith(f"{path}.")}, path, warnings)


CALLED = sorted({name.path for _, name in EVICTION if name.parameters})


@pytest.mark.parametrize("path", CALLED)
def test_with_another_signature_vllms_own_scheduler_serves(path, warnings):
    users = {feature: name for feature, name in EVICTION if name.path == path and name.parameters}
    first = next(iter(users.values())).parameters[0]
    off = {feature for feature, name in users.items() if first in name.parameters}
    with replaced(path, mock.Mock(__signature__=without_parameter(path, first))):
        check_off(off, f"{path}: has no {first}", warnings)


BODIES = [(feature, path) for feature, table in api.BODIES.items() for path in table]


def with_another_line(path):
    """Change a body of vLLM by a line that does nothing. For a class, only the source that we read changes."""
    found, source = seam.find(path), inspect.getsource
    if inspect.isclass(found):
        read = lambda code: source(code) + ("\n    changed = True\n" if code is found else "")  # noqa: E731
        return mock.patch.object(inspect, "getsource", read)
    function = getattr(found, "__func__", found)
    tree = ast.parse(textwrap.dedent(source(function)))
    tree.body[0].body.insert(0, ast.parse("changed = True").body[0])
    text, file, made = ast.unparse(tree), f"<changed {path}>", {}
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), function.__globals__, made)
    holder, _, name = path.rpartition(".")
    return mock.patch.object(seam.find(holder), name, made[name])


OMNI = [(feature, path) for feature, path in BODIES if feature == "omni"]
BODIES = [body for body in BODIES if body not in OMNI]


@pytest.mark.parametrize(("feature", "path"), OMNI)
def test_another_vllm_omni_is_refused_by_name(feature, path):
    omni.use_omni()
    read, found = inspect.getsource, seam.find(path)
    code = found if inspect.isclass(found) else found.__code__
    seam._digest.cache_clear()
    with mock.patch.object(inspect, "getsource", lambda of: read(of) + "    more = 1\n" * (of is code)):
        assert f"{path}: its body is not the one of 0.30 (digest " in api.why_not(feature)
    seam._digest.cache_clear()
    assert api.why_not(feature) == ""


@pytest.mark.parametrize(("feature", "path"), BODIES)
def test_a_body_that_was_changed_by_a_line_is_refused(feature, path, warnings):
    stock_answers()
    seam._digest.cache_clear()
    with with_another_line(path):
        check_off({feature}, f"{path}: its body is not the one of 0.32, 0.33 (digest ", warnings)
    seam._digest.cache_clear()


@pytest.mark.parametrize(
    ("feature", "at", "attribute"),
    [
        (feature, at, attribute)
        for feature, table in api.ATTRIBUTES.items()
        if feature.startswith("eviction")
        for at, attributes in table.items()
        if at.startswith("scheduler")
        for attribute in attributes.split()
    ],
)
def test_an_attribute_that_the_engine_does_not_make(monkeypatch, feature, at, attribute, warnings):
    table = api.ATTRIBUTES[feature]
    monkeypatch.setitem(table, at, table[at].replace(attribute, "renamed"))
    check_off({feature}, f"{at}: has no ", warnings)


def test_an_attribute_that_is_gone_from_the_object(monkeypatch, warnings):
    """The class still declares the attribute, but the object lost it after vLLM had made it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.__init__

    @functools.wraps(make)
    def make_without(self, *args, **kwargs):
        make(self, *args, **kwargs)
        del self.aux_output_connector

    with mock.patch.object(Scheduler, "__init__", make_without):
        engine = ExactEngine(**OPTIONS | {"more": {}})
        assert parts_of(engine.scheduler) == ["eviction"]
    assert warnings == [line for line in warnings if "eviction.gap is off" in line and "aux_output_connector" in line]
    assert len(warnings) == 1


# Features are enabled.


@pytest.mark.parametrize("feature", list(features.FEATURES))
def test_the_environment_names_a_feature_that_cannot_be_served(monkeypatch, feature, warnings):
    """The engine runs on, nothing in vLLM is changed, and the log says why, once."""
    if feature == "omni":
        omni.use_omni()
    done = []
    monkeypatch.setitem(features.FEATURES, feature, lambda: done.append(1))
    monkeypatch.setattr(api, "call_after_configuration", lambda complete: done.append(2))
    monkeypatch.setenv("PC_VLLM", feature)
    for name in list(seam.names(api.NAMES[feature]))[:3]:
        before = set(features.NEEDS.get(feature, ()))
        monkeypatch.setattr(features, "_enabled", set(before))
        done.clear()
        warnings.clear()
        with replaced(name.path, AttributeError()):
            adapter.register()
            adapter.register()
            assert (done, features._enabled) == ([], before)
            (line,) = warnings
            assert line.startswith(f"{feature} is off, and vLLM's own code runs in its place: ")
            assert name.path in line
            with pytest.raises(adapter.UnsupportedVersionError, match="not there"):
                adapter.enable(feature, fallback="raise")
        adapter.register()
        assert done == [1, 2]


def test_an_unknown_fallback():
    with pytest.raises(ValueError, match="fallback: got 'ignore', needs 'warn' or 'raise'"):
        adapter.enable("attention", fallback="ignore")


def test_one_feature_that_is_off_leaves_others_on(monkeypatch, warnings):
    done = []
    for feature in ("attention", "eviction"):
        monkeypatch.setitem(features.FEATURES, feature, functools.partial(done.append, feature))
    monkeypatch.setattr(features, "_enabled", set())
    monkeypatch.setattr(api, "call_after_configuration", lambda complete: None)
    with replaced("vllm.v1.core.block_pool:BlockPool.touch", AttributeError()):
        adapter.enable("attention", "eviction")
        assert done == ["attention"]
        assert len(warnings) == 1
        with pytest.raises(adapter.UnsupportedVersionError):
            adapter.enable("attention", "eviction", fallback="raise")
        assert done == ["attention"]


@pytest.mark.parametrize("part", [name for name in api.NAMES if "." in name])
def test_a_part_needs_its_feature(part):
    whole = part.partition(".")[0]
    with replaced(next(seam.names(api.NAMES[whole])).path, AttributeError()):
        assert f"({whole}; written for" in api.why_not(part)


def test_names_by_platform_are_in_the_tables():
    named = {name.path for _, name in NAMES}
    for alias, paths in api.BY_PLATFORM.items():
        assert any(f"{each}.".startswith(f"{path}.") for each in named for path in paths), alias


def test_a_missing_class_can_be_imported(monkeypatch):
    monkeypatch.delitem(vars(api), "KVCacheBlocks", raising=False)
    with replaced(api.PATHS["KVCacheBlocks"], AttributeError()):
        from pc.integrations.vllm.api import KVCacheBlocks

        assert KVCacheBlocks.__doc__ == "KVCacheBlocks, which the installed framework lacks."
    assert api.KVCacheBlocks is seam.find(api.PATHS["KVCacheBlocks"])
    with pytest.raises(AttributeError, match="has no attribute 'NothingLikeIt'"):
        _ = api.NothingLikeIt
