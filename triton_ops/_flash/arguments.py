"""The arguments of FlashAttention's functions, their checks, and calls whose errors use FlashAttention's names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from .._attention.arguments import NOT_NEGATIVE
from .._core.cache import current_device, launch_finder, may_cache_tensors
from .._core.checks import (
    FLOATS,
    INT32,
    bad_argument,
    check_integer,
    check_tensor,
    check_writable,
    debug_mode_enabled,
    describe,
    refuse_grad,
)
from .._core.launch import current_stream


class FlashArgs(NamedTuple):
    """The arguments of the three attention functions in `flash_attn.py`, under FlashAttention's names.

    Arguments that a function does not have keep their defaults.
    """

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    with_lse: bool
    attention_chunk: int
    context: tuple[Any, ...] | None
    """The result of `call_context`."""
    q: torch.Tensor
    k: Any = None
    v: Any = None
    k_cache: Any = None
    v_cache: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    cache_seqlens: torch.Tensor | None = None
    block_table: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_seqlens: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    scheduler_metadata: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    s_aux: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    qv: torch.Tensor | None = None
    out: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    cache_length: int | None = None
    rotary_interleaved: bool = True
    same_starts: bool = False
    only_checks: bool = False
    """Whether the operators only check their arguments and return empty results."""

    @property
    def query_scale(self) -> torch.Tensor | None:
        """q_descale, which counts only for a quantized q."""
        return self.q_descale if self.q.dtype == torch.float8_e4m3fn else None


Run = Callable[[FlashArgs], Any]


# For errors: FlashAttention's name for each parameter of the operators.
_NAMES = {
    "query": "q",
    "key_cache": "k",
    "value_cache": "v",
    "block_tables": "block_table",
    "query_start_loc": "cu_seqlens_q",
    "seq_lens": "cu_seqlens_k",
    "max_query_len": "max_seqlen_q",
    "max_seq_len": "max_seqlen_k",
    "sinks": "s_aux",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
    "plan": "scheduler_metadata",
}


def call_context(q: object) -> tuple[Any, ...] | None:
    """Return the state that a launch also depends on: debug mode, device, stream. None: no launch may be cached."""
    on_gpu = isinstance(q, torch.Tensor) and q.is_cuda
    if not may_cache_tensors(on_gpu):
        return None
    return (debug_mode_enabled(), current_device(), current_stream()) if on_gpu else (debug_mode_enabled(),)


def flash_launch(name: str, build: Callable[[FlashArgs], Run], names: dict[str, str]) -> Run:
    """Return a function that runs calls of one of FlashAttention's functions.

    Args:
        name: The function.
        build: Returns the launch for all calls of a kind. A launch that may not be cached is built for each call.
        names: From operators' parameters to the names that errors show, where they differ from `_NAMES`.
    """
    find, names = launch_finder(build), _NAMES | names

    def run(args: FlashArgs) -> Any:
        try:
            refuse_grad(name, args._fields, args)
            launch = build(args) if args.context is None else find(args)
            return launch(args)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            _refuse_others(args)
            shown = names if args.seqused_k is None else names | {"seq_lens": "seqused_k"}
            said = str(error)
            renamed = re.sub(r"\b\w+\b", lambda found: shown.get(found[0], found[0]), said)
            if renamed == said:
                raise
            raise type(error)(renamed) from None

    return run


# The fields of `FlashArgs` that hold tensors.
_TENSORS = FlashArgs._fields[FlashArgs._fields.index("q") : FlashArgs._fields.index("max_seqlen_q")]


def _refuse_others(args: FlashArgs) -> None:
    """Check that arguments that must be tensors are. Calls that succeed do not spend time on this."""
    for name in _TENSORS:
        value = getattr(args, name)
        layout = getattr(value, "layout", describe(value))
        if value is not None and layout not in (torch.strided, torch.jagged):
            raise bad_argument(name, layout, "a tensor, torch.strided", TypeError) from None


def options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int] | None,
    softcap: float,
    with_lse: bool,
    attention_chunk: int,
    dropout_p: float = 0.0,
) -> tuple[float | None, bool, tuple[int, int], float, bool, int]:
    """Return a call's options as plain numbers, which launches may keep: the first fields of `FlashArgs`."""
    if _number("dropout_p", dropout_p):
        raise bad_argument("dropout_p", dropout_p, "0, because only the forward pass is computed")
    attention_chunk = bound("attention_chunk", attention_chunk) or 0
    scale = None if softmax_scale is None else _number("softmax_scale", softmax_scale)
    if scale is not None and not -math.inf < scale < math.inf:
        raise bad_argument("softmax_scale", scale, "a finite number")
    cap = _number("softcap", softcap)
    if not 0 <= cap < math.inf:
        raise bad_argument("softcap", cap, NOT_NEGATIVE["softcap"])
    with_lse = with_lse is not None and flag("return_softmax_lse", with_lse)  # FlashAttention takes None for False
    return scale, flag("causal", causal), pair(window_size), cap, with_lse, attention_chunk


def flag(name: str, value: Any) -> bool:
    """Return an option as a bool, or raise an error that names it."""
    if type(value).__name__ not in ("bool", "bool_", "int", "SymBool"):  # numpy has both of the first
        raise bad_argument(name, repr(value), "a bool", TypeError)
    return bool(value)


