#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel_test.sh PYTHON WHEEL
# Installs the wheel in a fresh virtual environment, and uses it there: the commands, C and C++ programs that find the
# library in it, and the examples where PYTHON has torch.
set -euo pipefail
python=$1
wheel=$(realpath "$2")
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

quietly "$python" -m venv "$work/venv"
quietly "$work/venv/bin/pip" install -q --disable-pip-version-check "$wheel"
cd "$work" # nothing may be found beside the package
venv=$work/venv/bin/python
quietly "$venv" -m crossdock doctor
quietly "$work/venv/bin/crossdock-run" --check
quietly "$venv" -c 'import crossdock; from crossdock.launcher.plugin import own_file; assert own_file() or not crossdock.has_cuda'
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
