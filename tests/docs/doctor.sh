#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ./dev doctor tells for each value of NCCL's variables whether a network for kernels can come of it, and how GPUs are
# linked.
#   doctor.sh FOLDER     where the imitated plugins lie
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$1

# expect VARIABLE=VALUE WORDS
expect() {
    local said
    said=$(env "$1" tools/doctor.sh)
    grep -qF "$2" <<<"$said" || {
        printf 'with %s doctor does not say "%s", but:\n%s\n' "$1" "$2" "$said"
        exit 1
    }
}
unset CROSSDOCK_LSA_TEAM_SIZE NCCL_RMA_PLUGIN NCCL_GIN_ENABLE NCCL_GIN_TYPE
expect NCCL_RMA_PLUGIN= "work where NCCL has a network of its own"
expect NCCL_RMA_PLUGIN=/nowhere/plugin.so "no such file: set it to the path of"
expect NCCL_RMA_PLUGIN="$folder/libno_plugin.so" "no plugin for NCCL's RMA"
expect NCCL_RMA_PLUGIN="$folder/libforeign_plugin.so" "another plugin than Crossdock's"
expect NCCL_RMA_PLUGIN="$folder/libimitation_plugin.so" "ok: groups warn where NCCL falls back"
expect NCCL_GIN_ENABLE=0 "GPU groups of several LSA teams are refused: unset it"
expect CROSSDOCK_LSA_TEAM_SIZE=2 "ranks per LSA team, if that divides theirs"
expect NCCL_GIN_TYPE=3 "unset it, or set it to 2"

# Two GPUs as nvidia-smi shows them; LINK: how it calls their link.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/nvidia-smi" <<'TEXT'
#!/bin/sh
case $1 in
    topo) printf ' \tGPU0\tGPU1\t\n GPU0\tX\t%s\t\n GPU1\t%s\tX\t\n\nLegend:\n\n  X    = Self\n' "$LINK" "$LINK" ;;
    *) printf '9.0, NVIDIA H200, 580.1\n9.0, NVIDIA H200, 580.1\n' ;;
esac
TEXT
chmod +x "$work/nvidia-smi"
PATH=$work:$PATH
expect LINK=OK "all 2 GPUs: kernels store into the peer's memory, low latency in LL128 rows"
expect LINK=NS "no peer access"
expect LINK=NS "all 2 GPUs: all ranks share the host's memory"
