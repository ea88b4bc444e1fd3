"""From a typed signature to an attention operator, its twin with the log-sum-exp, and what it launches.

A launch finds memory for results and fills in addresses; `choose.py` has chosen all else.
"""

from __future__ import annotations

import functools
import inspect
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
from .choose import Chosen, Results, SplitLaunch, Wanted, choose_attention
from .lists import ChosenLists, choose_lists
from .plan import cached_with, launch_plan

P = ParamSpec("P")
Result = tuple[torch.Tensor, torch.Tensor]
AttentionLaunch = Callable[[tuple[Any, ...]], Result]
Choose = Callable[..., Callable[..., Any]]

_SINKS = TENSOR_NAMES.index("sinks")
_LSE = """and lse `[num_tokens, num_heads]` float32: the natural logarithm of the softmax's denominator, sinks included;
    -inf for a row with nothing to attend to."""


def choose_operator(names: tuple[str, ...], with_lse: bool, *values: Any) -> Callable[..., Any]:
    """What runs an operator's call of parameters `names`, and all that differ from it in addresses and values only."""
    call = kind_of(names).of(names, values, {})
    check_attention(call)
    given = [LATENT_NAMES.get(name, name) if call.is_latent else name for name in TENSOR_NAMES]
    # Behind the arguments there is None, for tensors that the operator does not take.
    places = [names.index(name) if name in names else len(names) for name in given]
    return functools.partial(_run, choose_launch(call, with_lse), itemgetter(*places), with_lse)


def _run(
    launch: AttentionLaunch, tensors_of: Callable[[tuple[Any, ...]], tuple[Any, ...]], with_lse: bool, *values: Any
) -> Any:
    results = launch(tensors_of((*values, None)))
    return results if with_lse else results[0]


def choose_launch(
    call: AttentionCall, with_lse: bool = True, out_dtype: torch.dtype | None = None, tiled: bool = False
) -> AttentionLaunch:
    """What runs a call that passed its checks, and all of its kind, on their TENSORS; the lse is empty if not wanted.

    out_dtype None: like query. `tiled`: even few queries are tiled, not decoded from the work list.
    """
    require_triton("attention")
    if 0 in call.query.shape[:2] or 0 in call.block_tables.shape:
        return functools.partial(_give_empty, Results.of(call, with_lse, out_dtype))
    wanted = Wanted.of(call, with_lse)
    if call.query_blocks is not None:
        return functools.partial(_launch_lists, choose_lists(wanted))
    return functools.partial(_launch, choose_attention(wanted, out_dtype, tiled))


def _arguments(tensors: tuple[Any, ...], out: torch.Tensor, convert_codes: bool) -> tuple[Any, ...]:
    """What a kernel takes before and behind its results; others stand for tensors that are not given, never read."""
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
    """A launch each for decodes and prefills, and one that sums their splits."""
    query, _, _, tables, seq_lens, starts, positions, plan, *_ = tensors
    results, nothing = chosen.results, chosen.nothing
    # Of a contiguous tensor, half the time of `new_empty`.
    out = torch.empty_like(query) if results.like_query else query.new_empty(results.shape, dtype=results.dtype)
    lse = query.new_empty(results.shape[:2], dtype=torch.float32) if results.with_lse else nothing
    if plan is None:
        plan = torch.empty(chosen.shape.size, dtype=torch.int32, device=query.device)
        launch_plan(
            plan, tables, seq_lens, starts, positions, chosen.block_size, chosen.options, chosen.target_items
        )  # fmt: skip
    stream = None if query.is_cpu else current_stream()
    before, behind = _arguments(tensors, out, chosen.convert_codes)
    no_parts = (nothing, nothing)
    decoded = tiled = None
    if (split := chosen.decode) is not None:
        if split.split_rows:
            decoded = _parts(plan, "decode", stream, split, results.shape[2])
        split.launch((*before, out, lse, *(decoded or no_parts), *behind, plan), stream)
    if (split := chosen.prefill) is not None:
        if split.split_rows:
            tiled = _parts(plan, "prefill", stream, split, results.shape[2])
        split.launch((*before, out, lse, *(tiled or no_parts), *behind, plan), stream)
    if parts := decoded or tiled:
        chosen.merge((out, lse, *parts, *(tiled or parts), starts, plan, tensors[_SINKS]), stream)
    return out, lse


