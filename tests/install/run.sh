#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh FOLDER CMAKE_ARGUMENTS...
# FOLDER is a build, which is installed into an empty folder and moved (an installed tree must not know where it was
# made), or an installed tree. Builds and runs a C and a C++ project that use it through find_package(crossdock), and a
# program that uses pkg-config.
set -euo pipefail
folder=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
cmake=${CMAKE:-cmake}
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

prefix=$folder
if [ -e "$folder/cmake_install.cmake" ]; then
    quietly "$cmake" --install "$folder" --prefix "$work/first"
    mv "$work/first" "$work/prefix"
    prefix=$work/prefix
fi
# The Python package's folder for TransformerEngine has a file of that name, too.
libraries=$(dirname "$(find "$prefix" -name nccl_ep_home -prune -o -name libnccl_ep.so -print)")

for file in "$libraries"/libnccl_ep.{so,so.0,so.0.2.0,a} "$prefix"/include/{nccl_ep.h,nccl_ep/common.hpp,crossdock.h}; do
    [ -e "$file" ] || { echo "FAILED: no $file"; exit 1; }
done
for file in "$prefix"/include/{cuda.h,nccl.h,ep_enums.h}; do
    [ ! -e "$file" ] || { echo "FAILED: $file must not be there"; exit 1; }
done

for project in consumer_c consumer_cpp; do
    quietly "$cmake" -S "$here/$project" -B "$work/$project" -DCMAKE_PREFIX_PATH="$prefix" "$@"
    quietly "$cmake" --build "$work/$project"
    for program in "$work/$project"/use_{shared,static,lib}; do
        if [ -x "$program" ]; then
            quietly "$program"
            echo "ok: $project/$(basename "$program")"
        fi
    done
done

if command -v pkg-config >/dev/null; then
    export PKG_CONFIG_PATH=$libraries/pkgconfig
    # shellcheck disable=SC2046 # flags are words
    ${CC:-cc} "$here/../../examples/hello.c" $(pkg-config crossdock --cflags --libs) -o "$work/with_pkg_config"
    LD_LIBRARY_PATH=$libraries quietly "$work/with_pkg_config"
    echo "ok: examples/hello.c with pkg-config"
fi
