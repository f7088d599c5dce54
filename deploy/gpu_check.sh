#!/usr/bin/env bash
# Checks a machine's GPU in under ten minutes: the kernels and the runner against their references, then what they make
# of the device. Needs `make setup` with a CUDA build of torch. Exit: 0 all right, 1 a test fails, 2 no CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/protos/gen${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no CUDA device: nothing was checked" >&2
    exit 2
fi
status=0
"$python" -m pytest -q tests/gpu tests/unit/test_kernels_triton.py tests/unit/test_runtime_triton.py \
    tests/unit/test_runtime_fp8.py tests/unit/test_bench_gpu.py || status=1
"$python" -m benchmarks.gpu "$@"
exit "$status"
