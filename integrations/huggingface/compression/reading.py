"""Documents of one handle: compressed once, kept in a bound of bytes, and read by the calls that enter them.

A press by name chooses where attention is computed, so nothing of the model is touched. An object of kvpress puts hooks
on modules. It gets a twin of the model that shares every tensor and nothing else. So its hooks and the attributes that
it sets reach no other call. The press leaves a shortened layer, or `masked_key_indices`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....cache.tiers.disk import DiskTier
from ....triton_ops import paged_attention
from ...presses import SCORES, kept_tokens
from ..api import CACHE_NAMES, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, takes_cache
from ..calls import Calls, RequestReport, UnsupportedError, callers_level, refuse_if
from ..contiguous.layout import inputs_of
from ..contiguous.store import ContiguousStore
from ..contiguous.tiers import fingerprint
from ..paged.dispatch import MarkedCall, install, mark
from ..settings import CacheOptions, ScopedSetting, memory_budget
from ..support import Loop, changing_rope, check_model
from ..visits import Visit, apart, enter, leave, open_visits, visited
from .document import CompressedDocument
from .kept import Content, KeptLayer, WindowLayer, digest_of, keep
from .layers import CachedPass
from .presses import press_key
from .questions import answer, check_loop_over_document, is_compiled


class Reader(NamedTuple):
    """A model that reads documents, with what is active in it."""

    model: Any
    adapters: tuple[str, ...]
    store: ContiguousStore | None  # where questions are kept; None: nowhere


class Documents:
    """The documents of one handle, by identity, in a bound of bytes; others in host memory and on disk."""

    # Each is one payload, there whole or not at all. Whoever has one keeps it, whatever is evicted.

    def __init__(
        self,
        model: Callable[[], Any],
        reader: Callable[[], Reader],
        salt: ScopedSetting,
        options: CacheOptions,
        left: Callable[[], None],
    ) -> None:
        # `left` is called when the last block `with document:` has ended.
        self._model, self._reader, self._salt, self._options, self._left = model, reader, salt, options, left
        self._contents: OrderedDict[bytes, Content] = OrderedDict()  # on the device, those used longest ago first
        self._host: OrderedDict[bytes, Content] = OrderedDict()
        self._disk: DiskTier | None = None
        self._lock = threading.Lock()
        self._told = False
        self._epoch = object()

    def enter(self, document: CompressedDocument) -> None:
        """Let the calls of this thread or task read a document; ValueError: they could not."""
        document.content  # noqa: B018  raises where it was closed
        model = self._reader().model
        serving = getattr(vars(model).get("generate"), "handle", None)
        if getattr(serving, "documents", None) is not self:
            raise ValueError(
                "document: its handle no longer serves model.generate; compress it with the handle that does"
            )
        if not install(model):  # by whichever way the document came into this process
            raise ValueError("document: the model's attention is not called through transformers' interface")
        enter(document)

    def leave(self, document: CompressedDocument) -> None:
        """End the innermost block of a document, whichever thread or task it is left in."""
        own = [visit for visit in visited() if visit.open and visit.document is document]
        others = [visit for visit in open_visits() if visit.document is document]
        here = [visit for visit in others if visit.in_this_thread]
        for visit in (own or here or others)[-1:]:
            leave(visit)
        if not self.entered:
            self._left()

    @property
    def model(self) -> Any:
        """The model that reads the documents; None when it is gone."""
        return self._model()

    @property
    def entered(self) -> bool:
        """Whether some thread or task is within a document of the model, of whichever handle."""
        return bool(self._entered())

    def _entered(self) -> list[Visit]:
        return [visit for visit in open_visits() if visit.document.documents.model is self.model]

    def current_document(self) -> CompressedDocument | None:
        """Return the document that a call of this thread or task reads, if any.

        Raises:
            ValueError: It was closed, or another handle serves the model now.
        """
        visits = [visit for visit in visited() if visit.document.documents.model is self.model]
        if not visits:
            return None
        document = visits[-1].document
        if document.documents is not self:
            raise ValueError("document: its handle was disabled, and another one serves the model now")
        document.content  # noqa: B018  raises where it was closed
        return document

    def look_elsewhere(self, inputs: Any) -> None:
        """Notice a call whose prompt `inputs` begins with a document that another thread or task has entered.

        Raises:
            ValueError: Another task or context of this thread has, so the call would silently not read it.
        """
        visits = self._entered()
        is_batch = bool(visits) and isinstance(inputs, torch.Tensor) and inputs.dim() == 2
        ids = inputs.cpu() if is_batch else torch.empty(0, 0)
        for visit in visits:
            content = visit.document._content
            if content is None:
                continue
            tokens = content.tokens
            if ids.shape[1] <= len(tokens) or not bool((ids[:, : len(tokens)] == tokens).all(1).any()):
                continue
            if visit.in_this_thread:
                raise ValueError(
                    "document: was entered in another asyncio task or context of this thread, so this call would not "
                    "read it; enter it where generate is called, or leave it first"
                )
            if not self._told:
                self._told = True
                warnings.warn(
                    "a prompt begins with the text of a compressed document that another thread has entered, and is "
                    "answered by full attention; enter the document in this thread for it to be read",
                    UserWarning,
                    stacklevel=callers_level(),
                )

    def forget(self) -> None:
        """Let no call read what was read so far: the model is another one now."""
        self.clear()
        self._disk, self._epoch = None, object()

    def clear(self) -> None:
        """Free the memory of documents that are no longer referenced."""
        with self._lock:
            self._contents.clear()
            self._host.clear()

    def drop(self, content: Content) -> None:
        """Free a document that was closed; with `disk` it is written there first."""
        with self._lock:
            dropped = [held.pop(content.key) for held in (self._host, self._contents) if content.key in held]
        self._write(dropped[-1:])

    def close(self) -> None:
        """Write what there is to disk, where there is one."""
        self._write([*self._host.values(), *self._contents.values()])

    def current(self) -> tuple[Reader, tuple[object, ...]]:
        """Return what reads now, and what must be the same for a document to be its own; ValueError: nothing does."""
        reader = self._reader()
        return reader, (self._epoch, *reader.adapters)

    def check_salt(self, name: str, content: Content) -> None:
        """Raise ValueError for a document of another salt than the current one; one of no salt is anybody's."""
        if content.salt and content.salt != digest_of(content.key, self._salt.current):
            raise ValueError(
                f"{name}: got a document of another salt; use it within `with handle.salt(...)` of its own"
            )

    def answer(self, loop: Loop, document: CompressedDocument, calls: Calls) -> tuple[Any, list[RequestReport]]:
        """Run a loop over a document: its result, and a report by row. ValueError: before a token was computed."""
        content = document.content
        reader, identity = self.current()
        if document.identity != identity:
            changed = "other adapters" if document.identity[:1] == identity[:1] else "other weights or another model"
            raise ValueError(f"document: was read by {changed} than those of this call; compress it again")
        self.check_salt("document", content)
        check_loop_over_document(loop, content)
        with apart():
            return answer(loop, content, reader.store, self._options.chunk, calls)

    @torch.no_grad()
    def compress(self, context_ids: Any, press: Any, budget: float) -> CompressedDocument:
        """Return a compressed document: see `PrefixCaching.compress`."""
        tokens = _tokens_of(context_ids)
        if isinstance(press, str) and press not in SCORES:
            raise ValueError(f"press: got {press!r}, needs one of {', '.join(SCORES)} or an object of kvpress")
        if not isinstance(press, str) and not callable(press):
            raise TypeError(f"press: got {type(press).__name__}, needs a name or an object of kvpress")
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise TypeError(f"budget: got {type(budget).__name__}, needs a number")
        if not 0 < budget <= 1:
            raise ValueError(f"budget: got {budget}, needs more than 0 and at most 1")
        reader, identity = self.current()
        told = press_key(press, float(budget))
        salt = self._salt.current
        text = repr((told or os.urandom(16), reader.adapters, salt))
        key = hashlib.sha256(tokens.numpy().tobytes() + text.encode()).digest()
        content = self._find(key, reader)
        if content is None:
            try:
                check_compressible(reader.model)
                with apart():
                    content = read(reader.model, tokens, press, float(budget), key)
                adapters = digest_of(key, reader.adapters or None)
                content = content._replace(adapters=adapters, salt=digest_of(key, salt))
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
            try:
                content = Content.of(tensors, reader.model.device)
            except ValueError:
                return None  # an older version wrote it
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
    """Put documents among others, as those used last; return those for which there is no room."""
    for content in contents:
        held[content.key] = content
        held.move_to_end(content.key)
    gone = []
    while held and sum(content.nbytes for content in held.values()) > most:
        gone.append(held.popitem(last=False)[1])
    return gone


