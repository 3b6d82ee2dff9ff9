#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check.sh CXX_COMPILER LIBRARY_FOLDER INCLUDE_FLAGS...
# What the documents say must be so: README.md's C++ program compiles as printed and prints what it says, the sizes in
# docs/protocol.md are those of geometry.h, links lead somewhere, every variable that the code reads is described, no
# line of prose is too long for a terminal, results and the fuzzers' corpora are within their limits, and what
# pyproject.toml leaves out of source packages exists.
# python/tests/test_guide.py runs the documents' Python programs.
set -uo pipefail
cxx_compiler=$1 library=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
complain() {
    echo "FAILED: $*"
    failed=1
}

# limit WHAT NUMBER MOST
limit() { [ "$2" -le "$3" ] || complain "$1: $2, allowed: at most $3"; }
limit "bytes in bench/results and bench/scale" "$(cat bench/results/* bench/scale/* | wc -c)" 2000000
limit "inputs in fuzz/corpus and fuzz/corpus_network" "$(find fuzz/corpus fuzz/corpus_network -type f | wc -l)" 60

shopt -s nullglob
documents=(./*.md docs/*.md docs/*/*.md .github/*.md .github/*/*.md)

awk '/^```/ { inside = $0 == "```cpp"; next } inside' README.md >"$work/readme.cpp"
if "$cxx_compiler" -Wall -Werror -pthread "$@" "$work/readme.cpp" -o "$work/readme" -L"$library" -lnccl_ep \
    -Wl,-rpath,"$library"; then
    "$work/readme" | diff - <(echo 1.75) || complain "README.md's C++ program prints something else"
else
    complain "README.md's C++ program does not compile"
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
    done < <(awk '/^```/ { open = !open } !open' "$document" | grep -oE '\]\([A-Za-z0-9_./-]+[#)]' | tr -d '](#)')
    while read -r line; do
        complain "$document: line $line is longer than 120"
    done < <(awk 'length > 120 && !/^\|/ { print NR }' "$document")
done

while read -r variable; do
    grep -q "\`$variable\`" docs/deployment.md CONTRIBUTING.md || complain "docs/deployment.md does not tell of $variable"
done < <(grep -rhoE '"(NCCL_EP|CROSSDOCK)_[A-Z_]+"' --include='*.cpp' src | tr -d '"' | sort -u)

while read -r excluded; do
    git ls-files --error-unmatch -- "$excluded" >/dev/null 2>&1 || [ "$excluded" = build ] ||
        complain "pyproject.toml's sdist.exclude names $excluded, which does not exist"
done < <(sed -nE 's/^sdist\.exclude = \[(.*)\]$/\1/p' pyproject.toml | tr -d '",' | tr ' ' '\n')

[ $failed = 0 ] && echo "ok: ${#documents[@]} documents"
exit $failed
