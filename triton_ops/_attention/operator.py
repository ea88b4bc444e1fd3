"""Attention operators: registration from a typed signature, the twin with the log-sum-exp, and the CPU path."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .._core.operator import doc_sections, joined_sections, operator
from .arguments import AttentionArgs, Result, binding
from .build import build_attention
from .checks import check_attention, check_attention_values

P = ParamSpec("P")
R = TypeVar("R")
Build = Callable[[AttentionArgs], Callable[[AttentionArgs], Any]]

_LSE = """and lse `[num_tokens, num_heads]` float32. lse is the natural logarithm of the
    softmax's denominator, sinks included. It is -inf for padding, and for a row with neither a key nor a sink."""


def attention_operator(
    build: Build = build_attention, docs_from: tuple[Callable[..., torch.Tensor], ...] = (), gives_lse: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.pc.<name>`, and return its public function.

    The decorated function is the fake: it returns an empty tensor of the result's shape, and with `gives_lse` a second
    one for the log-sum-exp. `build` returns the launch for calls of a kind. Metadata are checked when a launch is
    built, so only once for calls of a kind. The docstrings of `docs_from` complete the function's own.
    """
    return operator(
        arguments=functools.partial(binding, with_lse=gives_lse),
        check=check_attention,
        run=attention_cpu if gives_lse else lambda args: attention_cpu(args)[0],
        build=build,
        check_values=check_attention_values,
        docs_from=docs_from,
    )


def with_lse(function: Callable[P, torch.Tensor], build: Build = build_attention) -> Callable[P, Result]:
    """Return the twin of an attention operator that also gives the log-sum-exp: `torch.ops.pc.<name>_with_lse`."""

    def fake(*args: P.args, **kwargs: P.kwargs) -> Result:
        out: torch.Tensor = function.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        return out, out.new_empty(out.shape[:2], dtype=torch.float32)

    fake.__name__ = f"{function.__name__}_with_lse"
    fake.__qualname__, fake.__module__, fake.__doc__ = fake.__name__, function.__module__, _doc_with_lse(function)
    fake.__annotations__ = typing.get_type_hints(function) | {"return": Result}
    fake.__signature__ = inspect.signature(function).replace(return_annotation=Result)  # type: ignore[attr-defined]
    return attention_operator(build, gives_lse=True)(fake)


def _doc_with_lse(function: Callable[..., object]) -> str:
    """Return the docstring of an operator's twin, made from the operator's own."""
    name, sections = function.__name__, doc_sections(function.__doc__)
    sections[""] = f"`{name}`, and the log-sum-exp of each row's scores for `merge_attention`."
    sections["Returns"] = f"    out, as `{name}` returns it, {_LSE}"
    examples = sections.get("Examples", "")  # python -OO removes docstrings
    sections["Examples"] = re.sub(rf"\bout = pc\.{name}\(", f"out, lse = pc.{name}_with_lse(", examples)
    return joined_sections(sections)


def attention_cpu(args: AttentionArgs) -> Result:
    """Attend in PyTorch on CPU tensors, with arguments that passed `check_attention`."""
    from .cpu import attend  # it imports numpy, which kernels do not need

    check_attention_values(args)
    return attend(args.with_rows())
