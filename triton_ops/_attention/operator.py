"""From a typed signature to an attention operator and its twin with the log-sum-exp, checked on the way."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from .._library import operator
from .._repeated import Repeated
from .call import AttentionCall
from .check_values import check_attention_values
from .checks import check_attention
from .cpu import attend
from .launch import Result, prepare_attention
from .plan_cpu import check_plan

P = ParamSpec("P")
Prepare = Callable[..., Callable[..., Any]]

_LSE = """and lse `[num_tokens, num_heads]` float32: the natural logarithm of the softmax's denominator, sinks included;
    -inf for a row with nothing to attend to."""


def attention_operator(
    prepare: Prepare = prepare_attention, like: Callable[..., torch.Tensor] | None = None
) -> Callable[[Callable[P, torch.Tensor]], Callable[P, torch.Tensor]]:
    """Makes `torch.ops.pc.<name>` and the public function of a function whose body gives an empty result.

    Args:
        prepare: As `prepare_attention`.
        like: The operator whose docstring explains the parameters that the function's own does not.
    """

    def decorate(function: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        if like is not None:
            function.__doc__ = _with_arguments_of(function, like)
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def fake(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            check_attention(AttentionCall.of(names, args, kwargs))
            return function(*args, **kwargs)

        launch = _launch(function, prepare, False)
        return operator(cpu=lambda call: attention_cpu(call)[0], launch=launch, bind=AttentionCall.of)(fake)

    return decorate


def with_lse(function: Callable[P, torch.Tensor], prepare: Prepare = prepare_attention) -> Callable[P, Result]:
    """The twin of an attention operator that also gives the log-sum-exp: `torch.ops.pc.<name>_with_lse`.

    Args:
        function: What `attention_operator` made.
        prepare: As there.
    """

    def fake(*args: P.args, **kwargs: P.kwargs) -> Result:
        out: torch.Tensor = function.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        return out, out.new_empty(out.shape[:2], dtype=torch.float32)

    fake.__name__ = f"{function.__name__}_with_lse"
    fake.__qualname__, fake.__module__, fake.__doc__ = fake.__name__, function.__module__, _doc_with_lse(function)
    fake.__annotations__ = typing.get_type_hints(function) | {"return": Result}
    fake.__signature__ = inspect.signature(function).replace(return_annotation=Result)  # type: ignore[attr-defined]
    return operator(cpu=attention_cpu, launch=_launch(function, prepare, True), bind=AttentionCall.of)(fake)


def _sections(doc: str | None) -> dict[str, str]:
    """A docstring by the headings of its sections; the text above them under an empty one."""
    parts = re.split(r"\n\n(\w+):\n", inspect.cleandoc(doc or ""))
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def _joined(sections: dict[str, str]) -> str:
    return "\n\n".join(f"{heading}:\n{text}" if heading else text for heading, text in sections.items())


def _arguments(doc: str | None) -> dict[str, str]:
    """What a docstring says of each argument, its name included."""
    entries = re.split(r"\n(?=    \w)", _sections(doc).get("Args", ""))
    return {entry.strip().partition(":")[0]: entry for entry in entries if entry}


def _with_arguments_of(function: Callable[..., object], like: Callable[..., object]) -> str:
    known = _arguments(like.__doc__) | _arguments(function.__doc__)
    theirs = _sections(like.__doc__)
    own = _sections(function.__doc__)
    own["Args"] = "\n".join(known[name] for name in inspect.signature(function).parameters)
    order = ("", "Args", "Returns", "Raises", "Examples")
    return _joined({heading: own.get(heading, theirs[heading]) for heading in order})


def _doc_with_lse(function: Callable[..., object]) -> str:
    name, sections = function.__name__, _sections(function.__doc__)
    sections[""] = f"`{name}`, and the log-sum-exp of each row's scores for `merge_attention`."
    sections["Returns"] = f"    out as `{name}` gives it, {_LSE}"
    sections["Examples"] = re.sub(rf"\bout = pc\.{name}\(", f"out, lse = pc.{name}_with_lse(", sections["Examples"])
    return _joined(sections)


def attention_cpu(call: AttentionCall) -> Result:
    """Attention on CPU tensors in PyTorch."""
    check_call(call)
    return attend(call)


def _launch(function: Callable[..., object], prepare: Prepare, wants_lse: bool) -> Repeated[Any]:
    # Metadata are checked by `prepare`, once for calls that have the same.
    names = tuple(inspect.signature(function).parameters)
    return Repeated(
        functools.partial(prepare, names, wants_lse),
        lambda *values: check_call(AttentionCall.of(names, values, {})),
        like=function,
    )


def check_call(call: AttentionCall) -> None:
    """Checks a call whose values may be read: metadata, values, and that its plan was made for it.

    Raises:
        TypeError, ValueError, RuntimeError: As `check_attention`, `check_attention_values` and `check_plan` do.
    """
    check_attention(call)
    check_attention_values(call)
    if call.plan is not None:
        check_plan(call, call.plan_options())
