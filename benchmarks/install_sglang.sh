#!/bin/sh
# Installs SGLang for `make sglang` under $1: its wheel (0.5.23), unpacked, and an environment of what it imports, over the
# project's own (PYTHON's, which is Python 3.11 or newer). What exists for GPUs alone is left out; tests/support/sglang_site
# stands in for it.
set -eu
ROOT=${1:-.peers}
PYTHON=${PYTHON:-python3}
VERSION=0.5.23
ENV="$ROOT/sglang-cpu"
SOURCE="$ROOT/sglang-$VERSION"
export PIP_DEFAULT_TIMEOUT=20 PIP_RETRIES=2 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

fetch() { "$@" || { echo "install_sglang.sh: failed, is the package index reachable? $*" >&2; exit 1; }; }

add() { # a folder whose packages the environment sees too, and a name
    "$PYTHON" - "$ENV" "$1" "$2" <<'PY'
import pathlib, sys

target = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
folder = str(pathlib.Path(sys.argv[2]).resolve())
(target / f"{sys.argv[3]}.pth").write_text(f"import site; site.addsitedir({folder!r})\n")
PY
}

if [ ! -e "$SOURCE/.done" ]; then
    mkdir -p "$ROOT/wheels" "$SOURCE"
    ls "$ROOT"/wheels/sglang-$VERSION-*.whl >/dev/null 2>&1 ||
        fetch "$PYTHON" -m pip download --quiet --no-deps --dest "$ROOT/wheels" sglang==$VERSION
    "$PYTHON" -m zipfile -e "$ROOT"/wheels/sglang-$VERSION-*.whl "$SOURCE"
    touch "$SOURCE/.done"
fi

if [ ! -e "$ENV/.ready" ]; then
    "$PYTHON" -m venv --clear "$ENV"
    add "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" project
    fetch "$ENV/bin/pip" install --quiet pip numpy xxhash msgspec pyzmq pydantic psutil orjson pybase64 pillow requests aiohttp \
        fastapi uvicorn uvloop tqdm regex transformers==5.19.0 prometheus-client setproctitle IPython python-multipart scipy \
        sentencepiece tiktoken openai==2.8.0 partial_json_parser numba einops gguf kernels==0.14.1 datasets modelscope \
        interegular distro watchfiles py-spy nvidia-ml-py easydict blobfile zstandard ninja loguru soundfile
    fetch "$ENV/bin/pip" install --quiet --no-deps compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 outlines==0.1.11 \
        xgrammar==0.2.7
    add "$SOURCE" sglang  # last: pip would miss all that it asks for on a GPU
    touch "$ENV/.ready"
fi
