"""Decode steps and their CUDA graphs, one for each batch size and width of block tables, in powers of two.

A graph replays the captured kernels of a step on the same memory and with the same scalar arguments. Therefore
everything that changes between steps is in the buffers of a `DecodeBatch`. Everything else that a step
depends on (weights, adapters, settings) is compared before each call of generate. If it has changed, the graphs are
dropped.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..api import global_hooks
from ..store.storage import ModelStorage
from ..support import changing_rope, float32_precision
from .packed import decode
from .passes import DecodeBatch

WARM_STEPS = 3  # eager steps of a shape before its capture, which compile and choose kernels
MAX_ROWS = 256  # rows of the largest graph; a larger batch keeps a GPU busy without one
MIN_WIDTH = 16  # columns of the narrowest block tables, so that short sequences share a graph

_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._unsafe_index.Tensor)

DecodeStep = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class GraphReport:
    """The ways in which decode steps ran since caching was enabled.

    Attributes:
        captured: Number of graphs in memory.
        replays: Number of steps that replayed a graph.
        eager_steps: Number of steps that ran the model in Python.
        reason: The reason why steps of the last call were not captured. None: they were, or will be after a few steps.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> report = enable_prefix_caching(model, num_blocks=64).graphs
        >>> report.captured, report.replays  # none on a CPU; `report.reason` says why
        (0, 0)
    """

    captured: int
    replays: int
    eager_steps: int
    reason: str | None


class CudaCapturer:
    """A maker of CUDA graphs. It has its own stream, and one memory pool for all graphs."""

    # Graphs of one pool overwrite each other's results, so each must be copied before the next replay
    # ("CUDA semantics" in torch's documentation).

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, step: DecodeStep) -> torch.Tensor:
        """Run a step on the capturer's stream, in order with the work of the current stream, and return its result."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                result = step()
            current.wait_stream(self._stream)
        return result

    def capture(self, step: DecodeStep) -> DecodeStep:
        """Capture a step without running it, and return a function that replays it into the same result."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            state = generator.clone_state()
            try:
                # After a failed capture torch leaves its stream current; the outer block restores the stream.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
                ):
                    result = step()
            except BaseException:
                generator.graphsafe_set_state(state)  # torch does not end the generator's capture either
                raise

        def replay() -> torch.Tensor:
            with torch.cuda.device(self._device):
                graph.replay()
            return result

        return replay


CAPTURERS: dict[str, Callable[[torch.device], CudaCapturer]] = {"cuda": CudaCapturer}  # by type of device


class DecodeSteps:
    """The decode steps of one model over one set of blocks, captured where possible."""

    # After a failed capture, `on_failure` gets the reason, and no other capture is tried.

    def __init__(self, wanted: bool, on_failure: Callable[[str], None]) -> None:
        self.reason: str | None = None if wanted else "cuda_graphs=False"
        self._wanted = wanted
        self._on_failure = on_failure
        self._failure: str | None = None
        self._state: object = None
        self._capturer: CudaCapturer | None = None
        # Buffers of steps that may be captured, by number of rows and width; for them, steps so far and graphs.
        self._batches: dict[tuple[int, int], DecodeBatch] = {}
        self._warmed: Counter[DecodeBatch] = Counter()
        self._graphs: dict[DecodeBatch, DecodeStep] = {}
        self._eager: DecodeBatch | None = None  # buffers of the latest step that may not be captured
        self._replays = self._eager_steps = 0
        self.lock = threading.RLock()  # held during each pass, because calls of all threads share buffers

    def report(self) -> GraphReport:
        """Return the counts, and the reason why steps are not captured."""
        return GraphReport(len(self._graphs), self._replays, self._eager_steps, self.reason)

    def drop(self) -> None:
        """Drop all graphs and buffers."""
        with self.lock:
            self._batches.clear()
            self._warmed.clear()
            self._graphs.clear()
            self._eager = self._capturer = None

    def refuse(self, reason: str) -> None:
        """Set the reason why packed passes do not serve this model, so that nothing is captured."""
        self._failure = self.reason = reason

    def prepare(self, model: Any, state: object) -> None:
        """Decide whether the steps of a call are captured, and drop graphs that are no longer valid.

        `state` identifies the weights and adapters, which `baked_in` does not cover. Call this before a call's steps.
        """
        if not self._wanted:
            return
        if model.device.type not in CAPTURERS:
            self.reason = f"the model is on {model.device}"
        else:
            self.reason = self._failure or why_eager(model)
        state = None if self.reason else (state, baked_in(model))
        with self.lock:
            if state != self._state:
                self.drop()
                self._state = state

    def run(
        self,
        model: Any,
        storage: ModelStorage,
        tables: Sequence[Sequence[np.ndarray]],
        positions: np.ndarray,
        tokens: Sequence[int],
        slots: Sequence[np.ndarray],
        check: Callable[[], object],
    ) -> torch.Tensor:
        """Run one step and return its logits, `[len(positions), vocabulary]`, which no later step overwrites.

        For each group, `tables` has the block table of each row, and `slots` the slots of the new tokens. `check`
        compares the model with what it was. It runs before an eager step, whose code may change the model, and during
        a replay, so that the device does not wait for it.
        """
        count, width = len(positions), _power_of_two(max(map(len, tables[0])), MIN_WIDTH)
        if self.reason is None and count <= MAX_ROWS:
            key = (_power_of_two(count), width)
            if key not in self._batches:
                self._batches[key] = _buffers(model, storage, *key)
            batch = self._batches[key]
            batch.write(tables, positions, tokens, slots)
            return self._step(model, storage, batch, check)[:count].clone()
        if self._eager is None or (self._eager.num_rows, self._eager.width) != (count, width):
            self._eager = _buffers(model, storage, count, width)
        self._eager.write(tables, positions, tokens, slots)
        self._eager_steps += 1
        check()
        return decode(model, storage, self._eager)

    def _step(self, model: Any, storage: ModelStorage, batch: DecodeBatch, check: Callable[[], object]) -> torch.Tensor:
        """Replay the graph of a batch's buffers, or run an eager step before its capture, and return the logits."""
        step = functools.partial(decode, model, storage, batch)
        if self._capturer is None:
            self._capturer = CAPTURERS[model.device.type](model.device)
        if batch not in self._graphs:
            check()
            if self._warmed[batch] == WARM_STEPS:
                try:
                    self._graphs[batch] = self._capturer.capture(step)
                except Exception as error:
                    self._fail(f"{type(error).__name__}: {error}")
        if batch in self._graphs:
            self._replays += 1
            result = self._graphs[batch]()
            check()
            return result
        self._eager_steps += 1
        if self.reason is not None:
            return step()  # a failed capture wrote at most the same KV to the same slots
        self._warmed[batch] += 1
        if self._warmed[batch] < WARM_STEPS:
            return self._capturer.warm(step)
        with Rehearsal() as rehearsal:
            result = self._capturer.warm(step)
        if rehearsal.problem:
            self._fail(rehearsal.problem)
        return result

    def _fail(self, why: str) -> None:
        """Stop capturing for good, drop all graphs, and report the reason."""
        self.reason = self._failure = f"its decode step cannot be captured: {why}"
        self.drop()
        self._on_failure(self._failure)