def _tokens_of(context_ids: Any) -> torch.Tensor:
    """Return the tokens of a text, `[length]` int64 on the host; ValueError: it is not one text of tokens alone."""
    needs = "needs token ids [1, length] or [length]"
    if isinstance(context_ids, Mapping):  # of a tokenizer
        given = {name: value for name, value in context_ids.items() if value is not None}
        mask = torch.as_tensor(given.pop("attention_mask", 1))
        types = torch.as_tensor(given.pop("token_type_ids", 0))
        if not bool(mask.all()):
            raise ValueError(f"context_ids: got an attention_mask with padding, {needs} without")
        if bool(types.any()) or set(given) != {"input_ids"}:
            others = sorted(set(given) - {"input_ids"}) or ["token_type_ids"]
            raise ValueError(f"context_ids: got {', '.join(others)}, {needs} of text alone")
        context_ids = given["input_ids"]
    try:
        ids = torch.as_tensor(context_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"context_ids: got {type(context_ids).__name__}, {needs}") from error
    numbers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not (numbers and ids.numel() and (ids.dim() == 1 or (ids.dim() == 2 and len(ids) == 1))):
        raise ValueError(f"context_ids: got {ids.dtype} {list(ids.shape)}, {needs}")
    return ids.reshape(-1).to("cpu", torch.int64)


