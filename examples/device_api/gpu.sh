#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu.sh FOLDER: runs the programs that ./dev build cuda device_api_examples has made in FOLDER
# (build/cuda/examples/device_api) on the GPUs of this machine, which their ranks share. libnccl.so.2 must be in
# LD_LIBRARY_PATH or the system's folders, and NCCL_RMA_PLUGIN must name libnccl-rma-crossdock.so unless the machine has
# a network that NCCL uses for GIN.
set -euo pipefail
folder=${1:?gpu.sh FOLDER}
failed=0
run() {
    timeout 120 "$@" || {
        echo "$* ended with $?" >&2
        failed=1
    }
}
run "$folder/device_api_lsa_all_reduce_gpu" --ranks 4 # needs no network
run "$folder/device_api_ping_pong_gpu" --ranks 2
run "$folder/device_api_ring_all_gather_gpu" --ranks 4
NCCL_LSA_TEAM_SIZE=2 NCCL_MNNVL_ENABLE=0 run "$folder/device_api_all_to_all_gpu" --ranks 4
run "$folder/device_api_token_push_gpu" --ranks 4
exit $failed
