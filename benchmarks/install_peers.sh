#!/bin/sh
# Installs the cache managers that bench_manager.py compares with, each in an environment of its own under $1.
# Their wheels are unpacked, vLLM's without its compiled extensions, since only their Python managers are run.
# With `sources` as $2, vLLM's are unpacked and nothing is installed.
set -eu
ROOT=${1:-.peers}
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "$0")/.." && pwd)

fetch() { # name version: the .py files of a wheel under $ROOT/$name-src
    [ -e "$ROOT/$1-src/.done" ] && return
    "$PYTHON" -m pip download --quiet --no-deps --dest "$ROOT/wheels" "$1==$2"
    mkdir -p "$ROOT/$1-src"
    "$PYTHON" - "$ROOT" "$1" <<'PY'
import glob, sys, zipfile
root, name = sys.argv[1:]
with zipfile.ZipFile(glob.glob(f"{root}/wheels/{name}-*.whl")[0]) as wheel:
    keep = "" if name == "sglang" else (".py", ".json", "METADATA")  # sglang looks for its sources at import
    wheel.extractall(f"{root}/{name}-src", [m for m in wheel.namelist() if m.endswith(keep)])
PY
    touch "$ROOT/$1-src/.done"
}

environment() { # name, then pip arguments
    name=$1
    shift
    [ -e "$ROOT/$name/.ready" ] && return
    "$PYTHON" -m venv "$ROOT/$name"
    "$ROOT/$name/bin/pip" install --quiet "$@"
    "$ROOT/$name/bin/pip" install --quiet --no-deps --editable "$HERE"
    "$ROOT/$name/bin/pip" install --quiet einops
    touch "$ROOT/$name/.ready"
}

mkdir -p "$ROOT/wheels"
fetch vllm 0.33.0
[ "${2:-}" = sources ] && exit
environment vllm torch==2.13.0 numpy packaging psutil pyzmq urllib3 regex msgspec pydantic cbor2 transformers aiohttp \
    requests openai-harmony openai pillow pybase64 cachetools cloudpickle uvloop py-cpuinfo prometheus_client xgrammar \
    fastapi partial_json_parser llguidance xxhash triton==3.9.0
fetch sglang 0.5.23
environment sglang torch==2.13.0 numpy xxhash msgspec pyzmq pydantic psutil triton orjson pybase64 pillow requests \
    aiohttp fastapi uvicorn uvloop tqdm regex transformers==5.19.0 prometheus-client setproctitle IPython \
    python-multipart scipy sentencepiece tiktoken openai==2.8.0 partial_json_parser numba compressed-tensors gguf \
    kernels==0.14.1 datasets modelscope interegular distro watchfiles py-spy nvidia-ml-py easydict blobfile zstandard \
    ninja
"$ROOT/sglang/bin/pip" install --quiet --no-deps apache-tvm-ffi==0.1.11 outlines==0.1.11 xgrammar==0.2.7