def check_compressible(model: Any) -> None:
    """Raise UnsupportedError for a model of whose keys and values nothing can be left out."""
    check_model(model)
    refuse_if(changing_rope(model.config), "its rotary embeddings change with the length")
    refuse_if(is_compiled(model), "torch.compile runs its forward pass")
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedError(f"its weights are {model.dtype}, needs float32, float16 or bfloat16")


def read(model: Any, tokens: torch.Tensor, press: Any, budget: float, key: bytes) -> Content:
    """Compute a text and keep what a press chooses; UnsupportedError: its keys and values cannot be left out."""
    cache = DynamicCache(config=model.config)
    kept: dict[int, KeptLayer | WindowLayer] = {}
    peak = Peak(cache, kept)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(f"a layer of its cache is a {type(layer).__name__}")
        if type(layer) is DynamicLayer and isinstance(press, str):
            cache.layers[index] = _ReadLayer(index, press, budget, kept, peak)
    full = [i for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding]
    refuse_if(not full, "every layer has a window")
    refuse_if(not install(model), "its attention is not called through transformers' interface")
    if isinstance(press, str):
        model.base_model(**_inputs(model, tokens, cache))
    else:
        _read_by_hooks(model, tokens, press, cache, kept, peak, set(full))
    refuse_if(set(full) - kept.keys(), "its attention is not called through transformers' interface")
    for index, layer in enumerate(cache.layers):
        if layer.is_sliding:
            window = torch.tensor(layer.sliding_window)
            kept[index] = WindowLayer(layer.keys.clone(), layer.values.clone(), window)
    position = len(tokens)
    if _turns_keys(press):
        refuse_if(len(full) < len(cache.layers), "a press that turns keys to new places, beside layers with windows")
        position = int(kept[full[0]].kept[0])  # type: ignore[union-attr]
    layers = dict(sorted(kept.items()))
    kept.clear()  # the cache's layers refer to each other through it, and would hold it until garbage is collected
    return Content(layers, tokens, position, peak.nbytes, key)


