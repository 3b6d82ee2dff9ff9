#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check.sh C_COMPILER CXX_COMPILER LIBRARY_FOLDER INCLUDE_FLAGS...
# What the documents say must be so: their C and C++ programs compile as printed and print what stands below them, the
# sizes in docs/protocol.md are those of geometry.h, links lead somewhere, every variable that the code reads is
# described, and no line of prose is too long for a terminal. python/tests/test_guide.py runs their Python programs.
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
shopt -s nullglob
documents=(./*.md docs/*.md docs/*/*.md .github/*.md .github/*/*.md)

# block PATTERN FILE: the first fenced block that opens in or after a line that matches.
block() { awk -v pattern="$1" '$0 ~ pattern { found = 1 } /^```/ { open = !open; if (inside) exit; inside = open && found; next } inside' "$2"; }

# run FILE LANGUAGE COMPILER FLAGS...: compiles the file's first program in that language and runs it.
run() {
    local file=$1 program=$work/program.$2
    block "^\`\`\`$2\$" "$file" >"$program"
    shift 2
    "$@" "$program" -o "$program.out" -L"$library" -lnccl_ep -Wl,-rpath,"$library" >&2 && "$program.out"
}
run README.md cpp "$cxx_compiler" -Wall -Werror -pthread "$@" | diff - <(echo 1.75) ||
    complain "README.md's C++ program does not compile, or prints something else"
# Which rank prints first is the simulation's choice.
run docs/guide.md c "$c_compiler" -Wall -Werror "$@" | sort | diff - <(block '^int main' docs/guide.md) ||
    complain "docs/guide.md's C program does not compile, or prints something else"

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
    done < <(awk '/^```/ { open = !open } !open' "$document" | grep -oE '\]\([A-Za-z0-9_./-]+[#)]' | tr -d '](#)')
    while read -r line; do
        complain "$document: line $line is longer than 120"
    done < <(awk 'length > 120 && !/^\|/ { print NR }' "$document")
done

while read -r variable; do
    grep -q "\`$variable\`" docs/deployment.md CONTRIBUTING.md || complain "docs/deployment.md does not tell of $variable"
done < <(grep -rhoE '"(NCCL_EP|CROSSDOCK)_[A-Z_]+"' --include='*.cpp' src | tr -d '"' | sort -u)

[ $failed = 0 ] && echo "ok: ${#documents[@]} documents"
exit $failed
