#!/usr/bin/env bash
# Generates protos/gen from protos/millrace. With --check, only reports drift (exit 1).
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

generate() {
    local out=$1
    mkdir -p "$out"
    python -m grpc_tools.protoc -Iprotos --python_out="$out" --grpc_python_out="$out" \
        --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" $(find protos/millrace -name '*.proto' | sort)
    find "$out" -mindepth 1 -type d -exec touch {}/__init__.py \;
}

if [ "${1:-}" = "--check" ]; then
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh"
    if ! diff -r -q -x __pycache__ protos/gen "$fresh"; then
        echo "error: protos/gen differs from protos/millrace; run: make protos" >&2
        exit 1
    fi
else
    rm -rf protos/gen/millrace
    generate protos/gen
fi
