#!/bin/sh
# The image's entrypoint: `bootstrap ...` is noloco-bootstrap, everything else noloco-peer (`train ...`, `--help`).
# INITIAL_PEERS_FILE: join by the addresses that a bootstrap node writes (--addresses-file), after a wait of at most
# INITIAL_PEERS_WAIT seconds. exec at the end, so that Python receives the signals of `docker stop`.
set -eu

if [ "${1:-}" = bootstrap ]; then
    shift
    exec noloco-bootstrap "$@"
fi

if [ -n "${INITIAL_PEERS_FILE:-}" ] && [ -z "${NOLOCO_INITIAL_PEERS:-}" ]; then
    trap 'exit 0' TERM INT
    left=${INITIAL_PEERS_WAIT:-60}
    while [ ! -s "$INITIAL_PEERS_FILE" ]; do
        if [ "$left" -le 0 ]; then
            echo "error: no addresses in $INITIAL_PEERS_FILE after ${INITIAL_PEERS_WAIT:-60} s;" \
                "start the bootstrap node with --addresses-file in the same volume" >&2
            exit 1
        fi
        left=$((left - 1))
        sleep 1 &
        wait $!
    done
    NOLOCO_INITIAL_PEERS=$(tr '\n' ' ' <"$INITIAL_PEERS_FILE")
    export NOLOCO_INITIAL_PEERS
fi
exec noloco-peer "$@"
