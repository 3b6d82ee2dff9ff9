#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_cpu.sh EP_BENCH FOLDER
# The measurements of the CPU backends: JSON files in FOLDER, for ./dev tables --take FOLDER.
set -euo pipefail
bench=$1 results=$2
mkdir -p "$results"

measure() {
    local name=$1
    shift
    "$bench" "$@" --validate --json "$results/$name.json" >"$results/$name.log"
    echo "$name: ok"
}

for backend in threads processes; do
    measure "cpu-ht-$backend" --mode ht --backend "$backend" --ranks 4 --iterations 10
    measure "cpu-ht-$backend-windows" --mode ht --backend "$backend" --ranks 4 --windows --iterations 10
    measure "cpu-ht-$backend-expert-major" --mode ht --layout em --backend "$backend" --ranks 4 --iterations 10
    measure "cpu-$backend" --backend "$backend" --tokens 128 --iterations 30
    measure "cpu-$backend-rank-major" --backend "$backend" --layout rm --tokens 128 --iterations 30
    measure "cpu-$backend-two-ranks" --backend "$backend" --ranks 2 --tokens 1 --iterations 1000
done
