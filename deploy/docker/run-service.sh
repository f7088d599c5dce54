#!/bin/sh
# Entry point of the service images: puts this container's name where MILLRACE_ADVERTISE says {hostname}, so that
# several containers of one service advertise different addresses, and becomes the service.
set -eu
case ${MILLRACE_ADVERTISE:-} in
    *"{hostname}"*)
        MILLRACE_ADVERTISE="${MILLRACE_ADVERTISE%%"{hostname}"*}$(hostname)${MILLRACE_ADVERTISE#*"{hostname}"}"
        export MILLRACE_ADVERTISE ;;
esac
exec "$@"
