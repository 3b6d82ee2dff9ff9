#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check.sh C_COMPILER CXX_COMPILER LIBRARY_FOLDER INCLUDE_FLAGS...
# What the documents say must be so: the README's program compiles as printed and prints what stands below it, the sizes
# in docs/protocol.md are those of geometry.h, links lead somewhere, every variable that the code reads is described, and
# no line is too long for a terminal.
set -uo pipefail
c_compiler=$1 cxx_compiler=$2 library=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
complain() {
    echo "FAILED: $*"
    failed=1
}
documents=(./*.md docs/*.md docs/history/*.md)

# block NUMBER FILE: the text of the file's NUMBERth fenced block.
block() { awk -v wanted="$1" '/^```/ { if (open) open = 0; else { open = 1; ++number; next } } open && number == wanted' "$2"; }

# In the README the second block is the program, the third its output.
block 2 README.md >"$work/hello.c"
if "$c_compiler" -Wall -Werror "$@" "$work/hello.c" -o "$work/hello" -L"$library" -lnccl_ep -Wl,-rpath,"$library"; then
    "$work/hello" | diff - <(block 3 README.md) || complain "README.md's program prints something else"
else
    complain "README.md's program does not compile"
fi

between() { sed -n "/<!-- $1 begins -->/,/<!-- $1 ends -->/p" "$2" | grep -v '^<!--\|^$'; }
if "$cxx_compiler" -std=c++20 -Isrc docs/arena_sizes.cpp -o "$work/arena_sizes"; then
    "$work/arena_sizes" | grep -v '^$' | diff - <(between arena_sizes docs/protocol.md) ||
        complain "docs/protocol.md has other sizes than geometry.h"
else
    complain "docs/arena_sizes.cpp does not compile"
fi

for document in "${documents[@]}"; do
    folder=$(dirname "$document")
    while read -r target; do
        [ -e "$folder/$target" ] || complain "$document: there is no $target"
    done < <(awk '/^```/ { open = !open } !open' "$document" | grep -oE '\]\([A-Za-z0-9_./-]+' | cut -c3-)
    while read -r line; do
        complain "$document: line $line is longer than 120"
    done < <(awk 'length > 120 { print NR }' "$document")
done

while read -r variable; do
    grep -q "\`$variable\`" docs/environment.md || complain "docs/environment.md does not tell of $variable"
done < <(grep -rhoE '"(NCCL_EP|CROSSDOCK)_[A-Z_]+"' --include='*.cpp' src | tr -d '"' | sort -u)

[ $failed = 0 ] && echo "ok: ${#documents[@]} documents"
exit $failed
