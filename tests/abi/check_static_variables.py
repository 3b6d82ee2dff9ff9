# SPDX-License-Identifier: Apache-2.0
"""check_static_variables.py LIBRARY

A function's static variables have been made when the library has been loaded (core/process.h: MadeAtLoad). One that a
thread makes while another one forks stays locked in the child.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

# UCX and OpenSSL are opened when they are needed; a child that is forked meanwhile could not open them either.
MADE_LATER = {
    "crossdock::network::ucx()::library",
    "crossdock::network::(anonymous namespace)::crypto()::library",
}

library = str(Path(sys.argv[1]).resolve())
symbols = subprocess.run(["readelf", "-sWC", library], check=True, capture_output=True, text=True).stdout
guards = {}
for line in symbols.splitlines():
    fields, _, name = line.partition(" guard variable for ")
    if name and fields.split()[3] != "TLS":  # those of a thread are not locked
        guards[name] = int(fields.split()[1], 16)

ctypes.CDLL(library)
base = min(
    int(line.partition("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines() if library in line
)
not_made = {name for name, address in guards.items() if ctypes.c_byte.from_address(base + address).value == 0}
if len(guards) < 5:
    sys.exit(f"FAILED: found {len(guards)} static variables only")
if not_made - MADE_LATER:
    sys.exit(f"FAILED: not made when the library is loaded: {sorted(not_made - MADE_LATER)}")
print(f"ok: {len(guards)} static variables")
