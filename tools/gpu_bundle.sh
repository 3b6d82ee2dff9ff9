#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_bundle.sh BUILD_FOLDER OUT
# Collects the GPU tests and the benchmark of a cuda build into a folder that runs on a machine with nothing but a driver
# and an NCCL: stripped programs in bin/, the libraries they need beyond the C library in lib/, and `run`.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 out=$2
limit_mib=40

rm -rf "$out"
mkdir -p "$out/bin" "$out/lib/fallback"
cp "$build/tests/conformance/crossdock_conformance" "$build/bench/ep_bench" "$build/demo/crossdock_demo" "$out/bin/"
cp -P "$build"/src/libnccl_ep.so* "$out/lib/"

# What the programs need beyond the C library travels too; the compiler's own libraries only as a fallback, since the
# other machine's may be newer and wanted by what is installed there.
ldd "$out"/bin/* | awk '$2 == "=>" {print $3}' | sort -u | while read -r library; do
    case $(basename "$library") in
        libc.so.* | libm.so.* | libdl.so.* | librt.so.* | libpthread.so.* | ld-linux* | libnccl_ep.so.*) ;;
        libstdc++.so.* | libgcc_s.so.*) cp -L "$library" "$out/lib/fallback/" ;;
        libnccl.so.* | libcuda.so.*)
            echo "gpu_bundle: $library is linked, but it must be opened at run time" >&2
            exit 1
            ;;
        *) cp -L "$library" "$out/lib/" ;;
    esac
done
strip "$out"/bin/* "$(readlink -f "$out/lib/libnccl_ep.so")"
cp tools/gpu_run.sh "$out/run"
cp tools/bench_gpu.sh "$out/bench_gpu"

size_mib=$(du -sm "$out" | cut -f1)
if [ "$size_mib" -gt $limit_mib ]; then
    echo "gpu_bundle: $out has $size_mib MiB, the limit is $limit_mib" >&2
    exit 1
fi
echo "$out: $size_mib MiB; copy it to a machine with a GPU and NCCL 2.30.4 or newer and start $out/run"
