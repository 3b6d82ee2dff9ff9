#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_shared_library.sh LIBRARY SOURCE_FOLDER SONAME LINK_NAME
# The shared library exports what symbols.txt lists, what crossdock.h, the headers in crossdock and device/entry.hpp
# declare, and what Python's module needs besides (src/api/routing.h), and nothing else; it has its SONAME and link name,
# needs only system libraries, stays loaded (threads of its own may run), and carries no search path and one version
# banner.
set -euo pipefail
library=$1 source=$2 soname=$3 link_name=$4
here=$(dirname "$0")
failed=0

fail() {
    echo "FAILED: $*"
    failed=1
}

declared=$(grep -ohE '\bcrossdock[A-Z][A-Za-z0-9]*\(' "$source"/include/crossdock.h \
    "$source"/include/crossdock/*.h "$source"/include/crossdock/device/entry.hpp "$source"/src/api/routing.h | tr -d '(')
expected=$({ cat "$here/symbols.txt" && echo "$declared"; } | LC_ALL=C sort -u)
exported=$(nm -D --defined-only "$library" | awk '{print $3}' | LC_ALL=C sort -u)
difference=$(diff <(echo "$expected") <(echo "$exported") || true)
[ -z "$difference" ] || fail "exported symbols differ (<: missing, >: not meant to be exported)"$'\n'"$difference"

dynamic=$(readelf -d "$library")
grep -q "(SONAME).*\[libnccl_ep\.so\.0\]" <<<"$dynamic" || fail "SONAME is not libnccl_ep.so.0"
[ "$soname" = libnccl_ep.so.0 ] || fail "the build calls the SONAME $soname"
[ "$(basename "$(readlink -f "$link_name")")" = libnccl_ep.so.0.2.0 ] || fail "$link_name is no link to libnccl_ep.so.0.2.0"
grep -q NODELETE <<<"$dynamic" || fail "dlclose() unloads it"
if grep -qE "\((RPATH|RUNPATH)\)" <<<"$dynamic"; then fail "there is an RPATH or RUNPATH"; fi

while read -r needed; do
    case $needed in
        libc.so.6 | libm.so.6 | libstdc++.so.6 | libgcc_s.so.1 | ld-linux-*.so.* | libdl.so.2 | librt.so.1 | libpthread.so.0) ;;
        *) fail "needs $needed, which is no system library" ;;
    esac
done < <(sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' <<<"$dynamic")

banners=$(grep -aoE 'NCCL EP version [0-9]+\.[0-9]+\.[0-9]+\+cuda[0-9]+\.[0-9]+' "$library" || true)
case $banners in
    "" | "NCCL EP version 0.2.0+cuda"*) ;;
    *) fail "the banner says: $banners" ;;
esac

[ $failed = 0 ] && echo "ok: $(wc -l <<<"$exported") symbols"
exit $failed
