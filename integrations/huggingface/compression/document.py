"""Compressed documents: the class that users see, and the documents of a handle with their tiers."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....cache.tiers.disk import DiskTier
from ....cache.tiers.payload import pack, unpack
from ...presses import SCORES
from ..calls import UnsupportedError, refuse_if
from ..hooks import REASON, watched_hooks
from ..loop import Loop
from ..probe import own_passes
from ..runners.dispatch import install
from ..runners.document import check_loop_over_document
from ..settings import memory_budget, value_of
from ..store.tiers import replaced
from ..support import evict
from ..visits import Visit, enter, leave, open_visits, visited
from .kept import Content, KeptLayer, digest_of, tokens_of
from .presses import press_key
from .reading import check_compressible, read


class CompressedDocument:
    """A text whose keys and values are compressed: each KV head keeps the tokens that a press chose.

    `handle.compress` returns it. Within `with document:`, `model.generate` answers prompts that begin with the
    document's tokens. This holds for the thread or asyncio task that enters the document, and for threads and tasks
    that it starts there. Any number of calls may read a document at once, each as if it were alone.
    `docs/compression.md` says which options of generate are refused.

    Attributes:
        length: Number of tokens in the document.
        nbytes: Number of bytes that are kept.
        kept: Number of tokens that each head of each layer keeps, `[layers][heads]`, without layers with a window,
            which are not compressed.
        kept_tokens: The positions of these tokens, `[layers][heads]` tensors `[kept]` int64. None for a layer that an
            object of kvpress has shortened, because its positions are unknown.
        peak_nbytes: Peak size of the keys and values, in bytes, while the text was computed.

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
        # `identity`: the model and its adapters as they were when the text was computed
        self.documents, self.identity = documents, identity
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
        """The identity of the document: a hash of its tokens, the press with its settings, adapters and salt."""
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
        """Free the document's memory when no running call reads it any more. Later uses raise ValueError.

        Other objects for the same text, press and budget stay open.
        """
        if self._content is not None:
            self.documents.drop(self._content)
        self._content = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document to a file that only its owner may read (0600). An existing file is replaced.

        Raises:
            ValueError: The document was closed, or its handle disabled.
            OSError: The file cannot be written.
        """
        data = pack(_file_key(self.documents), self.content.tensors(), None)
        with replaced(path) as file:
            file.write(data)

    @classmethod
    def load(cls, handle: Any, path: str | os.PathLike[str]) -> CompressedDocument:
        """Return a document from a file.

        Args:
            handle: The handle of the model that computed the document.
            path: A file that `save` wrote.

        Raises:
            TypeError: `handle` is no handle of `enable_prefix_caching`.
            ValueError: The document was computed by another model, other weights or adapters, or under another salt.
                Or `save` did not write the file.
            OSError: The file cannot be read.
        """
        if not hasattr(handle, "documents"):
            raise TypeError(f"handle: got {type(handle).__name__}, needs the handle of enable_prefix_caching")
        documents: Documents = handle.documents
        model, identity = documents.current()
        try:
            tensors = unpack(Path(path).read_bytes(), _file_key(documents), None)
            content = Content.of(tensors, model.device)
        except ValueError as error:
            raise ValueError(f"path: got a file that cannot be used ({error}), needs one of this model") from error
        if content.adapters != digest_of(content.key, identity[1:] or None):
            raise ValueError("path: got a document of other adapters, needs one of the adapters that are active now")
        documents.check_salt("path", content)
        return cls(documents, content, identity)

    @property
    def content(self) -> Content:
        """The kept keys and values. Raises ValueError if the document was closed."""
        if self._content is None:
            raise ValueError("document: it was closed")
        return self._content

    def _layers(self) -> list[KeptLayer]:
        """Return the layers that are compressed."""
        return [layer for layer in self.content.layers.values() if isinstance(layer, KeptLayer)]


class Documents:
    """The documents of one handle, by identity: on the device up to a number of bytes, then in host memory and on disk.

    A `CompressedDocument` keeps its own content, even if it is evicted here.
    """

    def __init__(self, handle: Any) -> None:
        # The `PrefixCaching`, whose module imports this one.
        self._handle, self._options = handle, handle.options
        self._contents: OrderedDict[bytes, Content] = OrderedDict()  # on the device, the least recently used first
        self._host: OrderedDict[bytes, Content] = OrderedDict()
        self._disk: DiskTier | None = None
        self._lock = threading.Lock()
        self._epoch = object()

    def enter(self, document: CompressedDocument) -> None:
        """Let the calls of this thread or task read a document. Raise ValueError if they cannot read it."""
        document.content  # noqa: B018  raises if it was closed
        model, _ = self._handle._reader()
        serving = getattr(vars(model).get("generate"), "handle", None)
        if getattr(serving, "documents", None) is not self:
            raise ValueError(
                "document: its handle no longer serves model.generate; compress it with the handle that does"
            )
        if not install(model):  # a loaded document may be the first of this process
            raise ValueError("document: the model's attention is not called through transformers' interface")
        enter(document)

    def leave(self, document: CompressedDocument) -> None:
        """End the innermost `with document:` block of a document. Another thread or task may have begun it."""
        own = [visit for visit in visited() if visit.open and visit.document is document]
        others = [visit for visit in open_visits() if visit.document is document]
        here = [visit for visit in others if visit.in_this_thread]
        for visit in (own or here or others)[-1:]:
            leave(visit)
        if not self.entered:
            self._handle._let_go()

    @property
    def model(self) -> Any:
        """The model that reads the documents; None if it was deleted."""
        return self._handle.model

    @property
    def entered(self) -> list[Visit]:
        """The open `with document:` blocks of the model, in all threads, for documents of this or another handle."""
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
        document.content  # noqa: B018  raises if it was closed
        return document

    def look_elsewhere(self, inputs: Any) -> None:
        """Warn if a prompt begins with a document that only another thread has entered.

        Raises:
            ValueError: Another task or context of this thread has entered it, so the call would silently not read it.
        """
        visits = self.entered
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
            self._handle._calls.warn(
                "a document of another thread",
                "a prompt begins with the text of a compressed document that another thread has entered, and is "
                "answered by full attention; enter the document in this thread for it to be read",
            )

    def forget(self) -> None:
        """Invalidate all documents, because the model has changed."""
        self.clear()
        self._disk, self._epoch = None, object()

    def clear(self) -> None:
        """Free the memory of documents that are no longer referenced."""
        with self._lock:
            self._contents.clear()
            self._host.clear()

    def drop(self, content: Content) -> None:
        """Free a closed document. If `disk` was given, it is written there first."""
        with self._lock:
            dropped = [held.pop(content.key) for held in (self._host, self._contents) if content.key in held]
        self._write(dropped[-1:])

    def close(self) -> None:
        """Write all documents to disk, if `disk` was given."""
        with self._lock:
            held = [*self._host.values(), *self._contents.values()]
        self._write(held)

    def current(self) -> tuple[Any, tuple[object, ...]]:
        """Return the model and the identity that its documents must have now: an epoch, and the keys of its adapters.

        Raises:
            ValueError: The model cannot read documents.
        """
        model, adapters = self._handle._reader()
        return model, (self._epoch, *adapters)

    def check_salt(self, name: str, content: Content) -> None:
        """Raise ValueError if a document's salt is not the current one. A document without a salt is open to all."""
        if content.salt and content.salt != digest_of(content.key, value_of(self._handle.salt_setting)):
            raise ValueError(
                f"{name}: got a document of another salt; use it within `with handle.salt(...)` with that salt"
            )

    def check(self, document: CompressedDocument, loop: Loop) -> Content:
        """Return the content of a document that a loop reads.

        Raises:
            ValueError: The document does not belong to the model, salt or prompt. No token was computed.
            UnsupportedError: The loop cannot read documents.
        """
        content = document.content
        _, identity = self.current()
        if document.identity != identity:
            changed = "other adapters" if document.identity[:1] == identity[:1] else "other weights or another model"
            raise ValueError(f"document: was computed by {changed} than those of this call; compress it again")
        self.check_salt("document", content)
        check_loop_over_document(loop, content)
        return content

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
        model, identity = self.current()
        press_text = press_key(press, float(budget))
        salt, adapters = value_of(self._handle.salt_setting), identity[1:]
        text = repr((press_text or os.urandom(16), adapters, salt))
        key = hashlib.sha256(tokens.numpy().tobytes() + text.encode()).digest()
        content = self._find(key, model)
        if content is None:
            try:
                check_compressible(model)
                with own_passes(model), watched_hooks(partial(refuse_if, True, REASON)):
                    content = read(model, tokens, press, float(budget), key)
                digests = digest_of(key, adapters or None), digest_of(key, salt)
                content = content._replace(adapters=digests[0], salt=digests[1])
            except UnsupportedError as error:
                raise ValueError(f"model: its text cannot be compressed: {error}") from error
            if press_text is not None and identity[0] is self._epoch:
                self._keep(content, model)
        return CompressedDocument(self, content, identity)

    def _find(self, key: bytes, model: Any) -> Content | None:
        """Return a document from the device, host memory or disk, put on the device; None if it is in none of them."""
        options = self._options
        if options.disk is not None and self._disk is None:
            folder = Path(options.disk) / f"documents-{self._handle._identity.fingerprint(model)[:32]}"
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
                content = Content.of(tensors, model.device)
            except ValueError:
                return None  # an older version wrote it
            self._keep(content, model)
        return content

    def _keep(self, content: Content, model: Any) -> None:
        """Put a document on the device, and evicted ones into host memory and then to disk."""
        store = self._handle.store
        parts = [] if store is None else store.storage.parts
        host_bytes = self._options.host_blocks * sum(part.bytes_per_block for part in parts)
        with self._lock:
            self._contents[content.key] = content
            self._contents.move_to_end(content.key)
            for old in evict(self._contents, memory_budget(model)):
                self._host[old.key] = Content.of(old.tensors(), torch.device("cpu"))
                self._host.move_to_end(old.key)
            gone = evict(self._host, host_bytes)
        self._write(gone)

    def _write(self, contents: Iterable[Content]) -> None:
        for content in contents:
            if self._disk is not None:
                self._disk.put(content.key, content.tensors())


def _tokens_of(context_ids: Any) -> torch.Tensor:
    """Return the tokens of a text, `[length]` int64 on the host. Raise ValueError for any other input."""
    needs = "needs token ids [1, length] or [length]"
    if isinstance(context_ids, Mapping):  # the output of a tokenizer
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
    return ids.reshape(-1).to("cpu", torch.int64, copy=True)  # the caller may write to its tensor later


def _file_key(documents: Documents) -> bytes:
    """Return the key under which files are packed: the fingerprint of the model."""
    model, _ = documents.current()
    return bytes.fromhex(documents._handle._identity.fingerprint(model))
