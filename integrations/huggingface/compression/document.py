"""Compressed documents: what users see of one, and the documents of a handle, which the calls that enter them read."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....cache.tiers.disk import DiskTier
from ....cache.tiers.payload import pack, unpack
from ...presses import SCORES
from ..calls import Calls, RequestReport, UnsupportedError, callers_level
from ..loop import Loop
from ..runners.dispatch import install
from ..runners.document import answer, check_loop_over_document
from ..settings import CacheOptions, ScopedSetting, memory_budget
from ..store.kept import ContiguousStore
from ..store.tiers import fingerprint, replaced
from ..visits import Visit, apart, enter, leave, open_visits, visited
from .kept import Content, KeptLayer, digest_of, tokens_of
from .presses import press_key
from .reading import check_compressible, read


class CompressedDocument:
    """A text of which each KV head keeps the tokens a press chose; from `handle.compress`.

    Within `with document:`, `model.generate` answers prompts that begin with the document's tokens. That holds for the
    thread or asyncio task that enters it, and for threads and tasks that it starts there. Any number of calls may read
    a document at once, each as if it were alone. `docs/compression.md` says which options of generate are refused.

    Attributes:
        length: Tokens of the document.
        nbytes: Bytes of what is kept.
        kept: Tokens that each head of each layer keeps, `[layers][heads]`; layers with a window, which stay whole, are
            left out.
        kept_tokens: The positions of those tokens, `[layers][heads]` tensors `[kept]` int64; None for a layer that an
            object of kvpress has shortened, which does not say them.
        peak_nbytes: Bytes of keys and values at most while it was read.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> handle = enable_prefix_caching(model, num_blocks=64)
        >>> context = torch.arange(1, 61)[None]  # [1, 60]
        >>> document = handle.compress(context, press="streaming", budget=0.1)
        >>> document
        <CompressedDocument of 60 tokens, 10% of them kept, 8,848 bytes>
        >>> document.kept[0], document.kept_tokens[0][0]  # of layer 0: 4 heads, and the tokens of the first
        ([6, 6, 6, 6], tensor([ 0,  1,  2,  3, 58, 59]))
        >>> prompt = torch.cat([context, torch.tensor([[7, 8, 9]])], 1)
        >>> with document:
        ...     tokens = model.generate(prompt, max_new_tokens=4)
        >>> tokens.shape
        torch.Size([1, 67])
    """

    def __init__(self, documents: Documents, content: Content, identity: tuple[object, ...]) -> None:
        self.documents, self.identity = documents, identity  # of the model and its adapters when it was read
        self._content: Content | None = content

    def __repr__(self) -> str:
        if self._content is None:
            return "<CompressedDocument, closed>"
        counts = [count for layer in self.kept for count in layer]
        share = sum(counts) / len(counts) / self.length
        return f"<CompressedDocument of {self.length:,} tokens, {share:.0%} of them kept, {self.nbytes:,} bytes>"

    @property
    def length(self) -> int:  # noqa: D102  see Attributes
        return len(self.content.tokens)

    @property
    def key(self) -> bytes:
        """Its identity: tokens, the press and its fields, adapters, salt."""
        return self.content.key

    @property
    def nbytes(self) -> int:  # noqa: D102
        return self.content.nbytes

    @property
    def peak_nbytes(self) -> int:  # noqa: D102
        return self.content.peak_nbytes

    @property
    def kept(self) -> list[list[int]]:  # noqa: D102
        return [layer.kept.tolist() for layer in self._layers()]

    @property
    def kept_tokens(self) -> list[list[torch.Tensor] | None]:  # noqa: D102
        return [tokens_of(layer, self.length) for layer in self._layers()]

    def __enter__(self) -> CompressedDocument:
        self.documents.enter(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.documents.leave(self)

    def close(self) -> None:
        """Free its memory, once no call reads it any more; later uses raise ValueError.

        Other documents that the same text, press and budget gave are not closed.
        """
        if self._content is not None:
            self.documents.drop(self._content)
        self._content = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file for its owner alone (0600); an existing one is replaced.

        Raises:
            ValueError: The document was closed, or its handle disabled.
            OSError: The file cannot be written.
        """
        data = pack(_file_key(self.documents), self.content.tensors(), None)
        with replaced(path) as file:
            file.write(data)

    @classmethod
    def load(cls, handle: Any, path: str | os.PathLike[str]) -> CompressedDocument:
        """Return a document from a file of `save`.

        Args:
            handle: Of `enable_prefix_caching`, for the model that read it.
            path: The file.

        Raises:
            ValueError: It was read by another model, other weights or adapters, or under another salt than that of
                this call, or it is no file of `save`.
            OSError: The file cannot be read.
        """
        documents: Documents = handle._serving.documents
        reader, identity = documents.current()
        try:
            tensors = unpack(Path(path).read_bytes(), _file_key(documents), None)
            content = Content.of(tensors, reader.model.device)
        except ValueError as error:
            raise ValueError(f"path: got a file that cannot be used ({error}), needs one of this model") from error
        if content.adapters != digest_of(content.key, reader.adapters or None):
            raise ValueError("path: got a document that other adapters read, needs those that are active now")
        documents.check_salt("path", content)
        return cls(documents, content, identity)

    @property
    def content(self) -> Content:
        """The kept keys and values; ValueError: the document was closed."""
        if self._content is None:
            raise ValueError("document: it was closed")
        return self._content

    def _layers(self) -> list[KeptLayer]:
        return [layer for layer in self.content.layers.values() if isinstance(layer, KeptLayer)]


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
        document: CompressedDocument = visits[-1].document
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


def _file_key(documents: Documents) -> bytes:
    reader, _ = documents.current()
    return bytes.fromhex(fingerprint(reader.model))
