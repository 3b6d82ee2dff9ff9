#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# options.sh PROGRAM: a program of this folder passes without options, and refuses options that it does not know.
set -euo pipefail
program=$1

# refuses MESSAGE OPTION...
refuses() {
    local message=$1 output status=0
    shift
    output=$("$program" "$@" 2>&1) || status=$?
    if [ $status != 2 ] || [[ $output != *"$message"* ]]; then
        echo "FAILED: $program $* ended with $status, without \"$message\": $output"
        exit 1
    fi
}
"$program"
"$program" --help | grep -q -- "--ranks N"
refuses "there is no option '--rnaks'" --rnaks 2
refuses "there is no option '2'" 2
refuses "--ranks needs a value" --ranks
refuses "--ranks is 'two', allowed: " --ranks two
refuses "--ranks is '65', allowed: " --ranks 65
refuses "--ranks is '0', allowed: " --ranks 0
refuses "--ranks is '-1', allowed: " --ranks -1
refuses "--backend is 'thread', allowed: threads, processes, hosts" --backend thread
refuses "--seeds is '0', allowed: 1.." --seeds 0
