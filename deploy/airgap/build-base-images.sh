#!/usr/bin/env bash
# Builds the base images that the Millrace images stand on from Debian packages alone, under the names the
# Dockerfiles use, for a site that reaches a Debian mirror but no image registry.
# Run as root on the host of the container engine: build-base-images.sh [--help] [IMAGE...]
set -euo pipefail

suite=bookworm
mirror=http://deb.debian.org/debian
security=auto
force=no
work_dir=
wanted=()
known=(python:3.11-slim python:3.11-bookworm redis:7-bookworm postgres:15-bookworm)

usage() {
    cat <<TEXT
Usage: build-base-images.sh [options] [IMAGE...]

Builds base images by debootstrap and 'docker import'. An image that the engine already holds is left as it is.

Images (default: all but the last):
  python:3.11-slim       Debian's Python 3.11 with pip and venv, also as 'python' on PATH
  python:3.11-bookworm   the same with a C++ compiler, for build stages and GPU workers
  redis:7-bookworm       Debian's Redis 7.0, data in /data, user redis (999)
  postgres:15-bookworm   Debian's PostgreSQL 15, POSTGRES_USER/PASSWORD/DB understood, data in /var/lib/postgresql/data

Options:
  --mirror URL     Debian mirror (default: $mirror)
  --security URL   security mirror, or 'none' (default: the mirror's neighbour debian-security)
  --work-dir DIR   where the file trees are laid out, 1 GiB free (default: a new folder under TMPDIR)
  --force          build again what the engine already holds
  --help           this text

Exit codes: 0 built or present, 1 a step failed, 2 wrong use or a missing tool.
TEXT
}

fail() { printf 'build-base-images: %s\n' "$1" >&2; exit "${2:-1}"; }
say() { printf '[%4ds] %s\n' "$SECONDS" "$1"; }

while (($#)); do
    case $1 in
        --mirror | --security | --work-dir)
            (($# > 1)) || fail "$1 needs a value; see --help" 2
            case $1 in
                --mirror) mirror=${2%/} ;;
                --security) security=${2%/} ;;
                --work-dir) work_dir=$2 ;;
            esac
            shift 2 ;;
        --force) force=yes; shift ;;
        --help | -h) usage; exit 0 ;;
        -*) fail "unknown option $1; see --help" 2 ;;
        *)
            [[ " ${known[*]} " == *" $1 "* ]] || fail "unknown image $1; known: ${known[*]}" 2
            wanted+=("$1"); shift ;;
    esac
