#!/bin/sh
# Entry point of the PostgreSQL base image built from Debian packages: makes the cluster on first start from
# POSTGRES_USER, POSTGRES_PASSWORD (required) and POSTGRES_DB, as the usual image does, then becomes the server.
set -eu
if [ "$1" = postgres ] && [ ! -s "$PGDATA/PG_VERSION" ]; then
    : "${POSTGRES_PASSWORD:?POSTGRES_PASSWORD must be set for the first start}"
    user=${POSTGRES_USER:-postgres}
    secret=$(mktemp)
    printf '%s\n' "$POSTGRES_PASSWORD" >"$secret"
    initdb --username="$user" --pwfile="$secret" --auth-local=trust --auth-host=scram-sha-256 --encoding=UTF8 --locale=C.UTF-8
    rm -f "$secret"
    printf "listen_addresses = '*'\nunix_socket_directories = '/tmp'\n" >>"$PGDATA/postgresql.conf"
    printf 'host all all all scram-sha-256\n' >>"$PGDATA/pg_hba.conf"
    if [ "${POSTGRES_DB:-$user}" != postgres ]; then
        pg_ctl -D "$PGDATA" -o "-c listen_addresses=''" -w start
        createdb -h /tmp -U "$user" "${POSTGRES_DB:-$user}"
        pg_ctl -D "$PGDATA" -m fast -w stop
    fi
fi
exec "$@"