def _launch_lists(chosen: ChosenLists, tensors: tuple[Any, ...]) -> Result:
    """Unites lists, attends, and sums splits."""
    query, lists, starts, sinks = tensors[0], tensors[-1], tensors[5], tensors[_SINKS]
    unite, attend, merge = chosen.unite, chosen.attend, chosen.merge
    tiles, device, rows, value_dim = unite.programs[:2], query.device, query.shape[:2], chosen.value_dim
    out = query.new_empty((*rows, value_dim))
    lse = query.new_empty(rows if chosen.with_lse else 0, dtype=torch.float32)
    marks = torch.empty((*tiles, chosen.stride_marks), dtype=torch.uint8, device=device)
    union = torch.empty((*tiles, chosen.max_union, 2), dtype=torch.int32, device=device)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    stream = None if query.is_cpu else current_stream()
    before, behind = _arguments(tensors, out, chosen.convert_codes)
    unite((lists, marks, union, counts, *behind[:4]), stream)
    splits = chosen.num_splits if merge is not None else 0
    parts = torch.empty((splits, *rows, value_dim), dtype=torch.float32, device=device)
    parts_lse = torch.empty((splits, *rows), dtype=torch.float32, device=device)
    attend((*before, out, lse, parts, parts_lse, *behind, union, counts), stream)
    if merge is not None:
        merge((out, lse, parts, parts_lse, parts, parts_lse, starts, starts, sinks), stream)
    return out, lse


def _parts(plan: torch.Tensor, name: str, stream: int | None, split: SplitLaunch, value_dim: int) -> Result:
    """Partial results and their lse, which nothing reads after the call: cached with the plan for the next layer's."""
    # Layers on another stream may run at the same time. Others stay, whose addresses a captured graph may hold.
    parts = cached_with(plan).parts
    kind = (name, stream, split.split_rows, split.split_heads, value_dim)
    found = parts.get(kind)
    if found is None:
        rows = (split.split_rows, split.split_heads)
        found = parts[kind] = (
            torch.empty(*rows, value_dim, dtype=torch.float32, device=plan.device),
            torch.empty(rows, dtype=torch.float32, device=plan.device),
        )
    return found


def _give_empty(results: Results, tensors: tuple[Any, ...]) -> Result:
    """No sequence or no block table: every row is 0. Sinks alone decide, and only rows of a sequence have them."""
    query, starts, sinks = tensors[0], tensors[5], tensors[_SINKS]
    out = query.new_zeros(results.shape, dtype=results.dtype)
    lse = query.new_full(results.shape[:2] if results.with_lse else (0,), float("-inf"), dtype=torch.float32)
    if lse.numel() and sinks is not None:
        rows = torch.arange(out.shape[0], device=out.device) < starts[-1]
        lse.copy_(torch.where(rows[:, None], sinks.float()[None], lse))
    return out, lse


def attention_operator(
    choose: Choose = choose_operator, like: tuple[Callable[..., torch.Tensor], ...] = ()
) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Makes `torch.ops.pc.<name>` and the public function of a function whose body gives an empty result."""

    def decorate(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def fake(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            check_attention(kind_of(names).of(names, args, kwargs))
            return function(*args, **kwargs)

        launch = _cached_op(function, choose, False)
        make = operator(cpu=lambda call: attention_cpu(call)[0], launch=launch, bind=kind_of(names).of, like=like)
        return make(fake)

    return decorate


def with_lse(function: Callable[P, torch.Tensor], choose: Choose = choose_operator) -> Callable[P, Result]:
    """The twin of an attention operator that also gives the log-sum-exp: `torch.ops.pc.<name>_with_lse`."""

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
    """Attention on CPU tensors in PyTorch."""
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
    """Checks a call whose values may be read: metadata, values, and that its plan was made for it."""
    check_attention(call)
    check_attention_values(call)
    if call.plan is not None:
        from .plan_cpu import check_plan

        check_plan(call, call.plan_options())
