#!/bin/sh
# `millrace` inside the usage container: the commands reach the service beside them unless told otherwise.
MILLRACE_USAGE_ADDRESS=${MILLRACE_USAGE_ADDRESS:-127.0.0.1:7401}
export MILLRACE_USAGE_ADDRESS
exec /opt/venv/bin/millrace "$@"