def _buffers(model: Any, storage: ModelStorage, num_rows: int, width: int) -> DecodeBatch:
    """Return buffers on the model's device for steps of this shape."""
    batch = DecodeBatch(num_rows, width, pinned=model.device.type == "cuda", groups=len(storage.groups))
    batch.on(model.device)
    return batch


def _power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def why_eager(model: Any) -> str | None:
    """Return why decode steps of a model cannot be captured in its current state; None if no reason is known."""
    device = model.device
    if any(t.device != device for t in itertools.chain(model.parameters(), model.buffers())):
        return f"some of the model is not on {device}"
    if kind := changing_rope(model.config):
        return f"{kind} rotary embeddings change with the length"
    if any(global_hooks()):
        return "a hook on all modules is registered"
    for name, m in model.named_modules():
        if m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m):
            return f"{name or 'the model'} has a hook or a forward of its own"
    return None


def baked_in(model: Any) -> object:
    """Return everything that a captured step depends on besides weights and adapters, for comparison."""
    return (
        [(id(buffer), buffer.data_ptr()) for buffer in model.buffers()],
        str(model.config.to_dict()),
        getattr(model.config, "_experts_implementation", None),
        float32_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


class Rehearsal(TorchDispatchMode):
    """A mode that records in `problem` the first operator that makes the host wait for the device.

    Such an operator would break a capture in the middle. A step under this mode still has the right result.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and check it."""
        result = func(*args, **(kwargs or {}))
        if self.problem is None:
            self.problem = _problem(func, (args, kwargs), result)
        return result


def _problem(func: Any, arguments: Any, result: Any) -> str | None:
    """Return why an operator cannot be captured, or None."""
    if torch.Tag.data_dependent_output in func.tags:
        return f"{func} reads a value from the device"
    tensors = [t for t in tree_leaves((arguments, result)) if isinstance(t, torch.Tensor)]
    masks = func in _INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(arguments[0][1:2]))
    if masks or (torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXING):
        return f"{func} has a result whose shape depends on values"
    # A scalar on the host is a kernel argument, except in a copy.
    devices = {t.device for t in tensors if t.dim() or func in _COPIES}
    return f"{func} copies between {', '.join(sorted(map(str, devices)))}" if len(devices) > 1 else None
