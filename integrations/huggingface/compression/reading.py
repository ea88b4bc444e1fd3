"""Reads a document: computes it once, lets a press choose layer by layer, and frees a layer before the next is there.

A press by name chooses where attention is computed, so nothing of the model is touched. An object of kvpress puts hooks
on modules: it gets a twin of the model, which shares every tensor and nothing else, so neither what it leaves on
modules nor what it does to passes reaches other calls. What it leaves is a shortened layer, or `masked_key_indices`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....cache.tiers.disk import DiskTier
from ....triton_ops import paged_attention
from ...presses import SCORES, choose
from ..api import CACHE, CACHE_NAMES, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, cache_argument, takes_cache
from ..calls import RequestReport, UnsupportedError, refuse_if
from ..contiguous.store import ContiguousStore
from ..contiguous.tiers import fingerprint
from ..paged.dispatch import MarkedCall, PagedPass, install, mark
from ..settings import CacheOptions, ScopedSetting, memory_budget
from ..support import changing_rope, check_model
from .document import CompressedDocument, Content, KeptLayer, WindowLayer, keep
from .presses import press_key
from .questions import KeptQuestions, are_kept

_entered: ContextVar[tuple[CompressedDocument, ...]] = ContextVar("pc_documents", default=())


class Reader(NamedTuple):
    """What reads documents and answers over them."""

    model: Any
    adapters: tuple[str, ...]
    store: ContiguousStore | None  # where questions are kept; None: nowhere


class Documents:
    """The documents of one handle: by what they are, in a bound of bytes; others in host memory and on disk."""

    # Each is one payload, there whole or not at all. Whoever has one keeps it, whatever is evicted.

    def __init__(self, reader: Callable[[], Reader], salt: ScopedSetting, options: CacheOptions) -> None:
        self._reader, self._salt, self._options = reader, salt, options
        self._contents: OrderedDict[bytes, Content] = OrderedDict()  # on the device, those used longest ago first
        self._host: OrderedDict[bytes, Content] = OrderedDict()
        self._disk: DiskTier | None = None
        self._lock = threading.Lock()
        self._epoch = object()

    def enter(self, document: CompressedDocument) -> None:
        """Calls of this thread read it from now on."""
        _entered.set((*_entered.get(), document))

    def leave(self, document: CompressedDocument) -> None:
        """They read what they did before."""
        entered = list(_entered.get())
        last = max(i for i, other in enumerate(entered) if other is document)
        _entered.set((*entered[:last], *entered[last + 1 :]))

    def entered(self) -> CompressedDocument | None:
        """What this thread's calls read."""
        own = [document for document in _entered.get() if document.documents is self]
        return own[-1] if own else None

    def forget(self) -> None:
        """The model is another one now: what was read is read by no call any more."""
        self.clear()
        self._disk, self._epoch = None, object()

    def clear(self) -> None:
        """Gives back the memory of documents that are no longer referenced."""
        with self._lock:
            self._contents.clear()
            self._host.clear()

    def close(self) -> None:
        """Writes what there is to disk, where there is one."""
        self._write([*self._host.values(), *self._contents.values()])

    def current(self) -> tuple[Reader, tuple[object, ...]]:
        """What reads, and what must be the same for a document to be its own; ValueError: nothing does now."""
        reader = self._reader()
        return reader, (self._epoch, *reader.adapters)

    def ask(
        self, generate: Callable[..., Any], document: CompressedDocument, arguments: dict[str, Any]
    ) -> tuple[Any, list[RequestReport]]:
        """A call of the model's own generate over a document, and its report by row; ValueError: it cannot read it."""
        reader, identity = self.current()
        if document._identity != identity:
            raise ValueError("document: was read by other weights or adapters, compress it again")
        arguments = document.arguments(arguments)
        ids, cache, store = arguments["input_ids"], arguments[CACHE], reader.store
        if store is None or not store.storage.simple or not are_kept(reader.model, arguments):
            result, cached = generate(reader.model, **arguments), 0
        else:
            keys, lease = ("compressed document", document.key.hex(), *reader.adapters), store.lease()
            try:
                asked = ids[:, cache.length :].cpu().numpy()
                questions = KeptQuestions(store, lease, keys, self._salt.current, asked)
                questions.attach(cache)
                result, cached = generate(reader.model, **arguments), questions.cached
                questions.keep(cache, result if isinstance(result, torch.Tensor) else result.sequences)
            finally:
                lease.close()
        return result, [RequestReport.of(ids.shape[1], [(0, cache.length + cached)]) for _ in ids]

    @torch.no_grad()
    def compress(self, context_ids: Any, press: Any, budget: float) -> CompressedDocument:
        """See `PrefixCaching.compress`."""
        ids = torch.as_tensor(context_ids)
        if ids.dim() not in (1, 2) or (ids.dim() == 2 and len(ids) != 1) or ids.is_floating_point() or not ids.numel():
            raise ValueError(f"context_ids: got {ids.dtype} {list(ids.shape)}, needs token ids [1, length] or [length]")
        if isinstance(press, str) and press not in SCORES:
            raise ValueError(f"press: got {press!r}, needs one of {', '.join(SCORES)} or an object of kvpress")
        if not isinstance(press, str) and not callable(press):
            raise TypeError(f"press: got {type(press).__name__}, needs a name or an object of kvpress")
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise TypeError(f"budget: got {type(budget).__name__}, needs a number")
        if not 0 < budget <= 1:
            raise ValueError(f"budget: got {budget}, needs more than 0 and at most 1")
        reader, identity = self.current()
        tokens = ids.reshape(-1).to("cpu", torch.int64)
        told = press_key(press, float(budget))
        text = repr((told or os.urandom(16), reader.adapters, self._salt.current))
        key = hashlib.sha256(tokens.numpy().tobytes() + text.encode()).digest()
        content = self._find(key, reader)
        if content is None:
            try:
                content = read(reader.model, tokens, press, float(budget), key)
            except UnsupportedError as error:
                raise ValueError(f"model: its text cannot be compressed: {error}") from error
            if told is not None and identity[0] is self._epoch:
                self._keep(content, reader)
        return CompressedDocument(self, content, identity)

    def _find(self, key: bytes, reader: Reader) -> Content | None:
        options = self._options
        if options.disk is not None and self._disk is None:
            folder = Path(options.disk) / f"documents-{fingerprint(reader.model)[:32]}"
            self._disk = DiskTier(folder, None, options.disk_bytes)
        with self._lock:
            content = self._contents.get(key)
            if content is not None:
                self._contents.move_to_end(key)
                return content
            below = self._host.pop(key, None)
        tensors = below.tensors() if below else self._disk.get(key) if self._disk is not None else None
        if tensors is not None:
            content = Content.of(tensors, reader.model.device)
            self._keep(content, reader)
        return content

    def _keep(self, content: Content, reader: Reader) -> None:
        parts = reader.store.storage.parts if reader.store is not None else []
        host_bytes = self._options.host_blocks * sum(part.bytes_per_block for part in parts)
        with self._lock:
            evicted = _put(self._contents, [content], memory_budget(reader.model))
            gone = _put(self._host, [Content.of(c.tensors(), torch.device("cpu")) for c in evicted], host_bytes)
        self._write(gone)

    def _write(self, contents: Iterable[Content]) -> None:
        for content in contents:
            if self._disk is not None:
                self._disk.put(content.key, content.tensors())


