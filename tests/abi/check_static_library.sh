#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_static_library.sh LIBRARY OTHERS...
# The archive asks for nothing but system libraries and the named others: it holds the fiber switch of Boost, and all of
# it is position independent, so that it links into somebody's shared object.
set -euo pipefail
library=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

g++ -shared -o "$work/whole.so" -Wl,--no-undefined -Wl,--whole-archive "$library" -Wl,--no-whole-archive "$@" \
    -lstdc++ -lm -lpthread -ldl -lrt
echo "ok: links as a whole into a shared object"
