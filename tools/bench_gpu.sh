#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The measurements of one mode on GPUs, all in one go: JSON files and logs in a folder. ./dev tables --take FOLDER makes
# the documents' tables from them.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

usage() {
    cat <<'TEXT'
bench_gpu [--mode ll|ht|record|own] [--ranks N] [--library PATH] [--only LIST] [--results FOLDER] [--budget SECONDS]

  --mode MODE        ll: low latency (default); ht: high throughput; record: what libraries are compared by, of both
                     modes, and then the conformance suite, all within nine minutes; own: on one GPU, where nothing
                     crosses a wire, LL beside bare kernels, and HT's update; --library: a build to compare with
  --ranks N          default: as many as there are GPUs
  --library PATH     another library with the same C API, timed in the same runs; NVIDIA's takes its NCCL_EP_JIT_* and
                     NCCL_EP_HOME from the environment
  --only LIST        of these measurements, by name; default: all, the goals' first
  --results FOLDER   default results
  --budget SECONDS   start no measurement after SECONDS, default 450 (record: 330)

One that takes longer than 90 s is ended; what it has written by then stays. NCCL 2.30.4 or newer comes from
CROSSDOCK_NCCL_LIBRARY (a file), or else from LD_LIBRARY_PATH or the system; CUPTI and cuBLAS from the toolkit, or from
the packages of the python3 that is found.
TEXT
}

ranks=$(nvidia-smi -L 2>/dev/null | wc -l) mode=ll library='' only='' results=results budget=''
while [ $# -gt 0 ]; do
    case $1 in
        --mode | --ranks | --library | --only | --results | --budget)
            [ $# -gt 1 ] || { echo "bench_gpu: $1 needs a value" >&2; exit 2; }
            declare "${1#--}=$2"
            shift 2
            ;;
        --help | -h) usage; exit 0 ;;
        *) usage >&2; echo "bench_gpu: unknown argument '$1'" >&2; exit 2 ;;
    esac
done
[ "$ranks" -gt 0 ] || { echo "bench_gpu: no GPU here" >&2; exit 1; }
[ -n "$budget" ] || budget=$([ "$mode" = record ] && echo 330 || echo 450)
mkdir -p "$results"

# In a bundle this file lies beside bin/ and lib/, else in the source tree.
bench=$here/bin/ep_bench
[ -x "$bench" ] || bench=$here/../build/cuda/bench/ep_bench
[ -x "$bench" ] || { echo "bench_gpu: no ep_bench; ./dev build cuda ep_bench makes it" >&2; exit 1; }
folders=$(python3 -c 'import site; print(*[p + "/nvidia/" + d for p in site.getsitepackages() for d in
    ("cu13/lib", "cublas/lib", "cuda_cupti/lib")], sep=":")' 2>/dev/null)
cuda=${CUDA_HOME:-/usr/local/cuda}
LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib:$cuda/lib64:$cuda/lib:$cuda/extras/CUPTI/lib64${folders:+:$folders}
export LD_LIBRARY_PATH
if ! "$bench" --help >/dev/null 2>&1; then LD_LIBRARY_PATH+=:$here/lib/fallback; fi
# Kernels of different ranks wait for each other: all of them must be able to start.
export CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
model=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | awk '{print tolower($2)}')
machine=${ranks}x$model

failed=0 left_out=()
# measure NAME ARGUMENTS...
measure() {
    local name=$1 start=$SECONDS
    shift
    if [ -n "$only" ] && [[ ,$only, != *",$name,"* ]]; then return; fi
    if [ "$SECONDS" -gt "$budget" ]; then left_out+=("$name"); return; fi
    local file=$results/$name-$machine
    rm -f "$file.json"
    timeout -k 5 90 "$bench" --backend cuda --ranks "$ranks" "$@" --json "$file.json" >"$file.log" 2>&1
    local status=$?
    printf '%-36s %4d s  %s\n' "$name" $((SECONDS - start)) \
        "$([ $status = 0 ] && echo ok || echo "FAILED ($status): $(tail -n 1 "$file.log" | cut -c1-160)")"
    [ $status = 0 ] || failed=$((failed + 1))
}
# Beside the other library, if there is one; without it where that leaves no figures at all.
compare() {
    local failed_before=$failed
    measure "$@" --kernels --validate ${library:+--library "$library"}
    if [ -n "$library" ] && [ "$failed" -gt "$failed_before" ] && [ ! -s "$results/$1-$machine.json" ]; then
        measure "$@" --kernels --validate
    fi
}

