"""Run `transformers serve` over blocks: two clients ask about one document, and the second reads it from the cache.

The server, its HTTP interface and its loop are transformers' own (`pip install 'transformers[serving]'`). Only the
lines of `Batched` differ from `transformers serve --continuous-batching`. The model has sliding windows beside full
attention; transformers itself shares no prefixes of such models.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import small_model
import torch

from pc.integrations.huggingface import ContinuousBatching, enable_continuous_batching

HANDLES: list[ContinuousBatching] = []


def save_gemma(folder: str) -> None:
    """Save a small untrained Gemma 3 and a tokenizer for `from_pretrained`."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tokenizer = small_model.load_untrained()[1]
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def start(folder: str) -> tuple[Any, str]:
    """Start the server in a thread, and return its address."""
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    class Batched(model_manager.ModelManager):  # type: ignore[misc]
        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super()._load_model(*args, **kwargs)
            HANDLES.append(enable_continuous_batching(model, num_blocks=256))
            return model

    model_manager.ModelManager = Batched
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = Serve(folder, continuous_batching=True, device="cpu", port=port, non_blocking=True, log_level="error")
    while not server.server.started:
        time.sleep(0.1)
    return server, f"http://localhost:{port}"


def ask(address: str, folder: str, prompt: str) -> str:
    """Return the answer that one client gets."""
    body = {"model": folder, "prompt": prompt, "max_tokens": 16, "temperature": 0.0}
    request = Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer: str = json.loads(urlopen(request, timeout=120).read())["choices"][0]["text"]
    return answer


def main() -> None:
    """Let two clients ask about one document."""
    document = Path(__file__).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        save_gemma(folder)
        server, address = start(folder)
        handle = HANDLES[0]
        try:
            for client, question in (("alice", "What does it start?"), ("bob", "How many clients are there?")):
                before = handle.stats()
                ask(address, folder, f"{document}\n{question}")
                after = handle.stats()
                tokens = after.queried_tokens - before.queried_tokens
                print(f"{client}: {tokens} tokens, {after.hit_tokens - before.hit_tokens} of them found in blocks")
        finally:
            server.kill_server()


if __name__ == "__main__":
    main()
