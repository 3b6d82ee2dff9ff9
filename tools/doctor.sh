#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What this machine has and what Crossdock would use of it: one line a thing, with a verdict.
set -euo pipefail
cd "$(dirname "$0")/.."

line() { printf '%-10s %-52s %s\n' "$1" "$2" "$3"; }
first_line() { "$@" 2>/dev/null | head -n 1; }

# tool NAME VERDICT_IF_THERE VERDICT_IF_NOT
tool() {
    if command -v "$1" >/dev/null; then line "$1" "$(first_line "$1" --version | cut -c1-52)" "$2"; else line "$1" "not found" "$3"; fi
}
# file NAME PATTERN VERDICT_IF_THERE
file() {
    local found
    found=$(compgen -G "$2" | head -n 1 || true)
    if [ -n "$found" ]; then line "$1" "$found" "$3"; else line "$1" "not found" "./dev installs it"; fi
}

echo "Building"
tool g++ "ok: compiles the CPU backends" "./dev installs it"
tool cmake "ok" "./dev installs it"
tool ninja "ok" "./dev installs it"
file boost "/usr/lib/*/libboost_context.a" "ok: fibers of the CPU backends"
file fmt "/usr/include/fmt/format.h" "ok"
file cli11 "/usr/include/CLI/CLI.hpp" "ok: demo and benchmark"
file json "/usr/include/nlohmann/json.hpp" "ok: demo and benchmark"
file gtest "/usr/include/gtest/gtest.h" "ok: tests"
file ucx "/usr/include/ucp/api/ucp.h" "ok: ranks of several hosts, the network plugin"
file openssl "/usr/include/openssl/evp.h" "ok: the same"
tool clang++ "ok: sanitizers, fuzzer, lint" "only for sanitizers, the fuzzer and lint; ./dev installs it"

echo
echo "CPU backends"
line cores "$(nproc)" "ok: 8 ranks work on any number"
memory_mib=$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
line memory "$memory_mib MiB available" "$([ "$memory_mib" -ge 2048 ] && echo ok || echo "little: the demo wants 2 GiB")"
line files "$(ulimit -n) open files" "$([ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 256 ] && echo ok ||
    echo "low: ranks as processes hold some files each, try ulimit -n 1024")"
yama=$(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || echo 0)
line ptrace "ptrace_scope $yama" "$([ "$yama" -le 1 ] && echo "ok: ranks as processes can share memory" ||
    echo "strict: ranks as processes may be refused each other")"

echo
echo "Several hosts, and the network plugin"
ucx_library=${CROSSDOCK_UCX_LIBRARY:-$(ldconfig -p 2>/dev/null | sed -nE 's|.*=> (.*/libucp\.so\.0)$|\1|p' | head -n 1)}
if [ -f "$ucx_library" ]; then
    line libucp "$ucx_library" "ok: hosts with InfiniBand reach each other over RDMA (docs/deployment.md)"
else
    line libucp "not found" "hosts reach each other over TCP only; for RDMA: install libucx0"
fi
crypto_library=${CROSSDOCK_CRYPTO_LIBRARY:-$(ldconfig -p 2>/dev/null | sed -nE 's|.*=> (.*/libcrypto\.so\.3)$|\1|p' | head -n 1)}
if [ -f "$crypto_library" ]; then
    line libcrypto "$crypto_library" "ok: ranks of several hosts authenticate each other"
else
    line libcrypto "not found" "ranks of several hosts are refused with a message: install OpenSSL 3 (libssl3)"
fi
line rank0 "CROSSDOCK_ADDRESS ${CROSSDOCK_ADDRESS:-not set}" "torchrun and srun set it, mpirun does not"
line secret "CROSSDOCK_SECRET $([ -n "${CROSSDOCK_SECRET:-}" ] && echo set || echo "not set")" \
    "$([ -n "${CROSSDOCK_SECRET:-}" ] && echo "ok: ranks are authenticated" ||
        echo "anyone who reaches rank 0's port can take a rank's place")"
if [ -n "${CROSSDOCK_LSA_TEAM_SIZE:-}" ]; then
    line lsa_teams "CROSSDOCK_LSA_TEAM_SIZE $CROSSDOCK_LSA_TEAM_SIZE" "ranks per LSA team, if that divides theirs"
else
    line lsa_teams "CROSSDOCK_LSA_TEAM_SIZE not set" "CPU ranks: one LSA team per host; GPUs: NCCL's LSA teams"
fi
if [ "${NCCL_GIN_ENABLE:-1}" = 0 ]; then
    line gin "NCCL_GIN_ENABLE 0" "GPU groups of several LSA teams are refused: unset it"
else
    line gin "NCCL_GIN_ENABLE ${NCCL_GIN_ENABLE:-not set}" "ok: GPU groups of several LSA teams use what NCCL_RMA_PLUGIN names"
fi
case ${NCCL_GIN_TYPE:-2} in
    2 | -1) ;;
    *) line gin_type "NCCL_GIN_TYPE $NCCL_GIN_TYPE" "GPU groups of several LSA teams are refused: unset it, or set it to 2" ;;
esac
built=$(compgen -G "build/*/plugin/libnccl-rma-crossdock.so" | head -n 1 || true)
line plugin "${built:-not built}" "$([ -n "$built" ] && echo "NCCL loads it when NCCL_RMA_PLUGIN names it" ||
    echo "./dev build cuda nccl_rma_crossdock")"
# The file that NCCL_RMA_PLUGIN names: by this name, or by the rest of a plugin's usual one.
named=
for name in "${NCCL_RMA_PLUGIN:-}" "libnccl-rma-${NCCL_RMA_PLUGIN:-}.so"; do
    for folder in "" $(tr ':' ' ' <<<"${LD_LIBRARY_PATH:-}"); do
        if [ -z "$named" ] && [ -f "${folder:+$folder/}$name" ]; then named=${folder:+$folder/}$name; fi
    done
