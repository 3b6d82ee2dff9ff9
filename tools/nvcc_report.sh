#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nvcc_report.sh COMPILER ARGUMENTS... -o OBJECT ...
# Compiles, and keeps for ./dev resources what ptxas says of each kernel's resources in OBJECT.ptxas, and the machine code
# for each GPU in OBJECT.cubins. OBJECT.times has the processor time that it took.
set -uo pipefail
object=''
for ((i = 1; i < $#; ++i)); do
    if [ "${!i}" = -o ]; then
        next=$((i + 1))
        object=${!next}
    fi
done
rm -rf "$object.cubins"
mkdir -p "$object.cubins"
said=$("$@" -Xptxas -v --keep --keep-dir "$object.cubins" 2>&1)
status=$?
times >"$object.times"
find "$object.cubins" -type f ! -name '*.cubin' -delete
is_report='^ptxas info|^ +[0-9]+ bytes stack frame'
grep -E "$is_report" <<<"$said" >"$object.ptxas"
grep -vE "$is_report|^$" <<<"$said" >&2
exit $status
