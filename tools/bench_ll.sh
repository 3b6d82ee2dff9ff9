#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The low-latency measurements on GPUs, all in one go: JSON files and logs in a folder. ./dev tables --take FOLDER makes the
# tables of the documents from them.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

usage() {
    cat <<'TEXT'
bench_ll [--ranks N] [--library PATH] [--only LIST] [--results FOLDER] [--budget SECONDS]

  --ranks N          default: as many as there are GPUs
  --library PATH     another library with the same C API, timed in the same runs
  --only LIST        of these measurements, by name; default: all, the goals' first
  --results FOLDER   default results
  --budget SECONDS   none is started after so long, default 450

One that takes longer than 90 s is ended; what it has written by then stays. NCCL 2.30.4 or newer comes from
CROSSDOCK_NCCL_LIBRARY (a file), or else from LD_LIBRARY_PATH or the system; CUPTI and cuBLAS from the toolkit, or from
the packages of the python3 that is found.
TEXT
}

ranks=$(nvidia-smi -L 2>/dev/null | wc -l) library='' only='' results=results budget=450
while [ $# -gt 0 ]; do
    case $1 in
        --ranks | --library | --only | --results | --budget)
            [ $# -gt 1 ] || { echo "bench_ll: $1 needs a value" >&2; exit 2; }
            declare "${1#--}=$2"
            shift 2
            ;;
        --help | -h) usage; exit 0 ;;
        *) usage >&2; echo "bench_ll: unknown argument '$1'" >&2; exit 2 ;;
    esac
done
[ "$ranks" -gt 0 ] || { echo "bench_ll: no GPU here" >&2; exit 1; }
mkdir -p "$results"

# In a bundle this file lies beside bin/ and lib/, else in the source tree.
bench=$here/bin/ep_bench
[ -x "$bench" ] || bench=$here/../build/cuda/bench/ep_bench
[ -x "$bench" ] || { echo "bench_ll: no ep_bench; ./dev build cuda ep_bench makes it" >&2; exit 1; }
folders=$(python3 -c 'import site; print(*[p + "/nvidia/" + d for p in site.getsitepackages() for d in
    ("cu13/lib", "cublas/lib", "cuda_cupti/lib")], sep=":")' 2>/dev/null)
cuda=${CUDA_HOME:-/usr/local/cuda}
LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib:$cuda/lib64:$cuda/lib:$cuda/extras/CUPTI/lib64:$folders
export LD_LIBRARY_PATH
if ! "$bench" --help >/dev/null 2>&1; then LD_LIBRARY_PATH+=:$here/lib/fallback; fi
# Kernels of different ranks wait for each other: all of them must be able to start, and be loaded before.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
model=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | awk '{print tolower($2)}')

failed=0 left_out=()
# measure NAME ARGUMENTS...
measure() {
    local name=$1 start=$SECONDS
    shift
    if [ -n "$only" ] && [[ ,$only, != *",$name,"* ]]; then return; fi
    if [ "$SECONDS" -gt "$budget" ]; then left_out+=("$name"); return; fi
    local file=$results/$name-${ranks}x$model
    timeout -k 5 90 "$bench" --world gpu --ranks "$ranks" "$@" --json "$file.json" >"$file.log" 2>&1
    local status=$?
    printf '%-36s %4d s  %s\n' "$name" $((SECONDS - start)) \
        "$([ $status = 0 ] && echo ok || echo "FAILED ($status): $(tail -n 1 "$file.log" | cut -c1-160)")"
    [ $status = 0 ] || failed=$((failed + 1))
}
# Beside the other library, if there is one.
compare() { measure "$@" --kernels --validate ${library:+--library "$library"}; }
windows=(--layout rm --windows)

compare ll-rank-major-windows --tokens 128 "${windows[@]}"
compare ll-expert-major --tokens 128
compare ll-expert-major-sums --tokens 128 --sums sender
compare ll-rank-major-windows-few-tokens --tokens 1,8,64 "${windows[@]}"
compare ll-fp8 --tokens 128 --recipe fp8
compare ll-rank-major-fp8 --tokens 128 --recipe fp8 "${windows[@]}"
compare ll-expert-major-few-tokens --tokens 1,8,64
measure ll-overlap --tokens 128 --overlap "${windows[@]}"
measure ll-expert-major-overlap --tokens 128 --overlap
measure ll-sms --tokens 128 --sms 8,16,24,32,48,64,96,132 "${windows[@]}"
measure ll-tokens --tokens 1,2,4,8,16,32,64,128,256,512 "${windows[@]}"
measure ll-expert-major-tokens --tokens 1,2,4,8,16,32,64,128,256,512
measure ll-expert-major-sms --tokens 128 --sms 8,16,24,32,48,64,96,132
compare ll-zipf --tokens 128 --routing zipf:1.2 "${windows[@]}"
measure ll-hidden --tokens 128 --hidden 2048,4096,7168,8192,12288,16384 "${windows[@]}"
measure ll-topk --tokens 128 --topk 1,2,4,8,16,32 "${windows[@]}"
measure ll-experts --tokens 128 --experts 64,128,256,512 "${windows[@]}"

[ ${#left_out[@]} = 0 ] || echo "left out, $SECONDS s were over: ${left_out[*]}"
echo "$failed failed; JSON and logs are in $results"
[ $failed = 0 ]
