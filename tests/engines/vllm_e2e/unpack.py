# SPDX-License-Identifier: Apache-2.0
"""Unpacks carried parts, and compiles their Python files, so that no run has to.

    python3 part1/unpack.py HOME PART [PART...]

It needs nothing but Python. Parts that come later may be unpacked into the same folder.
"""

from __future__ import annotations

import compileall
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def unpack_one(packed: Path, home: Path) -> None:
    with tarfile.open(packed) as tar:
        tar.extractall(home, filter="fully_trusted")


def unpack(home: Path, parts: list[Path]) -> int:
    begin = time.monotonic()
    home.mkdir(parents=True, exist_ok=True)
    found = [packed for part in parts for packed in sorted(part.glob("*.tar.xz"))]
    if not found:
        print(f"unpack.py: PART is {', '.join(map(str, parts))}, and no *.tar.xz is in there")
        return 2
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda packed: unpack_one(packed, home), found))
    unpacked = time.monotonic()
    compileall.compile_dir(home, quiet=2, workers=0)
    names = " ".join(packed.name.removesuffix(".tar.xz") for packed in found)
    print(f"{names}: unpacked in {unpacked - begin:.0f} s, compiled in {time.monotonic() - unpacked:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(__doc__)
        sys.exit(2)
    sys.exit(unpack(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
