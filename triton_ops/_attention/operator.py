"""From the arguments of an attention operator to its reference or its kernels, checked on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._debug import reads_values
from .._library import define
from .call import AttentionCall
from .checks import check_attention, check_attention_values
from .launch import launch_attention
from .plan import check_plan
from .prepare import plan_options
from .reference import attend

_TENSORS = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, "
)
_OPTIONS = (
    "bool causal=True, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, SymInt? max_query_len=None, SymInt? max_seq_len=None, Tensor? plan=None, "
    "bool batch_invariant=False"
)

Result = tuple[torch.Tensor, torch.Tensor]


def define_attention(
    name: str, arguments: str, launch: Callable[[AttentionCall, bool], Result] = launch_attention
) -> tuple[Callable[..., torch.Tensor], Callable[..., Result]]:
    """Registers `torch.ops.pc.<name>` and `torch.ops.pc.<name>_with_lse`.

    Args:
        name: Operator name without its namespace.
        arguments: Schema of what comes between the tensors that every attention operator begins with and the options
            that it ends with; names as in `AttentionCall`.
        launch: Runs the kernels of a call, given whether the lse is wanted.

    Returns:
        The references of both, which take the operators' arguments.
    """
    schema = f"{_TENSORS}{arguments}, {_OPTIONS}"
    names = [argument.split()[-1].partition("=")[0] for argument in schema.split(", ")]

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
        return AttentionCall(**dict(zip(names, args, strict=False)), **kwargs)

    def reference_with_lse(*args: Any, **kwargs: Any) -> Result:
        call = bind(args, kwargs)
        check_call(call)
        return attend(call)

    def reference(*args: Any, **kwargs: Any) -> torch.Tensor:
        return reference_with_lse(*args, **kwargs)[0]

    def kernels_with_lse(*args: Any, **kwargs: Any) -> Result:
        return _launch_checked(launch, bind(args, kwargs), True)

    def kernels(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _launch_checked(launch, bind(args, kwargs), False)[0]

    def fake_with_lse(*args: Any, **kwargs: Any) -> Result:
        call = bind(args, kwargs)
        check_attention(call)
        query = call.query
        return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)

    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        return fake_with_lse(*args, **kwargs)[0]

    reference.__doc__ = f"What `pc.{name}` computes, in PyTorch on CPU tensors."
    reference_with_lse.__doc__ = f"What `pc.{name}_with_lse` computes, in PyTorch on CPU tensors."
    define(name, f"({schema}) -> Tensor", reference=reference, launcher=kernels, fake=fake)
    define(
        f"{name}_with_lse",
        f"({schema}) -> (Tensor, Tensor)",
        reference=reference_with_lse,
        launcher=kernels_with_lse,
        fake=fake_with_lse,
    )
    return reference, reference_with_lse


def _launch_checked(launch: Callable[[AttentionCall, bool], Result], call: AttentionCall, with_lse: bool) -> Result:
    # Metadata is checked by the launch, once for calls that have the same.
    if reads_values(call.query):
        check_call(call)
    return launch(call, with_lse)


def check_call(call: AttentionCall) -> None:
    """Checks a call whose values may be read: metadata, values, and that its plan was made for it.

    Raises:
        TypeError, ValueError, RuntimeError: As `check_attention`, `check_attention_values` and `check_plan` do.
    """
    check_attention(call)
    check_attention_values(call)
    if call.plan is not None:
        options = plan_options(
            call.causal,
            call.window,
            call.num_sink_tokens,
            call.query_positions is not None,
            call.batch_invariant,
            call.key_begin,
        )
        check_plan(call, options)