def _inputs(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> dict[str, Any]:
    """Return the inputs that generate would give for a whole text, of the model below its head."""
    inputs = inputs_of(model, tokens.numpy(), 0, len(tokens), cache)
    inputs.pop("logits_to_keep", None)
    return inputs


class Peak:
    """The most bytes of keys and values: of layers that are whole, and of what is kept."""

    def __init__(self, cache: DynamicCache, kept: dict[int, Any]) -> None:
        self._cache, self._kept, self.nbytes = cache, kept, 0

    def look(self) -> None:
        """Count the memory that there is now; a view counts with all of the memory that it holds."""
        whole = [(layer.keys, layer.values) for layer in self._cache.layers if layer.is_initialized]
        packed = [layer[:2] for layer in self._kept.values()]
        held = [t.untyped_storage() for pair in (*whole, *packed) for t in pair if t is not None]
        self.nbytes = max(self.nbytes, sum({s.data_ptr(): s.nbytes() for s in held}.values()))


class _ReadLayer(CachedPass, DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer that is compressed where its attention is computed, which its marked keys lead to."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, index: int, press: str, budget: float, kept: dict[int, Any], peak: Peak) -> None:
        super().__init__()
        self.index, self.press, self.budget, self.kept, self.peak = index, press, budget, kept, peak

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return the keys, bound to this layer."""
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        self.caches(value_states)
        return mark(key_states.view_as(key_states), self), value_states

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """Return attention over the whole text, `[1, tokens, num_heads, head_dim]`, and keep what the press chooses."""
        refuse_if(call.window is not None, "a layer without a window in its cache has one in its attention")
        query, key, value, scale = call[:4]
        length = query.shape[2]
        table, lens, starts = (
            torch.tensor(t, dtype=torch.int32, device=query.device) for t in ([[0]], [length], [0, length])
        )
        sides = (query[0].transpose(0, 1), key.transpose(1, 2), value.transpose(1, 2))  # one block of the whole text
        given: dict[str, Any] = {"softcap": call.softcap, "sinks": call.sinks, "max_query_len": length}
        out = paged_attention(*sides, table, lens, starts, scale, max_seq_len=length, **given)
        chosen = kept_tokens(self.press, query[0], key[0], value[0], scale, self.budget)
        self.kept[self.index] = keep(key[0], value[0], chosen)
        self.peak.look()
        self.keys = self.values = None
        return out[None]


def _read_by_hooks(
    model: Any, tokens: torch.Tensor, press: Any, cache: DynamicCache, kept: dict[int, Any], peak: Peak, full: set[int]
) -> None:
    """Read under an object of kvpress; a layer that it leaves whole is kept as it is at the press's end."""
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
        if keys.shape[1] < len(tokens):  # the press does not say which tokens it left
            kept[index] = kept[index]._replace(chosen=torch.empty(0, 0, dtype=torch.uint8))
        peak.look()
        # New tensors: a view of no tokens would hold the memory of all.
        layer.keys, layer.values = (side.new_empty(1, len(side), 0, side.shape[2]) for side in (keys, values))

    def behind(module: Any, *_: Any) -> None:
        layer = cache.layers[module.layer_idx]
        peak.look()
        if layer.keys.shape[2] < len(tokens) or vars(module).get("masked_key_indices") is not None:
            pack(module.layer_idx)

    def under_every_name(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for name in CACHE_NAMES:
            kwargs.setdefault(name, cache)

    for index in full:
        modules[index].register_forward_hook(under_every_name, with_kwargs=True)  # a press asks for its version's
    with press(twin):
        for index in full:
            modules[index].register_forward_hook(behind)  # behind the press's own; it dies with the twin
        places = torch.arange(len(tokens), device=model.device)  # which kvpress asks for, and transformers passes on
        twin.base_model(**_inputs(twin, tokens, cache), cache_position=places)
    for index in sorted(full - kept.keys()):
        pack(index)


def _twin(model: Any) -> Any:
    """Return the same model of other modules, which share every tensor."""
    shared = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def _attention_modules(model: Any) -> dict[int, Any]:
    """Return, by layer, the module that is given the cache and has no such module within."""
    found: dict[int, Any] = {}
    for module in model.modules():
        index = vars(module).get("layer_idx")
        if isinstance(index, int) and takes_cache(module.forward):
            found[index] = module  # an inner one comes behind the one around it
    return found


def _turns_keys(press: Any) -> bool:
    """Return whether a press of kvpress gives the tokens that it keeps new positions, from 0."""
    if isinstance(press, str):
        return False
    if type(press).__name__ == "KeyRerotationPress" or getattr(press, "rerotate_keys", False):
        return True
    inner = [getattr(press, "press", None), *(getattr(press, "presses", None) or ())]
    return any(_turns_keys(p) for p in inner if p is not None)
