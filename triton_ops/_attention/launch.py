"""From a typed signature to an attention operator, its twin with the log-sum-exp, and what it launches.

A launch finds memory for results and fills in addresses; `choose.py` has chosen all else.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ParamSpec

import torch

from .._dispatch import CachedOp
from .._launch import current_stream
from .._library import doc_sections, joined_sections, operator
from .._quantize import as_codes, equal_scales
from .._triton import require_triton
from .call import LATENT_NAMES, TENSOR_NAMES, AttentionCall, kind_of
from .checks import check_attention, check_attention_values
from .choose import Chosen, NewResults, PartsShape, Result, choose_attention, choose_results
from .lists import ChosenLists, choose_lists
from .plan import cached_with, launch_plan

P = ParamSpec("P")
AttentionLaunch = Callable[[tuple[Any, ...]], Result]
Choose = Callable[..., Callable[..., Any]]

_SINKS = TENSOR_NAMES.index("sinks")
# Weights against it are 0 for every score, and so is its own beside one.
_LEAST_SINK = -1e30
_LSE = """and lse `[num_tokens, num_heads]` float32: the natural logarithm of the softmax's denominator, sinks included;
    -inf for a row with nothing to attend to."""


def choose_operator(names: tuple[str, ...], with_lse: bool, *values: Any) -> Callable[..., Any]:
    """Return what runs an operator's call with parameters `names`, and all calls with the same metadata."""
    call = kind_of(names).of(names, values, {"with_lse": with_lse})
    check_attention(call)
    given = [LATENT_NAMES.get(name, name) if call.is_latent else name for name in TENSOR_NAMES]
    # Behind the arguments there is None, for tensors that the operator does not take.
    places = [names.index(name) if name in names else len(names) for name in given]
    return functools.partial(_run, choose_launch(call), itemgetter(*places), with_lse)


def _run(
    launch: AttentionLaunch, tensors_of: Callable[[tuple[Any, ...]], tuple[Any, ...]], with_lse: bool, *values: Any
) -> Any:
    results = launch(tensors_of((*values, None)))
    return results if with_lse else results[0]


def choose_launch(call: AttentionCall, out_dtype: torch.dtype | None = None, tiled: bool = False) -> AttentionLaunch:
    """Return what runs a checked call, and all calls of its kind, on their TENSORS.

    The lse is empty if the call does not want it. out_dtype None: like query. `tiled`: even few queries are tiled, not
    decoded from the work list.
    """
    require_triton("attention")
    if 0 in call.query.shape[:2] or 0 in call.block_tables.shape:
        return functools.partial(_give_empty, choose_results(call, out_dtype))
    if call.query_blocks is not None:
        run = functools.partial(_launch_lists, choose_lists(call))
    else:
        run = functools.partial(_launch, choose_attention(call, out_dtype, tiled))
    return run if call.sinks is None else functools.partial(_with_sinks, run)


def _with_sinks(run: AttentionLaunch, tensors: tuple[Any, ...]) -> Result:
    """Run a call with sinks of -inf replaced: kernels give NaN for them in a row without keys."""
    sinks = tensors[_SINKS].float().clamp(min=_LEAST_SINK)
    out, lse = run((*tensors[:_SINKS], sinks, *tensors[_SINKS + 1 :]))
    return out, lse.masked_fill_(lse <= _LEAST_SINK / 2, -math.inf) if lse.numel() else lse


def _arguments(tensors: tuple[Any, ...], out: torch.Tensor, convert_codes: bool) -> tuple[Any, ...]:
    """Return a kernel's arguments before and behind its results; dummies replace absent tensors and are never read."""
    query, key_cache, value_cache, tables, seq_lens, starts, positions, _, *others = tensors
    alibi, sinks, k_scale, v_scale, tree, _ = others
    if convert_codes:
        key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
    if k_scale is not None:
        k_scale, v_scale = equal_scales(k_scale, v_scale, key_cache.shape[2])
    positions, tree = (seq_lens if positions is None else positions), (seq_lens if tree is None else tree)
    alibi, sinks = (out if alibi is None else alibi), (out if sinks is None else sinks)
    k_scale, v_scale = (out if k_scale is None else k_scale), (out if v_scale is None else v_scale)
    return (query, key_cache, value_cache), (tables, seq_lens, starts, positions, alibi, sinks, k_scale, v_scale, tree)


def _launch(chosen: Chosen, tensors: tuple[Any, ...]) -> Result:
    """Launch the kernels for decodes and for prefills, and the one that sums their splits."""
    query, _, _, tables, seq_lens, starts, positions, plan, *_ = tensors
    out, lse = chosen.new_results(query)
    if plan is None:
        plan = torch.empty(chosen.shape.size, dtype=torch.int32, device=query.device)
        launch_plan(
            plan, tables, seq_lens, starts, positions, chosen.block_size, chosen.options, chosen.target_items
        )  # fmt: skip
    stream = None if query.is_cpu else current_stream()
    before, behind = _arguments(tensors, out, chosen.convert_codes)
    no_parts = (chosen.nothing, chosen.nothing)
    decoded = tiled = None
    if chosen.decode is not None:
        if chosen.decode_parts is not None:
            decoded = _parts(plan, "decode", stream, chosen.decode_parts)
        chosen.decode((*before, out, lse, *(decoded or no_parts), *behind, plan), stream)
    if chosen.prefill is not None:
        if chosen.prefill_parts is not None:
            tiled = _parts(plan, "prefill", stream, chosen.prefill_parts)
        chosen.prefill((*before, out, lse, *(tiled or no_parts), *behind, plan), stream)
    if parts := decoded or tiled:
        chosen.merge((out, lse, *parts, *(tiled or parts), starts, plan, tensors[_SINKS]), stream)
    return out, lse


