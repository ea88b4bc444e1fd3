"""Properties of a model that several files need, such as its rotary embeddings, and tokens to probe it with."""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .api import CACHING, has_own_generate, keeps_dynamic_cache, need
from .calls import UnsupportedError, refuse_if

CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change their buffers with the input length. `rope_keys` returns extra keys for them."""

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types of tensors that hold nothing but their elements."""


def is_quantized_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that holds its elements, such as bitsandbytes' weights.

    Torch's own subclasses are not: FSDP's `FlatParameter` has attributes whose memory it frees.
    """
    kind = type(tensor)
    own = kind in PLAIN_TENSORS or kind.__module__.partition(".")[0] == "torch"
    return not own and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def check_model(model: Any) -> None:
    """Raise an UnsupportedError with the reason if a model's KV cannot be cached by prefix."""
    need(CACHING)
    config = model.config
    check_processes()
    refuse_if(any("__nnsight__" in vars(m) for m in model.modules()), "nnsight counts its forward passes")
    refuse_if(has_own_generate(model), "it has a generate of its own")
    refuse_if(getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder model")
    refuse_if(not keeps_dynamic_cache(model), "its state is not kept in a transformers cache")
    refuse_if(any(p.device.type == "meta" for p in model.parameters()), "some of its weights are on the meta device")


def check_processes() -> None:
    """Raise an UnsupportedError if several processes may compute forward passes together.

    They must compute equal passes, but their caches may differ. A probe in one process would wait for the others.
    """
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    refuse_if(initialized and torch.distributed.get_world_size() > 1, "several processes generate together")


def rope_keys(config: Any, prompt_lens: list[int], max_length: int, in_pieces: bool = False) -> tuple[str, ...]:
    """Return extra keys for rotary embeddings whose frequencies depend on the sequence length.

    The type "longrope" has one set of frequencies up to the length of the model's original training, and another
    beyond. The type "dynamic" changes the frequencies with every length beyond it. See transformers'
    modeling_rope_utils.dynamic_rope_update. Keys rotated under one set must not be read under another. The longest
    sequence of a forward pass decides, so no pass may end within the original length of a prompt that is longer.

    Args:
        config: The config of the model.
        prompt_lens: Number of tokens of each prompt.
        max_length: Number of tokens after which the call ends.
        in_pieces: Whether several forward passes may compute a prompt, besides one for its last token.

    Raises:
        UnsupportedError: The frequencies would change during this call.
    """
    config = config.get_text_config(decoder=True)
    for rope in _rope_parameters(config):
        kind = _rope_type(rope)
        if kind not in CHANGING_ROPE:
            continue
        limit = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if max_length <= limit:
            continue
        if kind == "longrope" and not in_pieces and min(prompt_lens) > limit + 1:
            return ("longrope",)
        raise UnsupportedError(f"{kind} rotary embeddings change at a length which this call may cross", str(limit))
    return ()


def changing_rope(config: Any) -> str | None:
    """Return the kind of a model's rotary embeddings that change with the length; None if none do."""
    kinds = {_rope_type(rope) for rope in _rope_parameters(config.get_text_config(decoder=True))}
    return next((kind for kind in CHANGING_ROPE if kind in kinds), None)


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type"))


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameter dictionaries of rotary embeddings. Some models have one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        yield from (value for value in rope.values() if isinstance(value, dict))
    else:
        yield rope


def float32_precision() -> tuple[str, ...]:
    """Return the precisions in which torch may compute float32. torch's older settings change these attributes too."""
    backends: Any = torch.backends
    places = [backends, backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv]
    places += [backends.cuda.matmul, backends.cudnn, backends.cudnn.conv]
    return tuple(str(getattr(place, "fp32_precision", None)) for place in places)


def precision_keys(model: Any) -> tuple[str, ...]:
    """Return extra keys if torch computes the products of a float32 model in a lower precision; () if it does not."""
    of_products = float32_precision()[:5]  # the others are of convolutions on a GPU, and lower by default
    lower = [f"{place} {precision}" for place, precision in enumerate(of_products) if precision in ("bf16", "tf32")]
    return ("float32", *lower) if lower and model.dtype == torch.float32 else ()


def modeling_globals(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the globals of the files that define the forward passes of a model's modules, without duplicates."""
    found = [getattr(inspect.unwrap(kind.forward), "__globals__", {}) for kind in {type(m) for m in model.modules()}]
    return list({id(names): names for names in found}.values())


def is_compiled(model: Any) -> bool:
    """Return whether torch.compile runs some of a model's forward pass."""
    forwards = [vars(m).get("forward") for m in model.modules()]
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
    return compiled or any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards)


def inner_tensors(label: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor with its name or, for a tensor subclass, the tensors that it wraps.

    bitsandbytes keeps the scales of a quantized weight in attributes of the weight, so these are yielded too.
    """
    data = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
    if hasattr(type(data), "__tensor_flatten__"):
        for name, inner in _flattened(data)[0]:
            yield from inner_tensors(f"{label}.{name}" if label else name, inner)
    else:
        yield label, tensor
        if is_quantized_weight(tensor):
            yield from attached_tensors(label, tensor)


def wrappers_of(tensor: torch.Tensor) -> list[Any]:
    """Return the types and settings of the tensor subclasses around the tensors of `inner_tensors`, with types."""
    data = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
    if not hasattr(type(data), "__tensor_flatten__"):
        return []
    inner, settings = _flattened(data)
    return [type(data), settings, *(wrappers_of(tensor) for _, tensor in inner)]


def _flattened(tensor: torch.Tensor) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """Return the tensors that a tensor subclass wraps, with their names, and its settings."""
    names, settings = getattr(tensor, "__tensor_flatten__")()  # noqa: B009  torch.Tensor lacks the method
    inner = [(name, getattr(tensor, name)) for name in names]
    return [(name, value) for name, value in inner if isinstance(value, torch.Tensor)], settings  # DTensor has a mesh


def attached_tensors(label: str, value: Any, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in attributes of a value, and in attributes of these, with their names."""
    for name, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, torch.Tensor):
            yield f"{label}.{name}", held
        elif depth and not isinstance(held, type | torch.nn.Module):
            yield from attached_tensors(f"{label}.{name}", held, depth - 1)


def host_copy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a user's tensor in host memory.

    The user may write to the tensor later. `Tensor.numpy` of the tensor itself would also make its storage fixed in
    size.
    """
    return tensor.detach().to("cpu", copy=True).numpy()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as bytes; none for a tensor without memory (meta)."""
    if tensor.device.type == "meta":
        return memoryview(b"")
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    # Not `Tensor.numpy`, which would make the storage of a user's tensor fixed in size.
    return np.from_dlpack(dense.cpu().contiguous().flatten().view(torch.uint8)).data


@contextmanager
def kept_deltas(model: Any) -> Iterator[None]:
    """Restore, after a `with` block, the `rope_deltas` of the last call that vision-language models keep.

    A forward pass over a cache, by hand or of generate, derives positions from them.
    """
    holders = [vars(m) for m in {model, getattr(model, "base_model", model)} if "rope_deltas" in vars(m)]
    kept = [own["rope_deltas"] for own in holders]
    try:
        yield
    finally:
        for own, deltas in zip(holders, kept, strict=True):
            own["rope_deltas"] = deltas


def evict(
    held: OrderedDict[Any, Any], most: int, size: Callable[[Any], int] = operator.attrgetter("nbytes")
) -> list[Any]:
    """Drop the first values, the least recently used, until the sizes of the others sum up to at most `most`.

    Return the dropped values. Sizes are not counted elsewhere, because an interrupt could leave a counter wrong.
    """
    total, gone = sum(map(size, held.values())), list[Any]()
    while held and total > most:
        gone.append(held.popitem(last=False)[1])
        total -= size(gone[-1])
    return gone


def harmless_tokens(model: Any, count: int) -> np.ndarray:
    """Return token ids that are no placeholders, such as those of images, `[count]` int64.

    They are distinct unless the vocabulary is too small for that.
    """
    config = model.config.get_text_config(decoder=True)
    special: set[int] = set()
    for c in (model.config, config):
        for name, value in vars(c).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                special |= {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)}
    candidates = (np.arange(count + 4 * len(special) + 64, dtype=np.int64) * 7919 + 13) % config.vocab_size
    return np.resize(candidates[~np.isin(candidates, list(special))], count)


def padding_token(model: Any) -> int:
    """Return the id of the model's padding token, which some models leave out when they count positions; -1 if none."""
    config = model.config.get_text_config(decoder=True)
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else -1
