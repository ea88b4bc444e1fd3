"""A compressed document as users see it: what it keeps, its file, and `with document:`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....cache.tiers.payload import pack, unpack
from ..contiguous.tiers import fingerprint, replaced
from .kept import Content, KeptLayer, digest_of, tokens_of

if TYPE_CHECKING:
    from .reading import Documents


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


def _file_key(documents: Documents) -> bytes:
    reader, _ = documents.current()
    return bytes.fromhex(fingerprint(reader.model))