def _put(held: OrderedDict[bytes, Content], contents: Iterable[Content], most: int) -> list[Content]:
    """Puts documents among others as those used last; those for which there is no room."""
    for content in contents:
        held[content.key] = content
        held.move_to_end(content.key)
    gone = []
    while held and sum(content.nbytes for content in held.values()) > most:
        gone.append(held.popitem(last=False)[1])
    return gone


def read(model: Any, tokens: torch.Tensor, press: Any, budget: float, key: bytes) -> Content:
    """Computes a text and keeps what a press chooses; UnsupportedError: nothing of the model's KV can be left out."""
    check_model(model)
    refuse_if(changing_rope(model.config), "its rotary embeddings change with the length")
    cache = DynamicCache(config=model.config)
    kept: dict[int, KeptLayer | WindowLayer] = {}
    peak = Peak(cache, kept)
    ids = tokens[None].to(model.device)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(f"a layer of its cache is a {type(layer).__name__}")
        if type(layer) is DynamicLayer and isinstance(press, str):
            cache.layers[index] = _ReadLayer(index, press, budget, kept, peak)
    full = [i for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding]
    refuse_if(not full, "every layer has a window")
    refuse_if(not install(model), "its attention is not called through transformers' interface")
    if isinstance(press, str):
        model.base_model(input_ids=ids, use_cache=True, **{cache_argument(model.base_model): cache})
    else:
        _read_by_hooks(model, ids, press, cache, kept, peak, set(full))
    refuse_if(set(full) - kept.keys(), "its attention is not called through transformers' interface")
    for index, layer in enumerate(cache.layers):
        if layer.is_sliding:
            window = torch.tensor(layer.sliding_window)
            kept[index] = WindowLayer(layer.keys.clone(), layer.values.clone(), window)
    position = len(tokens)
    if _turns_keys(press):
        refuse_if(len(full) < len(cache.layers), "a press that turns keys to new places, beside layers with windows")
        position = int(kept[full[0]].kept[0])  # type: ignore[union-attr]
    return Content(dict(sorted(kept.items())), tokens, position, peak.nbytes, key)


