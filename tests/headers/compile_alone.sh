#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compile_alone.sh c|c++|cu COMPILER INCLUDE_ROOT FLAGS...
# Each header under INCLUDE_ROOT must compile as a program's only include: .h files as C11, C++11, C++17, C++20 and CUDA
# C++, .hpp files as C++, twice in a row to see its guard.
set -euo pipefail
language=$1 compiler=$2 root=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# standards HEADER: those it must compile as in this language.
standards() {
    case $language:$1 in
        c:*.hpp) ;;
        c:*) echo c11 ;;
        cu:*) echo c++17 c++20 ;;
        *) echo c++11 c++17 c++20 ;;
    esac
}

for path in "$root"/*.h "$root"/nccl_ep/* "$root"/crossdock/*; do
    [ -f "$path" ] || continue
    header=${path#"$root"/}
    for standard in $(standards "$header"); do
        source=$work/alone.$language
        printf '#include "%s"\n#include "%s"\n' "$header" "$header" >"$source"
        if [ "$language" = cu ]; then
            command=("$compiler" -x cu -std="$standard" -c -o "$work/alone.o" "$@" "$source")
        else
            command=("$compiler" -x "$language" -std="$standard" -fsyntax-only -Wall -Wextra -Werror "$@" "$source")
        fi
        if "${command[@]}"; then
            echo "ok      $header as $standard"
        else
            echo "FAILED  $header as $standard: ${command[*]}"
            failed=1
        fi
    done
done
exit $failed
