#!/bin/sh
# Installs kvpress 0.5.5 for `make kvpress` under $1: an environment of its own over the project's (PYTHON's). Its metadata
# ask for an older transformers than the one it runs with here, so what it imports is named.
set -eu
ROOT=${1:-.peers}
PYTHON=${PYTHON:-python3}
ENV="$ROOT/kvpress"
export PIP_DEFAULT_TIMEOUT=20 PIP_RETRIES=2 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

fetch() { "$@" || { echo "install_kvpress.sh: failed, is the package index reachable? $*" >&2; exit 1; }; }

if [ ! -e "$ENV/.ready" ]; then
    "$PYTHON" -m venv --clear "$ENV"
    "$PYTHON" - "$ENV" <<'PY'
import pathlib, sys, sysconfig

target = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
(target / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
PY
    fetch "$ENV/bin/pip" install --quiet --no-deps kvpress==0.5.5
    fetch "$ENV/bin/pip" install --quiet cachetools==5.5.2 datasets fire==0.6.0 requests
    touch "$ENV/.ready"
fi
