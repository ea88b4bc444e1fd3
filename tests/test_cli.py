"""The command line as a shell uses it: its version, its help, and its completions."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from processes import python
from typer.testing import CliRunner

import pc
from pc.__main__ import POLICIES, SHELLS, app
from pc.check import Row
from pc.triton_ops._core.runtime import INTERPRET


def test_version() -> None:
    assert python("-m", "pc", "--version").stdout == f"pc {pc.__version__}\n"


def candidates(line: str) -> list[str]:
    """Return the completions that `pc` gives typer's bash script for the last word of a line."""
    env = {"_PC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = python("-m", "pc", **env)
    assert not done.stderr, done.stderr
    return done.stdout.split()


def test_commands_options_and_values_are_completed() -> None:
    assert {"demo", "replay", "bench", "info"} <= {*candidates("pc ")}
    assert {"--policies", "--plot", "--csv"} <= {*candidates("pc replay --")}
    assert "--quick" not in candidates("pc replay --")
    assert candidates("pc demo --device ") == ["cpu", "cuda"]
    assert candidates("pc replay --policies s") == ["s3fifo"]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that runs `pc check` on a CPU whose kernels give these rows."""
    import pc.check as module

    def check(*rows: Row, options: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(module, "runs_kernels", lambda device: True)
        monkeypatch.setattr(module, "check_kernels", lambda *args, **given: [*rows])
        return CliRunner().invoke(app, ["check", *options], env={"COLUMNS": "100"})

    return check


def test_right_kernels_give_status_0(checked: Callable[..., Any]) -> None:
    row = Row("gather_slots", "float16", 0.0, 0.0, 0.1, "")
    done = checked(row, row, options=("--quick",))
    assert done.exit_code == 0, done.output
    assert "2 of 2 cases are right" in done.output


def test_a_wrong_kernel_gives_status_1_and_is_named(checked: Callable[..., Any]) -> None:
    right, wrong = (Row("gather_slots", name, error, 0.0, 0.1, text) for name, error, text in (
        ("float16", 0.0, ""), ("float32", 3.0, "the result is off by 3, needs to be equal")))  # fmt: skip
    done = checked(right, wrong)
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert "pc.gather_slots is wrong: float32: the result is off by 3, needs to be equal" in said
    assert "1 of 2 cases are right" in said


@pytest.mark.skipif(INTERPRET, reason="kernels run here")
def test_where_pytorch_serves_there_is_nothing_to_check() -> None:
    done = CliRunner().invoke(app, ["check", "--device", "cpu"])
    assert done.exit_code == 0
    assert "there is no kernel to check" in done.output
    for device in ("gpu", "meta", "cuda:99"):
        done = CliRunner().invoke(app, ["check", "--device", device])
        assert done.exit_code == 2
        assert f"--device: got '{device}'" in done.output


def test_a_models_layers_are_warmed_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The layers are read from the model's config: windows, full layers, sinks, shared heads, latent rows."""
    transformers = pytest.importorskip("transformers")
    from pc.warm import layer_kinds, run_warmup

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    llama = transformers.LlamaConfig(**sizes)
    assert layer_kinds(llama) == [shape]
    assert layer_kinds(llama, 4) == [{"num_heads": 1, "num_kv_heads": 1, "head_dim": 16}]
    with pytest.raises(ValueError, match="tensor_parallel: got 3, needs a divisor of 4 heads"):
        layer_kinds(llama, 3)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}
    assert layer_kinds(transformers.Gemma2Config(**sizes, **windows)) == [
        shape | {"softcap": 50.0},
        shape | {"softcap": 50.0, "window": 8},
    ]
    sinks = layer_kinds(transformers.GptOssConfig(**sizes, **windows, num_local_experts=2))
    assert sinks == [shape | {"sinks": True}, shape | {"sinks": True, "window": 8}]
    latent = transformers.DeepseekV3Config(**(sizes | {"num_key_value_heads": 4}), kv_lora_rank=32, qk_rope_head_dim=16)
    assert layer_kinds(latent) == [{"num_heads": 4, "num_kv_heads": 1, "head_dim": 48, "value_dim": 32}]
    llama.save_pretrained(tmp_path)
    assert run_warmup(str(tmp_path), "cpu", "float32", "int8", 16, 1, 1) == 0
    assert "num_heads 4, num_kv_heads 2, head_dim 16" in capfd.readouterr().out
    transformers.Llama4TextConfig(**sizes, num_local_experts=2).save_pretrained(tmp_path / "chunks")
    assert run_warmup(str(tmp_path / "chunks"), "cpu", None, None, 16, 1, 1) == 1
    assert "UnsupportedError: it has layers of chunked_attention" in capfd.readouterr().out
    assert run_warmup(str(tmp_path / "none"), "cpu", None, None, 16, 1, 1) == 1
    assert run_warmup(str(tmp_path), "cpu", None, "int4", 16, 1, 1) == 2
    assert "cache_dtype: got 'int4', needs one of" in capfd.readouterr().out
    for dtype in ("int3", "float33", "float64"):
        assert run_warmup(str(tmp_path), "cpu", dtype, None, 16, 1, 1) == 2
        assert f"dtype: got '{dtype}', needs one of bfloat16, float16, float32" in capfd.readouterr().out


