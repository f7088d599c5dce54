#!/bin/sh
# Build step of the images: installs into /opt/venv, from /build/wheelhouse where it holds wheels (no network then),
# else from the index that pip is set up for (PIP_INDEX_URL), trusting /build/ca.crt where there is one.
#   install.sh dependencies EXTRA [--without NAME]...   what pyproject.toml lists
#   install.sh torch REQUIREMENT [INDEX_URL]            one torch build, never the index's default one
#   install.sh package                                  Millrace itself, from /build
#   install.sh bare REQUIREMENT                         one package without what it depends on
set -eu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
[ -x /opt/venv/bin/python ] || python -m venv --without-pip /opt/venv
here=/build/wheelhouse
if ls "$here"/*.whl >/dev/null 2>&1; then
    offline=yes
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$here"
else
    offline=no
    if [ -f /build/ca.crt ]; then export PIP_CERT=/build/ca.crt; fi
fi
pip() { python -m pip --python /opt/venv/bin/python "$@"; }

what=$1
shift
case $what in
    dependencies)
        extra=$1
        shift
        python /build/requirements.py "$@" /build/pyproject.toml "$extra" >/build/requirements.txt
        pip install -c /build/constraints.txt -r /build/requirements.txt ;;
    torch)
        if [ "$offline" = no ] && [ -z "${2:-}" ]; then
            echo "install: no wheelhouse, so the build needs TORCH_INDEX_URL, the index that carries $1" >&2
            exit 1
        fi
        pip install -c /build/constraints.txt ${2:+--index-url "$2"} "$1"
        # A service runs neither torch's own tests nor its C++ headers: 190 MB.
        torch=$(echo /opt/venv/lib/python3*/site-packages/torch)
        rm -rf -- "$torch/test" "$torch/include"
        find "$torch/bin" -type f ! -name torch_shm_manager -delete ;;
    package)
        pip install --no-deps /build ;;
    bare)
        pip install --no-deps -c /build/constraints.txt "$(grep "^$1==" /build/constraints.txt)" ;;
    *)
        echo "install: unknown step $what" >&2
        exit 2 ;;
esac
