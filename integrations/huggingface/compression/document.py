"""What is kept of a compressed document, and the cache by which a call of generate reads it.

Each KV head of a layer is a sequence of its own over blocks of one head, so heads keep as many tokens as they need and
what they do not keep takes no memory. No request writes there: its own tokens are in blocks of all heads behind it,
and the two attentions are merged by their log-sum-exps, without rounding and without a copy.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ....cache.tiers.payload import pack, unpack
from ....triton_ops import attention_plan, merge_attention, paged_attention_with_lse, sparse_gap_attention_with_lse
from ....triton_ops._attention.cpu_masked import flash_kernel
from ....triton_ops._triton import KERNELS_ON_CPU
from ..api import CACHE, CACHE_NAMES, Cache, CacheLayerMixin, DynamicSlidingWindowLayer
from ..calls import refuse_if
from ..contiguous.tiers import fingerprint, replaced
from ..paged.batch import needs_plan
from ..paged.dispatch import MarkedCall, PagedPass, mark

BLOCK = 16  # tokens of a block


class KeptLayer(NamedTuple):
    """What the heads of one layer keep of a document."""

    keys: torch.Tensor  # [num_blocks, BLOCK, 1, head_dim]
    values: torch.Tensor  # the same
    tables: torch.Tensor  # [num_kv_heads, max_blocks] int32, -1 behind a head's blocks
    kept: torch.Tensor  # [num_kv_heads] int32: tokens of each head


class WindowLayer(NamedTuple):
    """The last tokens of a layer with a window, which are all it reads: it is not compressed."""

    keys: torch.Tensor  # [1, num_kv_heads, tokens, head_dim]
    values: torch.Tensor
    window: torch.Tensor  # [] int64: its size


class Content(NamedTuple):
    """A document as it is kept, in memory, in a tier or in a file: all of it or nothing."""

    layers: dict[int, KeptLayer | WindowLayer]
    tokens: torch.Tensor  # [length] int64, on the host
    position: int  # of the token behind it: less than length where a press rotated keys to new places
    peak_nbytes: int  # bytes of keys and values at most while it was read
    key: bytes  # its identity

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it by name."""
        named = {f"{i} {name}": t for i, layer in self.layers.items() for name, t in layer._asdict().items()}
        numbers, key = torch.tensor([self.position, self.peak_nbytes]), torch.tensor(list(self.key), dtype=torch.uint8)
        return named | {"tokens": self.tokens, "numbers": numbers, "key": key}

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Content:
        """What `tensors` gave, on a device."""
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, part = name.partition(" ")
            if part:
                layers.setdefault(int(index), {})[part] = tensor.to(device)
        kinds: dict[int, Any] = {i: KeptLayer if "tables" in parts else WindowLayer for i, parts in layers.items()}
        made = {i: kinds[i](**parts) for i, parts in sorted(layers.items())}
        position, peak = tensors["numbers"].tolist()
        return cls(made, tensors["tokens"].cpu(), position, peak, bytes(tensors["key"].tolist()))


