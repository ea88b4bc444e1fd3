"""What users hold of one model: counts, salts, files, and the way back."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from ...cache import CacheManager
from .calls import ServedStats
from .contiguous.serve import Contiguous
from .paged.graphs import GraphReport
from .serving import Serving


class PrefixCaching(Serving):
    """What `enable_prefix_caching` returns.

    Attributes:
        unsupported: Why the model cannot be served; None when it can.
        last_requests: A report per row of the last call, in the order of the batch; empty when it was not served here.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from pc.integrations.huggingface import enable_prefix_caching
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
        >>> with enable_prefix_caching(model, num_blocks=64) as handle:
        ...     prompt = torch.arange(3, 43)[None]  # [1, 40]
        ...     tokens = [model.generate(prompt, max_new_tokens=4) for turn in range(2)]
        >>> torch.equal(*tokens), handle.stats().calls_served
        (True, 2)
    """

    def __enter__(self) -> PrefixCaching:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disable()

    @property
    def manager(self) -> CacheManager | None:
        """Hands out the blocks; None when the model cannot be served."""
        return None if self._serving is None else self._serving.store.manager

    @property
    def graphs(self) -> GraphReport:
        """How decode steps ran: captured in CUDA graphs, or eagerly and why."""
        return self._steps.report()

    def stats(self) -> ServedStats:
        """Counts of the cache since it was last empty, and of all calls: served, and handed back by reason.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.stats().calls_served, handle.stats().queried_tokens
            (1, 40)
        """
        with self._lock:
            if self._serving is not None:
                self._serving.store.sweep()
            return self._calls.stats(self.manager)

    def reset(self) -> None:
        """Forgets every cached block; calls under way go on with those they have.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.reset()
            >>> handle.stats().cached_blocks
            0
        """
        with self._lock:
            model = self._model()
            if self._serving is not None and model is not None:
                self._serving.empty(model)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Writes every cached block to a file that nobody else may read: it holds what prompts can be guessed from.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            How many blocks it has.

        Raises:
            ValueError: The model is not served, or by packed passes, whose blocks stay on the device.
            OSError: The file cannot be written.

        Examples:
            >>> import tempfile
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            >>> count
            2
        """
        serving, model, adapters = self._saving()
        return serving.save(model, adapters, path)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Takes the blocks of a file into host memory, from where prompts read them.

        Args:
            path: A file of `save`.

        Returns:
            How many blocks it has.

        Raises:
            ValueError: The file holds KV of another model, weights, dtype, adapter or block size, or is none of
                `save`; or the model is not served, or by packed passes.
            OSError: The file cannot be read.

        Examples:
            >>> import tempfile
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     count = handle.save(f"{folder}/blocks")
            ...     handle.disable()
            ...     handle = enable_prefix_caching(model, num_blocks=64)  # another process, later
            ...     count = handle.load(f"{folder}/blocks")
            >>> tokens = model.generate(prompt, max_new_tokens=4)
            >>> handle.last_requests
            [RequestReport(prompt_tokens=40, cached_tokens=32, cached_spans=((0, 32),))]
        """
        serving, model, adapters = self._saving()
        return serving.load(model, adapters, path)

    def _saving(self) -> tuple[Contiguous, Any, tuple[str, ...]]:
        model = self._model()
        placed = None if model is None else self._placed_serving(model)
        serving, adapters = (None, ()) if placed is None else self._current(model)
        if not isinstance(serving, Contiguous):
            raise ValueError("model: needs one that is served over contiguous copies, to save or load its blocks")
        return serving, model, adapters

    def salt(self, salt: Any) -> AbstractContextManager[None]:
        """Within it, this thread's calls share blocks only with calls of the same salt.

        Args:
            salt: str, bytes or int.

        Raises:
            TypeError: `salt` is None or of another type.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> for tenant in ("one", "other", "one"):
            ...     with handle.salt(tenant):
            ...         tokens = model.generate(prompt, max_new_tokens=4)
            ...     print(tenant, handle.last_requests[0].cached_tokens)
            one 0
            other 0
            one 32
        """
        return self._salts.within(salt)

    def hint(self, returns: float | None) -> AbstractContextManager[None]:
        """Within it, what this thread knows of its conversations is told to the eviction policy when its calls end.

        Args:
            returns: Probability that the conversation of a call goes on soon, 0 to 1; None: unknown. With 0 the
                policies that heed it (`hazard`, `priority`) give up first what nobody else used.

        Raises:
            TypeError: `returns` is neither a number nor None.
            ValueError: `returns` is not between 0 and 1.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64, policy="priority")
            >>> with handle.hint(returns=0):  # the last question of this user
            ...     tokens = model.generate(torch.arange(3, 43)[None], max_new_tokens=4)
            >>> tokens.shape
            torch.Size([1, 44])
        """
        return self._hints.within(returns)

    def disable(self) -> None:
        """Gives the model its own `generate` back and frees the blocks; a second call does nothing.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> handle.disable()
            >>> "generate" in vars(model)  # its class's own again
            False
        """
        with self._lock:
            model, self._disabled = self._model(), True
            if isinstance(self._serving, Contiguous):
                self._serving.close()
            self._serving = None
            self._steps.drop()
            if model is not None and getattr(vars(model).get("generate"), "handle", None) is self:
                del vars(model)["generate"]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate, over the cache where it can be served.

        Examples:
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> from pc.integrations.huggingface import enable_prefix_caching
            >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
            >>> handle = enable_prefix_caching(model, num_blocks=64)
            >>> prompt = torch.arange(3, 43)[None]  # [1, 40]
            >>> handle.generate(prompt, max_new_tokens=4).shape  # what model.generate is now
            torch.Size([1, 44])
        """
        return self._generate(*args, **kwargs)