class Peak:
    """Bytes of keys and values at most: of layers that are whole, and of what is kept."""

    def __init__(self, cache: DynamicCache, kept: dict[int, Any]) -> None:
        self._cache, self._kept, self.nbytes = cache, kept, 0

    def look(self) -> None:
        """Counts what there is now."""
        whole = [(layer.keys, layer.values) for layer in self._cache.layers if layer.is_initialized]
        packed = [layer[:2] for layer in self._kept.values()]
        self.nbytes = max(self.nbytes, sum(t.nbytes for pair in (*whole, *packed) for t in pair if t is not None))


class _ReadLayer(DynamicLayer, PagedPass):  # type: ignore[misc]  # transformers is untyped here
    """A layer that is compressed where its attention is computed, which its marked keys lead to."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, index: int, press: str, budget: float, kept: dict[int, Any], peak: Peak) -> None:
        super().__init__()
        self.index, self.press, self.budget, self.kept, self.peak = index, press, budget, kept, peak

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The keys, bound to this layer."""
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        return mark(key_states.view_as(key_states), self), value_states

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """Attention over the whole text, `[1, tokens, num_heads, head_dim]`; then the layer keeps what is chosen."""
        refuse_if(call.window is not None, "a layer without a window in its cache has one in its attention")
        query, key, value, scale = call[:4]
        length = query.shape[2]
        table, lens, starts = (
            torch.tensor(t, dtype=torch.int32, device=query.device) for t in ([[0]], [length], [0, length])
        )
        sides = (query[0].transpose(0, 1), key.transpose(1, 2), value.transpose(1, 2))  # one block of the whole text
        given: dict[str, Any] = {"softcap": call.softcap, "sinks": call.sinks, "max_query_len": length}
        out = paged_attention(*sides, table, lens, starts, scale, max_seq_len=length, **given)
        chosen = choose(SCORES[self.press](query[0], key[0], value[0], scale), self.budget)
        self.kept[self.index] = keep(key[0], value[0], chosen)
        self.peak.look()
        self.keys = self.values = None
        return out[None]


def _read_by_hooks(
    model: Any, ids: torch.Tensor, press: Any, cache: DynamicCache, kept: dict[int, Any], peak: Peak, full: set[int]
) -> None:
    """Reads under an object of kvpress; a layer that it leaves whole is kept as it is when it is done with all."""
    twin = _twin(model)
    modules = _attention_modules(twin)
    refuse_if(full - modules.keys(), "its attention modules do not say which layer they are of")

    def pack(index: int) -> None:
        layer, masked = cache.layers[index], modules[index].__dict__.pop("masked_key_indices", None)
        keys, values = layer.keys[0], layer.values[0]
        chosen = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        if masked is not None:
            chosen[masked[1], masked[2]] = False
        kept[index] = keep(keys, values, chosen)
        peak.look()
        layer.keys, layer.values = keys[None, :, :0], values[None, :, :0]

    def behind(module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        peak.look()
        if layer.keys.shape[2] < ids.shape[1] or vars(module).get("masked_key_indices") is not None:
            pack(module.layer_idx)

    def under_every_name(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for name in CACHE_NAMES:
            kwargs.setdefault(name, cache)

    for index in full:
        modules[index].register_forward_hook(under_every_name, with_kwargs=True)  # a press asks for its version's
    with press(twin):
        for index in full:
            modules[index].register_forward_hook(behind)  # behind the press's own; it dies with the twin
        positions = torch.arange(ids.shape[1], device=ids.device)  # which kvpress asks for, and transformers passes on
        twin.base_model(
            input_ids=ids, use_cache=True, cache_position=positions, **{cache_argument(twin.base_model): cache}
        )
    for index in sorted(full - kept.keys()):
        pack(index)


def _twin(model: Any) -> Any:
    """The same model of other modules, which share every tensor."""
    shared = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def _attention_modules(model: Any) -> dict[int, Any]:
    """By layer the module that is given the cache and has no such module within."""
    found: dict[int, Any] = {}
    for module in model.modules():
        index = vars(module).get("layer_idx")
        if isinstance(index, int) and takes_cache(module.forward):
            found[index] = module  # an inner one comes behind the one around it
    return found


def _turns_keys(press: Any) -> bool:
    """Whether a press of kvpress gives what it keeps new positions, 0 and on."""
    if isinstance(press, str):
        return False
    if type(press).__name__ == "KeyRerotationPress" or getattr(press, "rerotate_keys", False):
        return True
    inner = [getattr(press, "press", None), *(getattr(press, "presses", None) or ())]
    return any(_turns_keys(p) for p in inner if p is not None)