def keep(keys: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor) -> KeptLayer:
    """Packs `[num_kv_heads, tokens, head_dim]` of which heads keep `chosen [num_kv_heads, tokens]` bool."""
    lens = chosen.sum(-1, dtype=torch.int32)
    counts, blocks = lens.tolist(), (-(-lens // BLOCK)).tolist()
    tables = torch.full((len(counts), max(*blocks, 1)), -1, dtype=torch.int32)
    packed = [side.new_zeros(sum(blocks), BLOCK, 1, side.shape[-1]) for side in (keys, values)]
    first = 0
    for head, (count, own) in enumerate(zip(counts, blocks, strict=True)):
        tables[head, :own] = torch.arange(first, first + own, dtype=torch.int32)
        for side, pool in zip((keys, values), packed, strict=True):
            pool[first : first + own].view(-1, side.shape[-1])[:count] = side[head, chosen[head]]
        first += own
    return KeptLayer(packed[0], packed[1], tables.to(keys.device), lens)


class CompressedDocument:
    """A text of which each KV head keeps the tokens a press chose; from `handle.compress`.

    Within it, this thread's `model.generate` answers prompts that begin with the document's tokens. Any number of
    calls may read it at once, in any threads, each as if it were alone.

    Attributes:
        length: Tokens of the document.
        nbytes: Bytes of what is kept.
        kept: Tokens that each head of each layer keeps, `[layers][heads]`; layers with a window, which stay whole, are
            left out.
        peak_nbytes: Bytes of keys and values at most while it was read.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> handle = enable_prefix_caching(model, num_blocks=64)
        >>> context = torch.arange(1, 61)[None]  # [1, 60]
        >>> document = handle.compress(context, press="snapkv", budget=0.5)
        >>> sum(document.kept[0])  # of 4 heads with 60 tokens each
        120
        >>> prompt = torch.cat([context, torch.tensor([[7, 8, 9]])], 1)
        >>> with document:
        ...     tokens = model.generate(prompt, max_new_tokens=4)
        >>> tokens.shape
        torch.Size([1, 67])
    """

    def __init__(self, documents: Any, content: Content, identity: object) -> None:
        self.documents, self._content, self._identity = documents, content, identity

    @property
    def length(self) -> int:  # noqa: D102  see Attributes
        return len(self._open().tokens)

    @property
    def key(self) -> bytes:
        """What it is: its tokens, the press and its fields, adapters, salt."""
        return self._open().key

    @property
    def nbytes(self) -> int:  # noqa: D102
        return self._open().nbytes

    @property
    def peak_nbytes(self) -> int:  # noqa: D102
        return self._open().peak_nbytes

    @property
    def kept(self) -> list[list[int]]:  # noqa: D102
        return [layer.kept.tolist() for layer in self._open().layers.values() if isinstance(layer, KeptLayer)]

    def __enter__(self) -> CompressedDocument:
        self._open()
        self.documents.enter(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.documents.leave(self)

    def close(self) -> None:
        """Gives its memory back as soon as no call reads it any more; later uses raise ValueError."""
        self._content = None  # type: ignore[assignment]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file for its owner alone (0600); one that is there is replaced.

        Raises:
            ValueError: The document was closed.
            OSError: The file cannot be written.
        """
        data = pack(_file_key(self.documents), self._open().tensors(), None)
        with replaced(path) as file:
            file.write(data)

    @classmethod
    def load(cls, handle: Any, path: str | os.PathLike[str]) -> CompressedDocument:
        """A document from a file of `save`.

        Args:
            handle: Of `enable_prefix_caching`, for the model that read it.
            path: The file.

        Raises:
            ValueError: It was read by another model, or other weights, or is no file of `save`.
            OSError: The file cannot be read.
        """
        documents = handle._serving.documents
        reader, identity = documents.current()
        try:
            tensors = unpack(Path(path).read_bytes(), _file_key(documents), None)
        except ValueError as error:
            raise ValueError(f"path: got a file that cannot be used ({error}), needs one of this model") from error
        return cls(documents, Content.of(tensors, reader.model.device), identity)

    def _open(self) -> Content:
        if self._content is None:
            raise ValueError("document: it was closed")
        return self._content

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of generate by which a call reads the document; ValueError: it cannot."""
        content = self._open()
        given = dict(arguments)
        ids = given.pop("inputs", None) if given.get("inputs") is not None else given.get("input_ids")
        for name in (*CACHE_NAMES, "inputs_embeds", "position_ids", "assistant_model"):
            if given.get(name) is not None:
                raise ValueError(f"{name}: got one, needs none for a call over a compressed document")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            raise ValueError("input_ids: needs a tensor [batch, length] for a call over a compressed document")
        length = len(content.tokens)
        if ids.shape[1] <= length or not bool((ids[:, :length].cpu() == content.tokens).all()):
            raise ValueError(
                f"input_ids: got {ids.shape[1]} tokens, needs the {length} of the compressed document and more behind "
                "them, in every row"
            )
        padding = given.get("attention_mask")
        if padding is not None and not bool(padding.all()):
            raise ValueError("attention_mask: got padded rows, needs questions of one length; ask others one by one")
        # Positions follow from the mask: where keys were turned to new places, what is behind goes on from there.
        places = torch.ones_like(ids)
        places[:, : length - content.position] = 0
        return given | {"input_ids": ids, "attention_mask": places, CACHE: Questions(content)}


def _file_key(documents: Any) -> bytes:
    reader, _ = documents.current()
    return bytes.fromhex(fingerprint(reader.model))


class Questions(Cache):  # type: ignore[misc]  # transformers is untyped here
    """What a call of generate has: a document, which it shares, and tokens of its own behind it."""

    def __init__(self, content: Content) -> None:
        self.length = len(content.tokens)
        kept = content.layers.values()
        super().__init__(
            layers=[OwnLayer(self, x) if isinstance(x, KeptLayer) else _WindowOfDocument(x, self.length) for x in kept]
        )
        self._step: SharedTables | None = None

    def step(self, layer: OwnLayer, tokens: int) -> SharedTables:
        """The tables of a pass, made for its first layer."""
        key = (*layer.buffers[0].shape[:2], layer.tokens, tokens)
        if self._step is None or self._step.key != key:
            self._step = SharedTables(key, layer.buffers[0].device)
        return self._step


class SharedTables:
    """What the layers of one pass share: `tokens` queries of each of `batch` rows, the last of `total` own tokens."""

    def __init__(self, key: tuple[int, ...], device: torch.device) -> None:
        self.key, self.device = key, device
        batch, room, self.total, self.queries = key
        self.tables = self._range(batch * room // BLOCK).view(batch, -1)
        self.seq_lens = torch.full((batch,), self.total, dtype=torch.int32, device=device)
        self.starts = self._range(batch + 1) * self.queries
        self._of_heads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def _range(self, end: int) -> torch.Tensor:
        return torch.arange(end, dtype=torch.int32, device=self.device)

    def of_heads(self, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where each head's queries begin, of all rows one behind the other; a plan for the own tokens of layers."""
        if heads not in self._of_heads:
            starts = self._range(heads + 1) * (self.queries * self.key[0])
            self._of_heads[heads] = starts, _plan(self.tables, self.seq_lens, self.starts, num_kv_heads=heads)
        return self._of_heads[heads]


def _plan(tables: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, **options: Any) -> torch.Tensor | None:
    return attention_plan(tables, lens, starts, BLOCK, **options) if needs_plan(tables.device) else None


class OwnLayer(CacheLayerMixin, PagedPass):  # type: ignore[misc]
    """A layer's tokens of one call behind a document's: in `[batch, room, num_kv_heads, head_dim]`, read as blocks.

    Its marked keys lead to it: attention of the layer's queries over the document and over its own tokens.
    """

    is_sliding, is_compileable = False, False

    def __init__(self, questions: Questions, document: KeptLayer) -> None:
        super().__init__()
        self.questions, self.document, self.tokens = questions, document, 0
        self.buffers: tuple[torch.Tensor, ...] = ()  # until the first tokens
        self.begin: tuple[Any, int] = (None, 0)  # what the first of them are read from, and the layer's number there
        self._laid_out: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None

    @functools.cached_property
    def rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each head keeps of the document, `[1, 1, tokens, head_dim]`, where PyTorch may read it as it lies."""
        keys, values, tables, kept = self.document
        if KERNELS_ON_CPU or not keys.is_cpu or not kept.all() or keys.shape != values.shape:
            return []
        spans = [slice(first * BLOCK, first * BLOCK + count) for first, count in zip(tables[:, 0], kept, strict=True)]
        flat = [side.flatten(0, 1).transpose(0, 1)[None] for side in (keys, values)]
        return [(flat[0][:, :, span], flat[1][:, :, span]) for span in spans]

    def laid_out(self, count: int, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The document's tables, lengths and plan for `count` queries a head: those of the pass before, mostly."""
        if self._laid_out is None or self._laid_out[0] != count:
            # A length includes the queries: a hole before a head's tokens makes it long enough.
            hole = -(-count // BLOCK) if count > 1 else 0
            tables, lens = pad(self.document.tables, (hole, 0), value=-1), self.document.kept + hole * BLOCK
            self._laid_out = count, tables, lens, _plan(tables, lens, starts, causal=False, num_kv_heads=1)
        return self._laid_out[1:]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to prepare."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Writes new keys and values; the key that it gives leads to this layer."""
        end = self.tokens + key_states.shape[2]
        if not self.buffers or end > self.buffers[0].shape[1]:
            room = -(-(end + max(64, end // 2)) // BLOCK) * BLOCK
            before, self.buffers = self.buffers, tuple(_empty(new, room) for new in (key_states, value_states))
            for old, buffer in zip(before, self.buffers, strict=False):
                buffer[:, : self.tokens] = old[:, : self.tokens]
            if self.tokens and not before:
                source, index = self.begin
                source.read(index, *self.buffers)
        for new, buffer in zip((key_states, value_states), self.buffers, strict=True):
            buffer[:, self.tokens : end] = new.transpose(1, 2)
        self.tokens = end
        return mark(key_states.view_as(key_states), self), value_states

    def get_seq_length(self, *_: Any) -> int:
        """Tokens of the document and its own."""
        return self.questions.length + self.tokens

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """See `CacheLayerMixin`."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """There is none."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets own tokens, the last ones; ValueError: there are not so many."""
        if abs(tokens_to_remove) > self.tokens:
            raise ValueError(
                f"tokens_to_remove: got {tokens_to_remove}, needs at most {self.tokens}: a document is whole"
            )
        self.tokens -= abs(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Rows in another order, or some of them."""
        self.buffers = tuple(buffer[indices.to(buffer.device)] for buffer in self.buffers)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times."""
        self.buffers = tuple(buffer.repeat_interleave(repeats, 0) for buffer in self.buffers)

    def attend(self, call: MarkedCall) -> torch.Tensor:
        """See `PagedPass`."""
        refuse_if(call.window is not None, "a layer with a window reads a compressed document")
        query, scale, softcap, sinks = call.query, call.scale, call.softcap, call.sinks
        document = self.document
        batch, heads, tokens, _ = query.shape
        if tokens == 1 and not softcap and sinks is None and self.rows:
            return self._decode(query, scale)
        kv_heads, step = len(document.kept), self.questions.step(self, tokens)
        starts, plan = step.of_heads(kv_heads)
        own_keys, own_values = (buffer.view(-1, BLOCK, *buffer.shape[2:]) for buffer in self.buffers)
        rows = query.transpose(1, 2).flatten(0, 1)
        batch_of_own = (own_keys, own_values, step.tables, step.seq_lens, step.starts, scale)
        bounds: dict[str, Any] = {"max_query_len": tokens, "max_seq_len": step.total, "plan": plan}
        own = paged_attention_with_lse(rows, *batch_of_own, softcap=softcap, sinks=sinks, **bounds)
        # Of all rows the queries of one KV head, one behind the other: they read the same kept tokens.
        of_heads = query.unflatten(1, (kv_heads, -1)).permute(1, 0, 3, 2, 4).flatten(0, 2)
        count = batch * tokens
        tables, kept, plan = self.laid_out(count, starts)
        batch_of_heads = (document.keys, document.values, tables, kept, starts, None, scale)
        bounds = {"max_query_len": count, "max_seq_len": tables.shape[1] * BLOCK, "plan": plan}
        read = sparse_gap_attention_with_lse(of_heads, *batch_of_heads, causal=False, softcap=softcap, **bounds)
        out, lse = (t.unflatten(0, (kv_heads, count)).transpose(0, 1).flatten(1, 2) for t in read)
        merged, _ = merge_attention(out, lse, *own)
        return merged.view(batch, tokens, heads, -1)

    def _decode(self, query: torch.Tensor, scale: float) -> torch.Tensor:
        """One token on a CPU: heads lie in a row there, and one call for each costs less than what operators check."""
        batch, heads, _, width = query.shape
        grouped = query.reshape(batch, len(self.rows), -1, width)
        keys, values = (buffer[:, : self.tokens].transpose(1, 2) for buffer in self.buffers)
        own, own_lse = flash_kernel(grouped, keys, values, False, scale)
        of_heads = grouped.transpose(0, 1).reshape(len(self.rows), 1, 1, -1, width)
        read = [flash_kernel(q, k, v, False, scale) for q, (k, v) in zip(of_heads, self.rows, strict=True)]
        shape = (len(read), batch, -1)
        out = torch.cat([part for part, _ in read]).view(*shape, width).transpose(0, 1)
        lse = torch.cat([part for _, part in read]).view(shape).transpose(0, 1)
        weight = torch.sigmoid(own_lse - lse)[..., None].to(out.dtype)
        return torch.lerp(out, own, weight).reshape(batch, 1, heads, width)


def _empty(new: torch.Tensor, room: int) -> torch.Tensor:
    batch, heads, _, width = new.shape
    return new.new_empty(batch, room, heads, width)


class _WindowOfDocument(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The last tokens of a document, for as many rows as ask."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, kept: WindowLayer, length: int) -> None:
        super().__init__(int(kept.window))
        self.lazy_initialization(kept.keys, kept.values)
        self.keys, self.values, self.cumulative_length = kept.keys, kept.values, length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own."""
        if len(self.keys) != len(key_states):
            self.keys, self.values = (t.expand(len(key_states), -1, -1, -1) for t in (self.keys, self.values))
        return super().update(key_states, value_states, *args, **kwargs)
