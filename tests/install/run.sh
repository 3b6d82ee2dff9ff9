#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh BUILD_FOLDER CMAKE_ARGUMENTS...
# Installs a build into an empty folder, moves it (an installed tree must not know where it was made), and builds and runs
# a C and a C++ project that use it through find_package(crossdock), and a program that uses pkg-config.
set -euo pipefail
build=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
cmake=${CMAKE:-cmake}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/first" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
mv "$work/first" "$work/prefix"
prefix=$work/prefix
libraries=$(dirname "$(find "$prefix" -name libnccl_ep.so)")

for file in libnccl_ep.so libnccl_ep.so.0 libnccl_ep.so.0.2.0 libnccl_ep.a; do
    [ -e "$libraries/$file" ] || { echo "FAILED: no $file"; exit 1; }
done
[ -f "$prefix/include/nccl_ep/common.hpp" ] && [ ! -e "$prefix/include/cuda.h" ] || { echo "FAILED: headers"; exit 1; }

for project in consumer_c consumer_cpp; do
    "$cmake" -S "$here/$project" -B "$work/$project" -DCMAKE_PREFIX_PATH="$prefix" "$@" >"$work/log" 2>&1 &&
        "$cmake" --build "$work/$project" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    for program in "$work/$project"/use_*; do
        [ -x "$program" ] && [ -f "$program" ] || continue
        "$program"
        echo "ok: $project/$(basename "$program")"
    done
done

if command -v pkg-config >/dev/null; then
    # The file names the prefix that it was configured for, so tell where the tree is now.
    package=(pkg-config --define-variable=prefix="$prefix" crossdock)
    export PKG_CONFIG_PATH=$libraries/pkgconfig
    # shellcheck disable=SC2046 # flags are words
    ${CC:-cc} "$here/consumer_c/main.c" $("${package[@]}" --cflags --libs) -o "$work/with_pkg_config"
    LD_LIBRARY_PATH=$libraries "$work/with_pkg_config"
    echo "ok: pkg-config"
fi