measure_low_latency() {
    local windows=(--layout rm --windows)
    compare ll-rank-major-windows --tokens 128 "${windows[@]}"
    compare ll-expert-major --tokens 128
    compare ll-expert-major-sums --tokens 128 --sums sender
    compare ll-rank-major-windows-few-tokens --tokens 1,8,64 "${windows[@]}"
    compare ll-fp8 --tokens 128 --recipe fp8
    compare ll-rank-major-fp8 --tokens 128 --recipe fp8 "${windows[@]}"
    compare ll-expert-major-few-tokens --tokens 1,8,64
    compare ll-expert-major-halves --tokens 128 --split
    compare ll-fp8-halves --tokens 128 --recipe fp8 --split
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
}

measure_high_throughput() {
    local ht=(--mode ht --tokens 4096) em=(--mode ht --tokens 4096 --layout em)
    local bound many=1024,2048,4096,8192,16384,32768,65536 sms=4,8,12,16,24,32,48,64,132
    # A group per run: other libraries may not bear several on one communicator.
    for bound in 16 24 8; do compare ht-flat-windows-$bound-sms "${ht[@]}" --windows --sms $bound; done
    compare ht-flat-windows "${ht[@]}" --windows
    compare ht-expert-major-windows-24-sms "${em[@]}" --windows --sms 24
    compare ht-flat "${ht[@]}"
    compare ht-flat-fp8-windows "${ht[@]}" --recipe fwd --windows
    compare ht-flat-windows-8192 --mode ht --tokens 8192 --windows
    compare ht-expert-major "${em[@]}"
    # Not in NCCL EP 0.2.0.
    measure ht-expert-major-mxfp8 "${em[@]}" --combine-recipe mxfp8 --kernels --validate
    measure ht-sms "${ht[@]}" --windows --sms $sms
    measure ht-tokens --mode ht --tokens $many --windows --iterations 10
    compare ht-zipf "${ht[@]}" --routing zipf:1.2 --windows
    compare ht-flat-backward "${ht[@]}" --windows --backward
    measure ht-expert-major-sms "${em[@]}" --windows --sms $sms
    measure ht-expert-major-tokens --mode ht --layout em --tokens $many --windows --iterations 10
    measure ht-hidden "${ht[@]}" --windows --hidden 2048,4096,7168,8192,16384
    measure ht-topk "${ht[@]}" --windows --topk 1,2,4,8,16
}

measure_own() {
    local windows=(--layout rm --windows) some=1,8,64,128
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*} ranks=1 machine=1x$model
    compare ll-rank-major-windows --tokens $some "${windows[@]}"
    compare ll-expert-major --tokens $some
    compare ll-fp8 --tokens $some --recipe fp8
    compare ll-expert-major-halves --tokens 1,128 --split
    compare ll-fp8-halves --tokens 1,128 --recipe fp8 --split
    compare ht-flat-windows --mode ht --tokens 4096 --windows
    compare ht-flat-windows-8-sms --mode ht --tokens 4096 --windows --sms 8
    ranks=4
    export NCCL_MULTI_RANK_GPU_ENABLE=1
    compare ll-rank-major-windows-4-ranks --tokens $some "${windows[@]}"
}

