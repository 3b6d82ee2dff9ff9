#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run_hosts.sh PROGRAM HOSTS RANKS_PER_HOST [ARGUMENTS...]: starts a program's ranks on this machine, which plays that
# many hosts, and fails if one of them does.
set -euo pipefail
usage="run_hosts.sh PROGRAM HOSTS RANKS_PER_HOST [ARGUMENTS...]"
if [ $# -lt 3 ] || ! [[ "$2 $3" =~ ^[1-9][0-9]*\ [1-9][0-9]*$ ]] || ! command -v "$1" >/dev/null; then
    echo "$usage: there is no such program, or the other two are no positive numbers" >&2
    exit 2
fi
program=$1 hosts=$2 ranks_per_host=$3
shift 3
export CROSSDOCK_NUM_RANKS=$((hosts * ranks_per_host))
export CROSSDOCK_ADDRESS=${CROSSDOCK_ADDRESS:-localhost:$((10000 + $$ % 20000))}
ranks=()
for ((rank = 0; rank < CROSSDOCK_NUM_RANKS; ++rank)); do
    CROSSDOCK_RANK=$rank CROSSDOCK_HOST=host$((rank / ranks_per_host)) "$program" "$@" &
    ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do wait "$rank" || status=1; done
exit $status