done
if [ -z "${NCCL_RMA_PLUGIN:-}" ]; then
    line used "NCCL_RMA_PLUGIN not set" "GPU groups of several LSA teams work where NCCL has a network of its own"
elif [ -z "$named" ]; then
    line used "NCCL_RMA_PLUGIN $NCCL_RMA_PLUGIN" "no such file: set it to the path of libnccl-rma-crossdock.so"
elif ! grep -aqE 'ncclRmaPlugin_v1[34]' "$named"; then
    line used "NCCL_RMA_PLUGIN $named" "no plugin for NCCL's RMA: set it to the path of libnccl-rma-crossdock.so"
elif ! grep -aq crossdockRmaPluginContexts "$named"; then
    line used "NCCL_RMA_PLUGIN $named" "another plugin than Crossdock's: whether NCCL uses it is unknown"
else
    line used "NCCL_RMA_PLUGIN $named" "ok: groups warn where NCCL falls back to something else"
fi
if command -v ucx_info >/dev/null; then
    line ucx "$(ucx_info -v | sed -nE 's/^# (Library )?[Vv]ersion:? */UCX /p' | head -n 1)" \
        "transports: $(ucx_info -d | awk '/Transport:/ {print $3}' | sort -u | tr '\n' ' ')"
fi

echo
echo "GPU backend"
nvcc=$(command -v nvcc || compgen -G "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" || true)
if [ -n "$nvcc" ]; then
    line nvcc "$("$nvcc" --version | sed -nE 's/.*release ([0-9.]+).*/CUDA \1/p'), $nvcc" "ok: builds the cuda preset"
else
    line nvcc "not found" "the cuda preset cannot be built here; CPU backends work"
fi
headers=${CROSSDOCK_NCCL_INCLUDE:-build/nccl/include}
if [ -f "$headers/nccl_device.h" ]; then
    line headers "NCCL $(sed -nE 's/^#define NCCL_VERSION_CODE +([0-9]+)/\1/p' "$headers/nccl.h"), $headers" "ok"
else
    line headers "no NCCL headers in $headers" "./dev build cuda fetches them"
fi
library=${CROSSDOCK_NCCL_LIBRARY:-}
# Where the dynamic loader looks, in its order.
for folder in $(tr ':' ' ' <<<"${LD_LIBRARY_PATH:-}") $(ldconfig -p 2>/dev/null | sed -nE 's|.*=> (.*)/libnccl\.so\.2$|\1|p'); do
    if [ -z "$library" ] && [ -f "$folder/libnccl.so.2" ]; then library=$folder/libnccl.so.2; fi
done
if [ -f "$library" ]; then
    version=$(grep -aoE 'NCCL version [0-9]+\.[0-9]+\.[0-9]+' "$library" | grep -oE '[0-9.]+$' | head -n 1 || true)
    if [ "$(printf '%s\n' 2.30.4 "${version:-0}" | sort -V | head -n 1)" = 2.30.4 ]; then
        verdict="ok: GPU groups use it"
        [ "$(printf '%s\n' 2.30.7 "$version" | sort -V | head -n 1)" = 2.30.7 ] ||
            verdict="ok in one LSA team; several need 2.30.7 or newer"
    else
        verdict="too old for GPU groups: 2.30.4 or newer is needed"
    fi
    line libnccl "NCCL ${version:-of unknown version}, $library" "$verdict"
else
    line libnccl "not found" "GPU groups are refused with a message; CPU backends work"
fi
if gpus=$(nvidia-smi --query-gpu=compute_cap,name,driver_version --format=csv,noheader 2>/dev/null); then
    while IFS=, read -r capability name driver; do
        case $capability in
            [89].* | 1[0-9].*) verdict="ok: compute capability $capability; a build here has code for it" ;;
            *) verdict="compute capability $capability is too old: 8.0 or newer is needed" ;;
        esac
        line gpu "${name# }, driver$driver" "$verdict"
    done <<<"$gpus"
    # What NCCL asks of every GPU before it gives kernels a network: the driver's attribute 110.
    lacking=$(python3 - 2>/dev/null <<'PYTHON' || echo unknown
import ctypes, sys
driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
    sys.exit(1)
has = ctypes.c_int()
print(*[gpu for gpu in range(number.value)
        if driver.cuDeviceGetAttribute(ctypes.byref(has), 110, gpu) == 0 and not has.value])
PYTHON
    )
    case $lacking in
        "") line attribute "GPU_DIRECT_RDMA_WITH_CUDA_VMM" "ok: all GPUs have it, which NCCL's network for kernels asks" ;;
        unknown) line attribute "GPU_DIRECT_RDMA_WITH_CUDA_VMM" "the driver could not be asked" ;;
        *) line attribute "GPU $lacking without GPU_DIRECT_RDMA_WITH_CUDA_VMM" \
            "NCCL gives kernels no network between several LSA teams" ;;
    esac
    if [ "$(wc -l <<<"$gpus")" -gt 1 ]; then
        while IFS='|' read -r kind pairs; do
            line link "$kind" "$pairs"
        done < <(PYTHONPATH=python/crossdock/launcher python3 -c 'import gpu_links
for row in gpu_links.links(): print(*row, sep="|")')
    fi
    [ "$(wc -l <<<"$gpus")" -gt 1 ] || line ranks "one GPU" "NCCL_MULTI_RANK_GPU_ENABLE=1 lets several ranks share it"
else
    line gpu "no NVIDIA driver, or no GPU" "./dev gpu-bundle makes a folder to run where one is"
fi
