#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_cpu.sh EP_BENCH FOLDER
# The measurements of the CPU worlds: JSON files in FOLDER, for ./dev tables --take FOLDER.
set -euo pipefail
bench=$1 results=$2
mkdir -p "$results"

measure() {
    local name=$1
    shift
    "$bench" "$@" --validate --json "$results/$name.json" >"$results/$name.log"
    echo "$name: ok"
}

for world in threads processes; do
    measure "cpu-ht-$world" --mode ht --world "$world" --ranks 4 --iterations 10
    measure "cpu-ht-$world-windows" --mode ht --world "$world" --ranks 4 --windows --iterations 10
    measure "cpu-ht-$world-expert-major" --mode ht --layout em --world "$world" --ranks 4 --iterations 10
    measure "cpu-$world" --world "$world" --tokens 128 --iterations 30
    measure "cpu-$world-rank-major" --world "$world" --layout rm --tokens 128 --iterations 30
    measure "cpu-$world-two-ranks" --world "$world" --ranks 2 --tokens 1 --iterations 1000
done