def _launch_lists(chosen: ChosenLists, tensors: tuple[Any, ...]) -> Result:
    """Unite the lists, attend, and sum the splits."""
    query, _, _, _, _, starts, *_, lists = tensors
    unite, attend, merge = chosen.unite, chosen.attend, chosen.merge
    tiles, device = unite.programs[:2], query.device
    out, lse = chosen.new_results(query)
    marks = torch.empty((*tiles, chosen.stride_marks), dtype=torch.uint8, device=device)
    union = torch.empty((*tiles, chosen.max_union, 2), dtype=torch.int32, device=device)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    stream = None if query.is_cpu else current_stream()
    before, behind = _arguments(tensors, out, chosen.convert_codes)
    unite((lists, marks, union, counts, *behind[:4]), stream)
    splits = 0 if merge is None else attend.programs[2]
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=device)
    parts_lse = torch.empty((splits, *out.shape[:2]), dtype=torch.float32, device=device)
    attend((*before, out, lse, parts, parts_lse, *behind, union, counts), stream)
    if merge is not None:
        merge((out, lse, parts, parts_lse, parts, parts_lse, starts, starts, tensors[_SINKS]), stream)
    return out, lse


def _parts(plan: torch.Tensor, name: str, stream: int | None, shape: PartsShape) -> Result:
    """Return memory for partial results and their lse, cached with the plan: the next layer overwrites it."""
    # Layers on another stream may run at the same time. Others stay, whose addresses a captured graph may hold.
    parts, kind = cached_with(plan).parts, (name, stream, shape)
    found = parts.get(kind)
    if found is None:
        found = parts[kind] = (
            torch.empty(shape, dtype=torch.float32, device=plan.device),
            torch.empty(shape[:2], dtype=torch.float32, device=plan.device),
        )
    return found


def _give_empty(new_results: NewResults, tensors: tuple[Any, ...]) -> Result:
    """Return results without keys: out is 0, and the lse is the sink in rows of a sequence, -inf elsewhere."""
    query, _, _, _, _, starts, *_ = tensors
    out, lse = new_results(query)
    out.zero_()
    if lse.numel():
        lse.fill_(float("-inf"))
        if (sinks := tensors[_SINKS]) is not None:
            rows = torch.arange(out.shape[0], device=out.device) < starts[-1]
            lse.copy_(torch.where(rows[:, None], sinks.float()[None], lse))
    return out, lse


def attention_operator(
    choose: Choose = choose_operator, docs_from: tuple[Callable[..., torch.Tensor], ...] = ()
) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Make `torch.ops.pc.<name>` and the public function of a function whose body gives an empty result."""

    def decorate(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def fake(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            check_attention(kind_of(names).of(names, args, kwargs))
            return function(*args, **kwargs)

        launch = _cached_op(function, choose, False)
        make = operator(
            cpu=lambda call: attention_cpu(call)[0], launch=launch, bind=kind_of(names).of, docs_from=docs_from
        )
        return make(fake)

    return decorate


def with_lse(function: Callable[P, torch.Tensor], choose: Choose = choose_operator) -> Callable[P, Result]:
    """Return the twin of an attention operator that also gives the log-sum-exp: `torch.ops.pc.<name>_with_lse`."""

    def fake(*args: P.args, **kwargs: P.kwargs) -> Result:
        out: torch.Tensor = function.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        return out, out.new_empty(out.shape[:2], dtype=torch.float32)

    fake.__name__ = f"{function.__name__}_with_lse"
    fake.__qualname__, fake.__module__, fake.__doc__ = fake.__name__, function.__module__, _doc_with_lse(function)
    fake.__annotations__ = typing.get_type_hints(function) | {"return": Result}
    fake.__signature__ = inspect.signature(function).replace(return_annotation=Result)  # type: ignore[attr-defined]
    kind = kind_of(tuple(inspect.signature(function).parameters))
    return operator(cpu=attention_cpu, launch=_cached_op(function, choose, True), bind=kind.of)(fake)


def _doc_with_lse(function: Callable[..., object]) -> str:
    name, sections = function.__name__, doc_sections(function.__doc__)
    sections[""] = f"`{name}`, and the log-sum-exp of each row's scores for `merge_attention`."
    sections["Returns"] = f"    out as `{name}` gives it, {_LSE}"
    sections["Examples"] = re.sub(rf"\bout = pc\.{name}\(", f"out, lse = pc.{name}_with_lse(", sections["Examples"])
    return joined_sections(sections)


def attention_cpu(call: AttentionCall) -> Result:
    """Attend in PyTorch on CPU tensors."""
    from .cpu import attend  # with numpy, which kernels do without

    check_call(call)
    return attend(call)


def _cached_op(function: Callable[..., object], choose: Choose, wants_lse: bool) -> CachedOp[Any]:
    # Metadata are checked by `choose`, once for calls that have the same.
    names = tuple(inspect.signature(function).parameters)
    return CachedOp(
        functools.partial(choose, names, wants_lse),
        lambda *values: check_call(kind_of(names).of(names, values, {})),
        signature_of=function,
    )


def check_call(call: AttentionCall) -> None:
    """Check a call whose values may be read: metadata, values, and that its plan was made for it."""
    check_attention(call)
    check_attention_values(call)
    if call.plan is not None:
        from .plan_cpu import check_plan

        check_plan(call, call.plan_options())
