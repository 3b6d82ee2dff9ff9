#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check.sh CXX_COMPILER BUILD_FOLDER
# What the documents say must be so: README.md's C++ program prints what it says after each of the commands that compile
# it, run as printed, and so does docs/device_api.md's program; the sizes in docs/protocol.md are those of geometry.h,
# every variable that the code reads and every step of a wait is described, and what pyproject.toml leaves out of source
# packages exists. How documents look is for ./dev lint.
# python/tests/test_guide.py and test_tutorials.py run the documents' other programs.
set -uo pipefail
cxx_compiler=$1 build=$2
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

# block DOCUMENT WORDS: the document's block of code that has these words.
block() { awk -v words="$2" '/^```/ { open = !open; if (!open && index(text, words)) printf "%s", text; text = ""; next }
    open { text = text $0 "\n" }' "$1"; }
# prints EXPECTED COMMANDS: as a shell with an installed tree in $DIR runs them.
prints() {
    printf '%s\n' "$1" >"$work/expected"
    printf '+ %s\n' "$2" >"$work/log"
    bash -euc "$2" 2>>"$work/log" | diff - "$work/expected" >>"$work/log" ||
        { cat "$work/log"; complain "a document's command does not print $1"; }
}
export DIR=$work/tree
mkdir "$work/bin"
ln -s "$cxx_compiler" "$work/bin/c++"
ln -s "$cxx_compiler" "$work/bin/g++"
PATH=$work/bin:$PATH
cmake --install "$build" --prefix "$DIR" >"$work/log" 2>&1 || { cat "$work/log"; complain "cmake --install fails"; }
block README.md "int main()" >"$work/layer.cpp"
prints 1.75 "cd $work; $(block README.md "-lnccl_ep")"
if command -v pkg-config >/dev/null; then prints 1.75 "cd $work; $(block README.md "pkg-config")"; fi

between() { sed -n "/<!-- $1 begins -->/,/<!-- $1 ends -->/p" "$2" | grep -v '^<!--\|^$'; }
if "$cxx_compiler" -std=c++20 -Isrc docs/arena_sizes.cpp -o "$work/arena_sizes"; then
    "$work/arena_sizes" | grep -v '^$' | diff - <(between arena_sizes docs/protocol.md) ||
        complain "docs/protocol.md has other sizes than geometry.h"
else
    complain "docs/arena_sizes.cpp does not compile"
fi

while read -r variable; do
    grep -q "\`$variable\`" docs/deployment.md CONTRIBUTING.md || complain "docs/deployment.md does not tell of $variable"
done < <(grep -rhoE '"(NCCL_EP|CROSSDOCK)_[A-Z_]+"' --include='*.cpp' src | tr -d '"' | sort -u)

while read -r step; do
    grep -q "^| $step |" docs/troubleshooting.md || complain "docs/troubleshooting.md does not tell of the step $step"
done < <(sed -nE '/name_of\(WaitStep/,$s/^ +return "([a-z]+)";$/\1/p' src/kernels/wait_steps.h)

while read -r excluded; do
    git ls-files --error-unmatch -- "$excluded" >/dev/null 2>&1 || [ "$excluded" = build ] ||
        complain "pyproject.toml's sdist.exclude names $excluded, which does not exist"
done < <(sed -nE 's/^sdist\.exclude = \[(.*)\]$/\1/p' pyproject.toml | tr -d '",' | tr ' ' '\n')

# The build is in another folder here, and the source tree stays as it is.
# shellcheck disable=SC2016 # the document has these words
program=$(block docs/device_api.md "examples/device_api/ping_pong.cpp -L" |
    sed -e '/^\.\/dev build/d' -e 's|$PWD/||' -e "s|build/cpu|$build|; s|-o ping_pong|-o $work/ping_pong|; s|^\./|$work/|")
prints "ping_pong, 2 ranks, threads: the results are right
ping_pong, 2 ranks, simulated, 100 seeds: the results are right" "$program"

[ $failed = 0 ] && echo "ok: ${#documents[@]} documents"
exit $failed
