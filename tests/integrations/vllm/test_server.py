"""A server with all features: the page's examples, clients that disconnect, full disks, and killed processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from vllm_page import BLOCKS, PAGE, commands

from benchmarks.engines import vllm_server
from pc.triton_ops._core.runtime import INTERPRET

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRET, reason="a server is not run in the interpreter"),
    pytest.mark.skipif(not all(map(find_spec, vllm_server.NEEDED)), reason="vLLM's server is not installed: make vllm"),
    pytest.mark.skipif(not list(entry_points(group="vllm.general_plugins", name="pc")), reason="pc is not installed"),
]

SMALL = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--block-size", "32"),
    *("--num-gpu-blocks-override", "32", "--kv-cache-memory-bytes", str(64 << 20), "--max-num-batched-tokens", "256"),
    *("--max-num-seqs", "8", "--served-model-name", "Qwen/Qwen3-0.6B"),
    *("--scheduler-cls", "vllm_noting.NotingPolicyScheduler"),
]
PAGES_FOLDERS = {"/mnt/shared/rows": "rows", "/mnt/shared/kv": "kv"}


def from_the_page(option, folder):
    """Return the words after an option in the page's only command that has it, with another folder."""
    given = [words[words.index(option) + 1] for words in commands("vllm serve") if option in words]
    (text,) = [each for each in given if "OffloadingConnector" not in each]  # vLLM's own connector, for GPUs
    for name, own in PAGES_FOLDERS.items():
        text = text.replace(name, str(folder / own))
    return [option, text]


@contextlib.contextmanager
def serving(model, folder):
    """The page's servers of hidden states and of the connector in one, with our kernels and the default policy."""
    options = [*from_the_page("--additional-config", folder), *from_the_page("--kv-transfer-config", folder)]
    variables = {"PC_VLLM": "attention,eviction,hidden_states"}
    with vllm_server.serving(model, [*SMALL, *options], variables) as server:
        said = server.log.read_text()
        for feature in (
            "attention (PagedAttentionBackend",
            "NotingPolicyScheduler, policy default",
            "pc_hidden_states_dir=",
        ):
            assert feature in said
        yield server


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A file system of 4 MiB."""
    folder = tmp_path_factory.mktemp("disk")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="module")
def server(model_with_tokenizer, small_disk):
    with serving(model_with_tokenizer, small_disk) as running:
        yield running


def complete(server, prompt, **more):
    return server.post("/v1/completions", {"model": "Qwen/Qwen3-0.6B", "prompt": prompt, "temperature": 0, **more})


def ask_as_on_the_page(server, path):
    """Return the result of each of the page's `curl` commands to a path."""
    for words in commands(f"curl http://localhost:8000{path}"):
        words[1] = server.url + path
        done = subprocess.run([*words, "--silent", "--show-error"], capture_output=True, text=True, check=True)
        yield json.loads(done.stdout)