def _number(name: str, value: Any) -> float:
    """Return an option as a float, or raise an error that names it."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise bad_argument(name, repr(value), "a number", TypeError) from None


def pair(window_size: Sequence[int] | None) -> tuple[int, int]:
    """Return a window's two sides, -1 for no bound."""
    if window_size is None or (type(window_size) is tuple and window_size == (-1, -1)):
        return -1, -1
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise bad_argument("window_size", repr(window_size), "two ints, left and right", TypeError) from None
    return max(-1, check_integer("window_size", left)), max(-1, check_integer("window_size", right))


def bound(name: str, value: Any) -> int | None:
    """Return an argument such as max_seqlen_q as a checked int, or None. A tensor's value is read from its device."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_floating_point()):
        raise bad_argument(name, describe(value), "an int", TypeError)
    number = int(value) if isinstance(value, torch.Tensor) else value
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        number = check_integer(name, number)
    if torch.compiler.is_compiling():  # a compiler does not know the value of a tensor
        torch._check(number >= 0)
        torch._check(number < 1 << 31)
    elif not 0 <= number < 1 << 31:
        raise bad_argument(name, number, "at least 0 and below 2**31")
    return cast(int, number)


def known(condition: bool) -> bool:
    """Return whether a condition on sizes holds; for a compiler, whether it holds for all sizes that a graph serves.

    A graph that is compiled for one outcome would have to be compiled again for the other.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, which takes time

    return bool(statically_known_true(condition))


def check_tensors(layouts: dict[str, tuple[Any, str]], args: FlashArgs) -> None:
    """Check ranks and devices, and the shapes of out and qv; the operators check the rest."""
    for name, (tensor, layout) in layouts.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            got = describe(tensor) if not isinstance(tensor, torch.Tensor) else "a nested tensor"
            raise bad_argument(name, got, f"a tensor {layout}", TypeError)
        if tensor.dim() != layout.count(",") + 1:
            raise bad_argument(name, f"shape {list(tensor.shape)}", layout)
        if 0 in tensor.shape[-2:]:
            raise bad_argument(name, f"shape {list(tensor.shape)}", "at least one head, of at least one feature")
        if tensor.device != args.q.device:
            raise bad_argument(name, f"device {tensor.device}", f"device {args.q.device} of q")
    tensors = {name: tensor for name, (tensor, _) in layouts.items()}
    q, value = tensors["q"], tensors["v" if "v_cache" not in tensors else "v_cache"]
    shape = (*q.shape[:-1], value.shape[-1])
    for name, tensor in (("out", args.out), ("qv", args.qv)):
        if tensor is not None and (tensor.shape != shape or tensor.device != q.device):
            raise bad_argument(name, describe(tensor), f"{list(shape)} on {q.device}")
    if args.out is not None:
        if args.out.dtype not in FLOATS:
            raise bad_argument("out", describe(args.out), "float16, bfloat16 or float32", TypeError)
        check_writable("out", args.out)


def check_partial(out_partial: Any, lse_partial: Any, out: Any, out_dtype: Any) -> None:
    """Check the arguments of `flash_attn_combine`."""
    given = {"out_partial": (out_partial, FLOATS), "lse_partial": (lse_partial, (torch.float32,)), "out": (out, FLOATS)}
    for name, (tensor, dtypes) in given.items():
        if not (name == "out" and tensor is None) and getattr(tensor, "dtype", None) not in dtypes:
            needs = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise bad_argument(name, describe(tensor), f"a tensor of {needs}", TypeError)
    if out_partial.dim() not in (4, 5) or not out_partial.shape[0]:
        raise bad_argument("out_partial", describe(out_partial), "[num_splits, batch, seqlen, num_heads, head_dim]")
    if lse_partial.shape != out_partial.shape[:-1] or lse_partial.device != out_partial.device:
        needs = f"{list(out_partial.shape[:-1])} on {out_partial.device}"
        raise bad_argument("lse_partial", describe(lse_partial), needs)
    if out is not None and (out.shape != out_partial.shape[1:] or out.device != out_partial.device):
        raise bad_argument("out", describe(out), f"{list(out_partial.shape[1:])} on {out_partial.device}")
    if out_dtype not in (None, *FLOATS):
        raise bad_argument("out_dtype", repr(out_dtype), "float16, bfloat16, float32 or None", TypeError)
    names = ("out_partial", "lse_partial", "out")
    refuse_grad("flash_attn_combine", names, (out_partial, lse_partial, out))


def check_starts(name: str, tensor: Any, device: torch.device) -> None:
    """Check an int32 tensor that says where each sequence begins, and where the last one ends."""
    check_tensor(name, tensor, "[batch + 1]", INT32, device)
    if not tensor.shape[0]:
        raise bad_argument(name, describe(tensor), "at least one element")


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x, copied if its last dimension is not contiguous."""
    # `Tensor.contiguous` returns an empty tensor as it is.
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return x with its tokens packed: `[num_tokens, num_heads, head_dim]`, the last dimension contiguous."""
    return contiguous(x).flatten(0, -3)


def shaped(found: Any, batched: tuple[int, int] | None, given_out: torch.Tensor | None) -> Any:
    """Return out or (out, lse) in FlashAttention's shapes: the batch first unless packed, lse with its heads first."""
    out, lse = found if type(found) is tuple else (found, None)
    if batched is not None:
        out = out.view(*batched, *out.shape[1:])
        lse = None if lse is None else lse.view(*batched, lse.shape[-1])
    if given_out is not None:
        out = given_out.copy_(out)
    return out if lse is None else (out, lse.transpose(-1, -2).contiguous())
