"""`transformers serve` with blocks, in this process: its server, its HTTP interface, its loop."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import transformers
from batching_cases import GEMMA3, alone, assert_nothing_held
from generate_cases import VOCAB

from pc.integrations.huggingface import ContinuousBatching, enable_continuous_batching

MISSING = [name for name in ("fastapi", "uvicorn", "openai", "accelerate", "psutil") if find_spec(name) is None]
if MISSING:
    pytest.skip(f"transformers serve needs {', '.join(MISSING)}", allow_module_level=True)

DOCUMENT = Path(__file__).read_text(encoding="utf-8")[:600]
QUESTIONS = ["What is missing?", "Who asks first, and who asks second?"]


@pytest.fixture(scope="module", params=["gemma3", pytest.param("trained", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Gemma 3 with windows and a tokenizer trained on these tests, or of a trained model."""
    if request.param == "trained":
        return str(request.getfixturevalue("trained_model"))
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())  # of characters, so that each token is text that a stream shows
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False)
    bpe.train_from_iterator(
        [p.read_text(encoding="utf-8") for p in sorted(Path(__file__).parent.glob("*.py"))], trainer
    )
    path = str(tmp_path_factory.mktemp("gemma"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(path)
    GEMMA3.build().save_pretrained(path)
    return path


@pytest.fixture
def served(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ContinuousBatching, Any]]:
    """Yield a server's address, the handle of its model, and the model."""
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    found: list[tuple[ContinuousBatching, Any]] = []

    class Batched(model_manager.ModelManager):
        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super()._load_model(*args, **kwargs)
            found.append((enable_continuous_batching(model, num_blocks=128), model))
            return model

    monkeypatch.setattr(model_manager, "ModelManager", Batched)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = Serve(folder, continuous_batching=True, device="cpu", port=port, non_blocking=True, log_level="error")
    deadline = time.monotonic() + 60
    while not server.server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    yield f"http://localhost:{port}", *found[0]
    server.kill_server()
    assert_nothing_held(found[0][0])


def ask(address: str, folder: str, question: str, **options: Any) -> bytes:
    body = {"model": folder, "prompt": f"{DOCUMENT}\n{question}", "max_tokens": 12, "temperature": 0.0} | options
    request = Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return answer.read()


def text(answer: bytes) -> str:
    return str(json.loads(answer)["choices"][0]["text"])


def streamed(answer: bytes) -> str:
    events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_two_clients_share_a_document(folder: str, served: tuple[str, ContinuousBatching, Any]) -> None:
    address, handle, model = served
    tokenizer = transformers.AutoProcessor.from_pretrained(folder)
    prompts = [tokenizer(f"{DOCUMENT}\n{question}")["input_ids"] for question in QUESTIONS]
    want = [tokenizer.decode(answer, skip_special_tokens=True) for answer in alone(model, prompts, new=12)]
    assert all(want)
    assert want[0] != want[1]
    shared = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)

    assert text(ask(address, folder, QUESTIONS[0])) == want[0]
    assert handle.stats().hit_tokens == 0
    assert text(ask(address, folder, QUESTIONS[1])) == want[1]
    assert handle.stats().hit_tokens == shared // 16 * 16 >= 128

    with ThreadPoolExecutor(4) as clients:  # concurrently, streamed, all from blocks
        found = list(clients.map(lambda n: ask(address, folder, QUESTIONS[n % 2], stream=True), range(4)))
    assert [streamed(answer) for answer in found] == want * 2
    assert handle.stats().queried_tokens == sum(map(len, prompts)) * 3
    with urlopen(f"{address}/health", timeout=10) as health:
        assert health.status == 200