def test_the_policies_it_offers_are_those_there_are() -> None:
    assert set(POLICIES) == {*pc.cache.policies.POLICIES, *pc.cache.replay.ORACLES}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_one_for_its_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = python("-m", "pc", "completion", shell)
    assert "_PC_COMPLETE" in script.stdout
    done = subprocess.run([shell, "-n"], input=script.stdout, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["replay", "--help"], ["completion", "bash"], ["--version"]], ids=" ".join
)
def test_help_is_there_without_torch(arguments: list[str]) -> None:
    # A None entry in sys.modules makes the import fail.
    code = (
        "import runpy, sys\n"
        f"sys.argv, sys.orig_argv = ['-m', *{arguments}], ['python', '-m', 'pc', *{arguments}]\n"
        "for name in ('torch', 'numpy'): sys.modules[name] = None\n"
        "runpy.run_module('pc', run_name='__main__')\n"
    )
    assert python("-c", code).stdout


def test_a_command_has_the_public_names() -> None:
    code = (
        "import sys\nsys.argv, sys.orig_argv = ['-m', 'info'], ['python', '-m', 'pc', 'info']\n"
        "import pc\nprint('torch' in sys.modules)\n"
        "print(pc.CacheManager.__name__, pc.cache.__name__, hasattr(pc, 'nothing'), 'paged_attention' in dir(pc))\n"
        "import torch\nprint(torch.ops.pc.paged_attention.default.name())"
    )
    done = python("-c", code)
    assert done.stdout.splitlines() == ["False", "CacheManager pc.cache False True", "pc::paged_attention"], done.stderr


def test_another_shell_is_refused() -> None:
    done = CliRunner().invoke(app, ["completion", "tcsh"])
    assert done.exit_code == 2
    assert "shell: got 'tcsh', needs one of bash, zsh, fish" in re.sub(r"\s+", " ", done.output.replace("│", ""))


def explain(path: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["explain", str(path), *options], env={"COLUMNS": "120"})
    return done.output


def test_misses_of_a_file_of_prompts_are_explained(tmp_path: Path) -> None:
    prompts = [{"prompt": f"It is {hour}:00. You are an agent that edits code."} for hour in (10, 10, 11)]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("\n".join(map(json.dumps, [*prompts, prompts[0] | {"salt": "a tenant"}])) + "\n")
    said = explain(requests, "--block-size", "4", "--blocks", "64")
    assert "1: 0 of 46 tokens are cached: nothing like it was seen from token 0 on" in said
    assert "2: 44 of 46 tokens are cached: only whole blocks are found" in said
    assert "3: 4 of 46 tokens are cached: from token 7 on it says '1:00. You are an', not '0:00. You are an'" in said
    assert "4: 0 of 46 tokens are cached: from token 0 on the same text is cached under another salt" in said
    assert re.search(r"token +1 +42\b", said)


def test_blank_lines_in_a_file_of_prompts_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n\n')
    said = explain(tmp_path / "requests.jsonl")
    assert "1: 0 of 1 tokens" in said
    assert "3: 0 of 1 tokens" in said


def test_a_table_of_hit_rates_fits_a_line_of_80_characters(tmp_path: Path) -> None:
    rows = [{"timestamp": n, "input_length": 64, "output_length": 1, "hash_ids": [n % 2, 2]} for n in range(4)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = CliRunner().invoke(app, ["replay", str(tmp_path / "trace.jsonl")], env={"COLUMNS": "80"}).output
    assert "│default " in said
    assert "…" not in said


def test_a_file_without_prompts_is_refused_in_a_line(tmp_path: Path) -> None:
    for text, what in (
        ('{"a": 1}', "line 1 has none of"),
        ("[1]", "a JSON object in each line"),
        ('{"token_ids": [-1]}', "line 1"),
        ('{"prompt": "a"}\n\n{"prompt": "a"\n', "line 3, column 15: Expecting ',' delimiter"),
        ("\n", "requests.jsonl holds no requests"),
    ):
        (tmp_path / "requests.jsonl").write_text(text)
        said = explain(tmp_path / "requests.jsonl")
        assert "REQUESTS" in said
        assert what in " ".join(said.replace("│", " ").split())


def test_token_ids_without_a_tokenizer_are_shown_as_numbers(tmp_path: Path) -> None:
    """They are ids of some tokenizer and no bytes, even if all are below 256."""
    for first in (0, 1000):
        prompts = [[*range(first, first + 12)], [*range(first, first + 6), *[first + 50] * 9]]
        (tmp_path / "requests.jsonl").write_text("\n".join(json.dumps({"token_ids": ids}) for ids in prompts))
        said = explain(tmp_path / "requests.jsonl", "--block-size", "4")
        assert f"token 6 is {first + 50}, but {first + 6} in the longest matching text" in said


@pytest.mark.parametrize("damage", ["truncated", "damaged", "nested"])
def test_a_file_of_prompts_that_cannot_be_read_is_refused(tmp_path: Path, damage: str) -> None:
    lines = "".join(json.dumps({"token_ids": [*range(i, i + 40)]}) + "\n" for i in range(200))
    path, data = tmp_path / "requests.jsonl.gz", gzip.compress(lines.encode())
    if damage == "nested":
        data = gzip.compress(b'{"prompt": ' + 100_000 * b"[")
    elif damage == "damaged":
        data = data[:60] + b"\xff" * 40 + data[100:]
    path.write_bytes(data[:-20] if damage == "truncated" else data)
    done = CliRunner().invoke(app, ["explain", str(path)], env={"COLUMNS": "120"})
    assert done.exit_code == 2, done.output
    assert "REQUESTS" in done.output