# All ranks on GPUs of their own, where there are as many, in what is left of the nine minutes. Left out is what one GPU
# tells as well: wrong arguments, sizes, and all routings of a few tokens.
conformance() {
    local suite=$here/bin/crossdock_conformance log=$results/conformance.log start=$SECONDS status limit tests not_run
    local filter='-Bad*:HtBad*:*Exhaustive.*:*Compatibility.*:*Memory.*:*Simulation.*:Hosts.*:Fork.*'
    if [ -n "$only" ] && [[ ,$only, != *,conformance,* ]]; then return; fi
    [ -x "$suite" ] || suite=$here/../build/cuda/tests/conformance/crossdock_conformance
    [ -x "$suite" ] || { echo "no crossdock_conformance: left out"; return; }
    limit=$((540 - SECONDS))
    [ "$limit" -ge 120 ] || limit=120
    NCCL_MULTI_RANK_GPU_ENABLE=1 timeout -k 5 "$limit" "$suite" --backend cuda --ranks "$ranks" --seeds 20 \
        --gtest_filter="$filter" >"$log" 2>&1
    status=$?
    tests=$("$suite" --gtest_list_tests --gtest_filter="$filter" | awk '/^[^ ]/ {suite = $1} /^ / {print suite $1}' | sort)
    not_run=$(comm -23 <(echo "$tests") <(sed -nE 's/^\[ +(OK|FAILED|SKIPPED) +\] ([^ ,]+).* \([0-9]+ ms\)$/\2/p' "$log" | sort))
    printf '%-36s %4d s  %s  %s\n' conformance $((SECONDS - start)) "$([ $status = 0 ] && echo ok || echo "FAILED ($status)")" \
        "$(grep -E '^\[  (PASSED|FAILED|SKIPPED)' "$log" | head -n 3 | tr '\n' ' ')"
    echo "    slowest: $(sed -nE 's/^\[ +OK \] ([^ ,]+).* \(([0-9]+) ms\)$/\2 ms \1/p' "$log" | sort -rn | head -n 5 | paste -sd, -)"
    if [ -n "$not_run" ]; then
        printf '    %s of %s tests did not end within %s s: %s\n' "$(wc -l <<<"$not_run")" "$(wc -l <<<"$tests")" "$limit" \
            "$(paste -sd' ' <<<"$not_run")"
    fi
    [ $status = 0 ] || failed=$((failed + 1))
}

measure_record() {
    local windows=(--layout rm --windows) ht=(--mode ht --tokens 4096) bound
    compare ll-rank-major-windows --tokens 128 "${windows[@]}"
    compare ll-expert-major --tokens 128
    compare ll-expert-major-sums --tokens 128 --sums sender
    compare ll-fp8 --tokens 128 --recipe fp8
    compare ll-rank-major-windows-few-tokens --tokens 1,8,32,64 "${windows[@]}"
    compare ll-expert-major-few-tokens --tokens 1,8,32,64
    for bound in 16 24 8 32; do compare ht-flat-windows-$bound-sms "${ht[@]}" --windows --sms $bound; done
    compare ht-flat "${ht[@]}"
    compare ht-flat-fp8-windows "${ht[@]}" --recipe fwd --windows
    compare ht-flat-windows-8192 --mode ht --tokens 8192 --windows
    compare ht-flat-backward "${ht[@]}" --windows --backward
    compare ht-expert-major "${ht[@]}" --layout em
    measure ht-expert-major-mxfp8 "${ht[@]}" --layout em --combine-recipe mxfp8 --kernels --validate
    compare ll-rank-major-fp8 --tokens 128 --recipe fp8 "${windows[@]}"
    conformance
}

case $mode in
    record) measure_record ;;
    ll) measure_low_latency ;;
    ht) measure_high_throughput ;;
    own) measure_own ;;
    *) usage >&2; echo "bench_gpu: --mode is ll, ht, record or own, not '$mode'" >&2; exit 2 ;;
esac

[ ${#left_out[@]} = 0 ] || echo "left out, $SECONDS s were over: ${left_out[*]}"
echo "$failed failed; JSON and logs are in $results"
[ $failed = 0 ]
