#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU tests of Crossdock, from the folder that ./dev gpu-bundle makes.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

usage() {
    cat <<'TEXT'
run [--ranks LIST] [--steps LIST] [--results FOLDER]

  --ranks LIST       numbers of ranks, default 2,4,8; ranks share GPUs where there are fewer
  --steps LIST       of conformance,demo,bench,memcheck,racecheck,synccheck; default: all
  --results FOLDER   where logs and the benchmark's JSON go, default results

NCCL 2.30.4 or newer comes from CROSSDOCK_NCCL_LIBRARY (a file), or else from LD_LIBRARY_PATH or the system.
The exit status is 0 only if every step passed. compute-sanitizer's steps are skipped where it is not installed.
TEXT
}

ranks=2,4,8
steps=conformance,demo,bench,memcheck,racecheck,synccheck
results=results
while [ $# -gt 0 ]; do
    case $1 in
        --ranks | --steps | --results)
            [ $# -gt 1 ] || { echo "run: $1 needs a value" >&2; exit 2; }
            declare "${1#--}=$2"
            shift 2
            ;;
        --help | -h) usage; exit 0 ;;
        *) usage >&2; echo "run: unknown argument '$1'" >&2; exit 2 ;;
    esac
done
mkdir -p "$results"

export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib
if ! "$here/bin/ep_bench" --help >/dev/null 2>&1; then LD_LIBRARY_PATH+=:$here/lib/fallback; fi
# Several ranks may share a GPU; multicast is not available to them.
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0
# Kernels of different ranks wait for each other: all of them must be able to start.
export CUDA_DEVICE_MAX_CONNECTIONS=32

nvidia-smi --query-gpu=index,name,driver_version,compute_cap --format=csv,noheader 2>/dev/null || { echo "run: no GPU here" >&2; exit 1; }
echo "NCCL: ${CROSSDOCK_NCCL_LIBRARY:-libnccl.so.2 of the loader}"

failed=0 skipped=0 passed=0
# step NAME COMMAND...: output to a log; on failure its end is shown.
step() {
    local name=$1 log=$results/$1.log start=$SECONDS
    shift
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
        printf 'passed  %-24s %4d s  %s\n' "$name" $((SECONDS - start)) "$(tail -n 1 "$log" | cut -c1-80)"
    else
        failed=$((failed + 1))
        printf 'FAILED  %-24s %4d s  the end of %s:\n' "$name" $((SECONDS - start)) "$log"
        tail -n 25 "$log" | sed 's/^/        /'
    fi
}
skip() {
    skipped=$((skipped + 1))
    printf 'skipped %-24s %s\n' "$1" "$2"
}

# A few small cases, since a checked kernel is a hundred times slower. Ranks are processes: the tools may hold back a
# kernel until another one of its process has ended, and ranks wait for each other.
checked() {
    local tool=$1
    if command -v compute-sanitizer >/dev/null; then
        step "$tool" compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 --target-processes all \
            "$here/bin/crossdock_conformance" --backend cuda-processes --ranks 2 --seeds 6 \
            --gtest_filter=Random.SmallShapesMatchTheReference
    else
        skip "$tool" "compute-sanitizer is not installed"
    fi
}

for name in ${steps//,/ }; do
    case $name in
        conformance)
            # All routings of the exhaustive tests take the CPU backends' speed; processes that share a GPU take turns of
            # milliseconds.
            for count in ${ranks//,/ }; do
                step "gpu-$count" "$here/bin/crossdock_conformance" --backend cuda --ranks "$count" --seeds 300
                step "gpu-processes-$count" "$here/bin/crossdock_conformance" --backend cuda-processes --ranks "$count" \
                    --seeds 3 --gtest_filter='-Exhaustive.*'
            done
            ;;
        demo)
            step demo "$here/bin/crossdock_demo" --backend cuda
            step demo-ht "$here/bin/crossdock_demo" --mode ht --backend cuda
            ;;
        bench)
            for count in ${ranks//,/ }; do
                step "bench-$count" "$here/bin/ep_bench" --backend cuda --ranks "$count" --validate \
                    --json "$results/bench-$count.json"
                step "bench-ht-$count" "$here/bin/ep_bench" --backend cuda --mode ht --ranks "$count" --tokens 1024 \
                    --validate --json "$results/bench-ht-$count.json"
            done
            ;;
        memcheck | racecheck | synccheck) checked "$name" ;;
        *) echo "run: unknown step '$name'" >&2; exit 2 ;;
    esac
done

echo "$passed passed, $failed failed, $skipped skipped; logs are in $results"
[ $failed = 0 ] && [ $((passed + failed)) -gt 0 ]