def prompt_of(seed, count=100):
    return torch.randint(3, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def wait_for(found, seconds=30):
    """Return a function's first result that is true, called repeatedly."""
    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


def rows_file(folder, name):
    return wait_for(lambda: next(iter((folder / "rows").glob(f"{name}.safetensors")), None))


def noted(server, request):
    """Return what the scheduler printed about a request."""
    return wait_for(lambda: re.findall(rf"NOTED {request}\S* (.*)", server.log.read_text()))


def test_requests_of_the_page(server, small_disk):
    """The page's curl commands run unchanged; the answer's id is the page's, and the page's statements hold."""
    hinted, prefix, mine = (each["id"] for each in ask_as_on_the_page(server, "/v1/completions"))
    assert "priority=5, ttl=600" in noted(server, hinted)[0]
    assert noted(server, prefix) == noted(server, mine) == ["None"]
    assert mine == "cmpl-mine"
    with safe_open(rows_file(small_disk, "cmpl-mine-0"), "pt") as file:
        assert file.metadata() == {"complete": "true"}
        prompt = file.get_tensor("token_ids")
        assert file.get_tensor("hidden_states").shape == (len(prompt), 128)
    said = server.post("/tokenize", {"model": "Qwen/Qwen3-0.6B", "prompt": "Once upon a time"})
    assert prompt.tolist() == said["tokens"]


def test_log_probabilities_behind_hits(server, small_disk):
    """The log-probabilities of a cached prompt are those of vLLM, which computes the prompt again."""
    prompt = prompt_of(50)
    complete(server, prompt, max_tokens=1)
    before = server.metric("prefix_cache_hits_total")
    asked = {"model": "Qwen/Qwen3-0.6B", "prompt": prompt, "max_tokens": 1, "vllm_xargs": {"pc_prompt_logprobs": 1}}
    server.post("/v1/completions", asked, **{"X-Request-Id": "logprobs"})
    assert server.metric("prefix_cache_hits_total") > before
    with safe_open(rows_file(small_disk, "cmpl-logprobs-0"), "pt") as file:
        found, names = file.get_tensor("prompt_logprobs"), file.keys()
    assert sorted(names) == ["prompt_logprobs", "token_ids"]
    told = complete(server, prompt, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"][1:]
    expected = [each[str(token)]["logprob"] for each, token in zip(told, prompt[1:], strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_a_row_of_each_token_behind_hits(model_with_tokenizer):
    """The page's server for pooling, with its curl; then hits, other rows after them, and a part of a hit."""
    (started,) = [words for words in commands("vllm serve") if "--runner" in words]
    options = started[started.index("--runner") :]
    with vllm_server.serving(model_with_tokenizer, [*SMALL[:-2], *options], {"PC_VLLM": "hidden_states"}) as server:

        def rows(tokens, **more):
            body = {"model": "Qwen/Qwen3-0.6B", "input": tokens, "use_activation": False, **more}
            before = server.metric("prefix_cache_hits_total")
            (found,) = server.post("/pooling", body)["data"]
            return torch.tensor(found["data"]), server.metric("prefix_cache_hits_total") - before

        (answer,) = ask_as_on_the_page(server, "/pooling")
        said = server.post("/tokenize", {"model": "Qwen/Qwen3-0.6B", "prompt": "Once upon a time"})
        assert torch.tensor(answer["data"][0]["data"]).shape == (len(said["tokens"]), 128)
        prompt = prompt_of(60)
        prompts = ((prompt, 0), (prompt, 96), (prompt[:70] + prompt_of(61, 60), 64), (prompt[:33], 32))
        for number, (tokens, hits) in enumerate(prompts):
            found, hit = rows(tokens)
            assert hit == hits
            computed, hit = rows(tokens, cache_salt=str(number))
            assert hit == 0
            assert found.shape == (len(tokens), 128)
            torch.testing.assert_close(found, computed, rtol=1e-3, atol=1e-3)


def test_the_pages_client(server):
    """The page's Python block runs unchanged, except for the address."""
    (block,) = [block for block in BLOCKS["python"] if "OpenAI(" in block]
    before = len(re.findall("NOTED", server.log.read_text()))
    exec(block.replace("http://localhost:8000", server.url), {})
    said = wait_for(lambda: re.findall("NOTED .*", server.log.read_text())[before:])
    assert len(said) == 1
    assert "priority=5, ttl=600" in said[0]


def test_the_metrics_that_the_page_names(server):
    names = re.findall(r"`vllm:(\w+)`", PAGE)
    assert "prefix_cache_hits_total" in names
    for name in names:
        assert server.metric(name if not name.endswith("_seconds") else f"{name}_count") >= 0
    complete(server, prompt_of(1), max_tokens=1)
    before = server.metric("prefix_cache_hits_total")
    complete(server, prompt_of(1), max_tokens=1)
    assert server.metric("prefix_cache_hits_total") == before + 96


def test_a_client_that_leaves(server):
    """Its request ends, its blocks become free, and other clients get the same answers as without it."""
    prompt = prompt_of(2)
    expected = complete(server, prompt, max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    body = {"model": "Qwen/Qwen3-0.6B", "prompt": prompt_of(3), "max_tokens": 150, "ignore_eos": True, "stream": True}
    body["vllm_xargs"] = {"pc_hidden_states": 1}
    for _ in range(4):
        left = http.client.HTTPConnection("127.0.0.1", server.port)
        left.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert left.getresponse().readline().startswith(b"data: ")
        left.sock.close()
        left.close()
    assert complete(server, prompt, max_tokens=20, ignore_eos=True)["choices"][0]["text"] == expected
    assert wait_for(lambda: server.metric("num_requests_running") == 0)
    assert wait_for(lambda: server.metric("kv_cache_usage_perc") == 0)


def test_samples_and_constraints(server):
    found = complete(server, prompt_of(4), n=3, temperature=0.8, max_tokens=8)
    assert len(found["choices"]) == 3
    regex = {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}
    text = complete(server, prompt_of(4), max_tokens=20, **regex)["choices"][0]["text"]
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text)


def test_a_full_disk(server, small_disk):
    """The log names rows and blocks that cannot be written. Answers are the same, and later ones are written."""
    expected = complete(server, prompt_of(5), max_tokens=8)["choices"][0]["text"]
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    asked = {"max_tokens": 8, "vllm_xargs": {"pc_hidden_states": 1}}
    head = {"X-Request-Id": "lost"}
    body = {"model": "Qwen/Qwen3-0.6B", "temperature": 0}
    for number in (5, 6):
        found = server.post("/v1/completions", body | asked | {"prompt": prompt_of(number)}, **head)
        if number == 5:
            assert found["choices"][0]["text"] == expected
    said = wait_for(lambda: re.findall("hidden states of cmpl-lost-0 are not written: .*", server.log.read_text()))
    assert any("No space left" in line or "os error 28" in line for line in said), said
    assert wait_for(lambda: re.findall("a block is not kept on disk: .*No space left", server.log.read_text()))
    assert not list(small_disk.glob("rows/*lost*"))
    assert not [*small_disk.glob("rows/.*.part"), *small_disk.glob("kv/*/*.partial")], "left behind"
    filler.unlink()
    server.post("/v1/completions", body | asked | {"prompt": prompt_of(7)}, **{"X-Request-Id": "kept"})
    assert rows_file(small_disk, "cmpl-kept-0")


def answers(server, seeds):
    """Return answers to concurrent prompts that ask for rows; None if the server was gone."""
    found = {}

    def ask(seed):
        try:
            body = {"max_tokens": 8, "ignore_eos": True, "vllm_xargs": {"pc_hidden_states": 1}}
            found[seed] = complete(server, prompt_of(seed), **body)["choices"][0]["text"]
        except (urllib.error.URLError, OSError, http.client.HTTPException):
            found[seed] = None

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    return found, threads


def test_the_engine_is_killed(model_with_tokenizer, tmp_path):
    """The engine is killed while it serves and writes. Clients get errors, and later engines read nothing wrong."""
    seeds = range(100, 130)
    with serving(model_with_tokenizer, tmp_path) as server:
        found, threads = answers(server, seeds)
        wait_for(lambda: any((tmp_path / "rows").glob("*.safetensors")))
        below = server.processes()
        os.kill(below["EngineCore"], signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert None in found.values(), "killed too late to matter"
        assert wait_for(lambda: server.process.poll() is not None, 60), "the server stays without an engine"
        assert "EngineDeadError" in server.log.read_text()
        assert wait_for(lambda: not Path(f"/proc/{below['Worker']}").exists()), "the worker stays"
        before = {seed: text for seed, text in found.items() if text is not None}
    whole = sorted((tmp_path / "rows").glob("*.safetensors"))
    for path in whole:
        with safe_open(path, "pt") as file:
            assert file.get_tensor("hidden_states").shape == (100, 128)
    blocks = list((tmp_path / "kv").glob("*/*.block"))
    assert blocks
    with serving(model_with_tokenizer, tmp_path) as server:
        found, threads = answers(server, seeds)
        for thread in threads:
            thread.join(120)
        assert server.metric("external_prefix_cache_hits_total") > 0
        server.post("/reset_prefix_cache")
        assert "dropped" not in server.log.read_text(), "an entry was damaged"
        assert before.items() <= found.items()
        for path in (tmp_path / "kv").glob("*/*.block"):
            path.unlink()
        assert answers_alone(server, seeds) == found


def answers_alone(server, seeds):
    """Return the answers that the server computes without cached blocks, one by one."""
    found = {}
    for seed in seeds:
        server.post("/reset_prefix_cache")
        found[seed] = complete(server, prompt_of(seed), max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    return found
