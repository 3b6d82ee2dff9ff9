#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ./dev answers at once, without building or installing anything, when it is asked for help or mistyped, and asks the
# person at the terminal before it installs packages.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# A machine on which building and installing leave a trace. $work/bin comes first on the path.
mkdir "$work/bin"
for tool in cmake apt-get pip3 sudo; do
    # shellcheck disable=SC2016 # expanded there
    printf '#!/bin/sh\necho "$0 $*" >>%s/trace\nexit 1\n' "$work" >"$work/bin/$tool"
    chmod +x "$work/bin/$tool"
done
unset CI

# said WORDS: what ./dev printed has these words.
said() {
    grep -qF -- "$1" "$work/output" && return
    printf 'FAILED: ./dev %s does not say "%s", but:\n%s\n' "$command" "$1" "$(cat "$work/output")"
    failed=1
}
# answers STATUS ARGUMENT...: ./dev ends with this status and has built and installed nothing.
answers() {
    local status=$1 result=0
    shift
    command=$*
    rm -f "$work/trace"
    PATH=$work/bin:$PATH timeout 60 "$root/dev" "$@" >"$work/output" 2>&1 </dev/null || result=$?
    if [ $result != "$status" ]; then
        printf 'FAILED: ./dev %s ended with %s, not %s\n' "$command" "$result" "$status"
        failed=1
    fi
    if [ -e "$work/trace" ]; then
        printf 'FAILED: ./dev %s called %s\n' "$command" "$(cat "$work/trace")"
        failed=1
    fi
}

answers 0 help
said "CROSSDOCK_JOBS"
while read -r name; do
    answers 0 "$name" --help
    said "$name"
done < <("$root/dev" help | sed -nE 's/^  ([a-z-]+) .*/\1/p' | grep -vE '^(tables|timeline|gpu-test|demo|bench|network-bench)$')
for name in tables timeline gpu-test demo bench network-bench; do # a program's own help
    answers 0 $name --help
    said "--"
done
answers 0 help fuzz
said "fuzz [SECONDS [WHAT]]"

answers 1 dmo
said "there is no command 'dmo'. Did you mean 'demo'?"
answers 1 xyzzy
said "there is no command 'xyzzy'. See ./dev help"
answers 1 test --hlep
said "there is no option of ctest '--hlep'. Did you mean '--help'?"
answers 1 test -j4 -R demo --output-on-failre
said "Did you mean '--output-on-failure'?"
answers 1 build
said "which preset? Allowed: cpu cuda"
answers 1 build cup
said "there is no preset 'cup'. Allowed: cpu cuda"
answers 1 sanitize asna
said "there is no sanitizer"
answers 1 engines vlm
said "Did you mean 'vllm'?"
answers 1 fuzz network
said "fuzz takes a number of seconds first, not 'network'"
answers 1 fuzz 60 kernel
said "Did you mean 'kernels'?"
answers 1 resources --updte
said "Did you mean '--update'?"
answers 1 gpu-bundle --here
said "gpu-bundle takes a folder"
answers 1 engines-gpu
said "engines-gpu takes Crossdock's wheel for GPUs, not ''"
answers 1 engines-gpu crossdock.whl
said "not 'crossdock.whl'"
answers 1 release python9.9
said "python9.9 has no headers, or is not there"
for name in doctor lint format wheel docs; do
    answers 1 $name now
    said "'now' is one argument too many"
done

# At a terminal. clang-format is what is missing.
if [ "$(id -u)" = 0 ] && command -v script >/dev/null; then
    mkdir "$work/few"
    for tool in bash dirname nproc git id cat grep sed awk mktemp rm tail env; do
        ln -s "$(command -v $tool)" "$work/few/$tool"
    done
    ln -s "$work/bin/apt-get" "$work/few/apt-get"
    # at_terminal ANSWER ARGUMENT...
    at_terminal() {
        local answer=$1
        shift
        command="$* (and $answer)"
        rm -f "$work/trace"
        printf '%s\n' "$answer" | PATH=$work/few "$(command -v script)" -qec "$root/dev $*" /dev/null >"$work/output" 2>&1
    }
    installs() { [ -e "$work/trace" ] || { echo "FAILED: ./dev $command installs nothing"; failed=1; }; }
    at_terminal n format
    said "install the packages clang-format-14 with apt-get? [y/N]"
    said "nothing was installed"
    [ ! -e "$work/trace" ] || { echo "FAILED: ./dev $command installs packages"; failed=1; }
    at_terminal y format
    installs
    at_terminal n --yes format
    installs
    CI=true at_terminal n format
    installs
else
    echo "not root, or no script(1): what ./dev asks at a terminal was not checked"
fi

[ $failed = 0 ] && echo "ok"
exit $failed