done
((${#wanted[@]})) || wanted=(python:3.11-slim python:3.11-bookworm redis:7-bookworm)
[[ $security != auto ]] || security=${mirror%/debian}/debian-security

command -v docker >/dev/null || fail "no 'docker' on PATH: apt-get install docker.io" 2
docker version --format '{{.Server.Version}}' >/dev/null 2>&1 ||
    fail "no container engine answers: start it, for example by deploy/airgap/start-dockerd.sh" 2

missing=()
for image in "${wanted[@]}"; do
    if [[ $force == no ]] && docker image inspect "$image" >/dev/null 2>&1; then
        say "$image is there already"
    else
        missing+=("$image")
    fi
done
((${#missing[@]})) || exit 0

((EUID == 0)) || fail "must run as root: debootstrap makes a system tree" 2
command -v debootstrap >/dev/null || fail "no 'debootstrap' on PATH: apt-get install debootstrap" 2

if [[ -n $work_dir ]]; then
    mkdir -p "$work_dir"
else
    work_dir=$(mktemp -d -t millrace-base.XXXXXXXX)
fi
work_dir=$(cd "$work_dir" && pwd)
log=$work_dir/build.log
trees=()
trap 'status=$?; for tree in "${trees[@]}"; do rm -rf --one-file-system -- "$tree"; done
      if ((status == 0)); then rm -f -- "$log"; rmdir -- "$work_dir" 2>/dev/null || true
      else printf "build-base-images: the log is in %s\n" "$log" >&2; fi' EXIT

quietly() { # WHAT COMMAND...: runs the command into the log, fails with the end of the log
    local what=$1
    shift
    "$@" >>"$log" 2>&1 </dev/null || { tail -n 15 "$log" >&2; fail "$what failed"; }
}

lay_out_base() {
    local root=$work_dir/base
    trees+=("$root")
    rm -rf --one-file-system -- "$root"
    say "debootstrap of $suite from $mirror"
    quietly debootstrap debootstrap --variant=minbase "$suite" "$root" "$mirror"
    printf 'deb %s %s main\ndeb %s %s-updates main\n' "$mirror" "$suite" "$mirror" "$suite" >"$root/etc/apt/sources.list"
    if [[ $security != none ]]; then
        printf 'deb %s %s-security main\n' "$security" "$suite" >>"$root/etc/apt/sources.list"
    fi
    printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
    chmod 755 "$root/usr/sbin/policy-rc.d"
    # Documentation and translations are never unpacked; copyright files stay, as their licences ask.
    printf '%s\n' 'path-exclude=/usr/share/doc/*' 'path-include=/usr/share/doc/*/copyright' \
        'path-exclude=/usr/share/man/*' 'path-exclude=/usr/share/info/*' 'path-exclude=/usr/share/locale/*' \
        >"$root/etc/dpkg/dpkg.cfg.d/slim"
    quietly "apt-get update" in_tree "$root" apt-get update
    quietly "apt-get upgrade" in_tree "$root" apt-get -y upgrade
}

in_tree() {
    local root=$1
    shift
    DEBIAN_FRONTEND=noninteractive LC_ALL=C chroot "$root" "$@"
}

install_packages() { # ROOT PACKAGE...
    local root=$1
    shift
    quietly "installing $*" in_tree "$root" apt-get -y --no-install-recommends -o Dpkg::Options::=--force-confold install "$@"
}

slim_down() {
    local root=$1
    quietly "apt-get clean" in_tree "$root" apt-get clean
    rm -rf -- "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin "$root"/var/cache/debconf/*-old \
        "$root"/var/log/*.log "$root"/var/log/apt "$root"/usr/share/man/* "$root"/usr/share/info/* \
        "$root"/usr/share/locale/* "$root"/tmp/* "$root"/usr/sbin/policy-rc.d
    find "$root/usr/share/doc" -mindepth 2 ! -name copyright -type f -delete
    find "$root/usr/share/doc" -type l -delete
    find "$root/usr" -name __pycache__ -type d -prune -exec rm -rf -- {} +
    : >"$root/etc/resolv.conf"
    : >"$root/etc/machine-id"
}

import_tree() { # ROOT IMAGE CHANGE...
    local root=$1 image=$2 changes=() change
    shift 2
    for change in "$@" 'LABEL org.opencontainers.image.title=millrace-airgap-base'; do
        changes+=(--change "$change")
    done
    slim_down "$root"
    say "importing $image"
    tar --numeric-owner -C "$root" -c . | docker import "${changes[@]}" - "$image" >>"$log" 2>&1 ||
        { tail -n 15 "$log" >&2; fail "docker import of $image failed"; }
}

build_python() { # ROOT IMAGE
    local root=$1 image=$2 packages=(ca-certificates netbase tzdata python3 python3-venv python3-pip)
    [[ $image == *-slim ]] || packages+=(g++ libc6-dev python3-dev)
    install_packages "$root" "${packages[@]}"
    rm -f -- "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
    ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
    ln -sf /usr/bin/python3 "$root/usr/local/bin/python3"
    ln -sf /usr/bin/pip3 "$root/usr/local/bin/pip"
    import_tree "$root" "$image" \
        'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' 'ENV LANG=C.UTF-8' 'CMD ["python3"]'
}

build_redis() {
    local root=$1
    in_tree "$root" groupadd --system --gid 999 redis
    in_tree "$root" useradd --system --uid 999 --gid redis --home-dir /data --shell /usr/sbin/nologin redis
    install_packages "$root" redis-server redis-tools
    mkdir -p "$root/data"
    in_tree "$root" chown redis:redis /data
    import_tree "$root" redis:7-bookworm \
        'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' 'USER redis' 'WORKDIR /data' \
        'VOLUME /data' 'EXPOSE 6379' 'CMD ["redis-server", "--protected-mode", "no"]'
}

build_postgres() {
    local root=$1
    in_tree "$root" groupadd --system --gid 999 postgres
    in_tree "$root" useradd --system --uid 999 --gid postgres --home-dir /var/lib/postgresql --shell /bin/bash postgres
    mkdir -p "$root/etc/postgresql-common"
    printf 'create_main_cluster = false\n' >"$root/etc/postgresql-common/createcluster.conf"
    install_packages "$root" postgresql-15
    mkdir -p "$root/var/lib/postgresql/data" "$root/var/run/postgresql"
    in_tree "$root" chown postgres:postgres /var/lib/postgresql /var/lib/postgresql/data /var/run/postgresql
    install -m 755 "$(dirname "${BASH_SOURCE[0]}")/postgres-entrypoint.sh" "$root/usr/local/bin/docker-entrypoint.sh"
    import_tree "$root" postgres:15-bookworm \
        'ENV PATH=/usr/lib/postgresql/15/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        'ENV PGDATA=/var/lib/postgresql/data' 'USER postgres' 'VOLUME /var/lib/postgresql/data' 'EXPOSE 5432' \
        'ENTRYPOINT ["docker-entrypoint.sh"]' 'CMD ["postgres"]'
}

lay_out_base
for image in "${missing[@]}"; do
    tree=$work_dir/${image//[:.]/-}
    trees+=("$tree")
    rm -rf --one-file-system -- "$tree"
    say "installing packages for $image"
    cp -a -- "$work_dir/base" "$tree"
    "build_${image%%:*}" "$tree" "$image"
    rm -rf --one-file-system -- "$tree"
done
say "done"
for image in "${missing[@]}"; do
    docker image ls --format '{{.Repository}}:{{.Tag}}  {{.Size}}' "$image"
done
