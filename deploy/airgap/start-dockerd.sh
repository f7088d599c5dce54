#!/usr/bin/env bash
# Starts a container engine on a machine without an init system (a container host in CI, an air-gapped box);
# does nothing where one answers already. `--stop` ends the engine that this script started, and no other.
set -euo pipefail

data_root=/var/lib/docker
state_dir=/run/millrace-dockerd
wait_seconds=60
action=start

usage() {
    cat <<TEXT
Usage: start-dockerd.sh [--data-root DIR] [--wait SECONDS] | --stop

Starts Debian's dockerd (apt-get install docker.io) with the overlay2 driver and waits until it answers.
An engine that answers already is left alone. Images stay in the data root between starts.

  --data-root DIR   where images and containers live (default: $data_root)
  --wait SECONDS    how long to wait for the engine (default: $wait_seconds)
  --stop            end the engine that this script started
  --help            this text

Exit codes: 0 an engine answers (or was stopped), 1 it did not come up, 2 wrong use or not installed.
TEXT
}

fail() { printf 'start-dockerd: %s\n' "$1" >&2; exit "${2:-1}"; }
answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

while (($#)); do
    case $1 in
        --data-root | --wait)
            (($# > 1)) || fail "$1 needs a value; see --help" 2
            if [[ $1 == --wait ]]; then wait_seconds=$2; else data_root=$2; fi
            shift 2 ;;
        --stop) action=stop; shift ;;
        --help | -h) usage; exit 0 ;;
        *) fail "unknown argument $1; see --help" 2 ;;
    esac
done
[[ $wait_seconds =~ ^[0-9]+$ ]] || fail "--wait needs a whole number of seconds, not '$wait_seconds'" 2

pid_file=$state_dir/dockerd.pid
owned_pid() { # prints the process id of our engine, if it still is one
    local pid
    pid=$(cat "$pid_file" 2>/dev/null) || return 1
    [[ $(cat "/proc/$pid/comm" 2>/dev/null) == dockerd ]] && printf '%s\n' "$pid"
}

if [[ $action == stop ]]; then
    pid=$(owned_pid) || { echo "no engine of this script runs"; exit 0; }
    kill -TERM "$pid"
    for ((i = 0; i < wait_seconds * 5; i++)); do
        [[ -d /proc/$pid ]] || { rm -f "$pid_file"; echo "engine stopped"; exit 0; }
        sleep 0.2
    done
    fail "the engine (process $pid) did not end within $wait_seconds s"
fi

command -v docker >/dev/null || fail "no 'docker' on PATH: apt-get install docker.io" 2
if answers; then
    echo "an engine answers already: $(docker version --format '{{.Server.Version}}')"
    exit 0
fi
command -v dockerd >/dev/null || fail "no 'dockerd' on PATH: apt-get install docker.io" 2
((EUID == 0)) || fail "must run as root" 2

mkdir -p "$state_dir" "$data_root"
log=$state_dir/dockerd.log
setsid dockerd --data-root "$data_root" --storage-driver overlay2 --log-level warn >"$log" 2>&1 </dev/null &
pid=$!
printf '%s\n' "$pid" >"$pid_file"
for ((i = 0; i < wait_seconds * 5; i++)); do
    if answers; then
        echo "engine $(docker version --format '{{.Server.Version}}') runs as process $pid, data in $data_root"
        exit 0
    fi
    [[ -d /proc/$pid ]] || { tail -n 5 "$log" >&2; fail "dockerd ended at once; the log is in $log"; }
    sleep 0.2
done
tail -n 5 "$log" >&2
fail "dockerd does not answer after $wait_seconds s; the log is in $log"
