#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel_test.sh PYTHON
# Builds the wheel from a clean copy of the sources, installs it with its dependencies in a fresh virtual environment, and
# uses it there: the demo, the training example where PYTHON has torch, and C and C++ programs that find the library in it.
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

quietly "$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$work" .
echo "ok: $(basename "$work"/*.whl)"
quietly "$python" -m venv "$work/venv"
quietly "$work/venv/bin/pip" install -q --disable-pip-version-check "$work"/*.whl rich matplotlib
cd "$work" # nothing may be found beside the package
venv=$work/venv/bin/python
quietly "$venv" -m crossdock doctor
quietly "$venv" -m crossdock demo --world processes --ranks 4 --steps 3 --json demo.json
quietly "$venv" -m crossdock plot demo.json demo.svg
echo "ok: python -m crossdock doctor, demo, plot"
for project in consumer_c consumer_cpp; do
    quietly cmake -S "$root/tests/install/$project" -B "$project" \
        -Dcrossdock_DIR="$("$venv" -c 'import crossdock; print(crossdock.get_cmake_dir())')"
    quietly cmake --build "$project" --target use_shared
    quietly "$project/use_shared"
    echo "ok: $project with find_package(crossdock) in the wheel"
done
if "$python" -c 'import torch' 2>/dev/null; then
    # torch is large: its environment's packages are lent, behind the fresh one's own.
    PYTHONPATH=$("$python" -c 'import site; print(site.getsitepackages()[0])') \
        quietly "$venv" "$root/examples/moe_lm/train.py" --ranks 2 --steps 5 --compare
    echo "ok: examples/moe_lm"
fi
