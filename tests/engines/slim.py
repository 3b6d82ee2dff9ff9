# SPDX-License-Identifier: Apache-2.0
"""CUDA libraries small enough to carry: stripped, without the device code of other GPUs, and packed by xz."""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess
from pathlib import Path

# A container of device code: its magic number, a version, the size of this header and of what follows. Each entry in it
# begins with its kind, the sizes of its own header and payload, and further on the architecture.
MAGIC = struct.pack("<I", 0xBA55ED50)
CONTAINER, ENTRY, ARCHITECTURE_AT = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 28


def blank_others(image: bytearray, architecture: int) -> tuple[int, int]:
    """Writes zeros over the device code of other architectures; returns the bytes that were kept and blanked."""
    kept = blanked = 0
    at = image.find(MAGIC)
    while at >= 0:
        _, version, header, payload = CONTAINER.unpack_from(image, at)
        entry, end = at + header, at + header + payload
        if version != 1 or header != CONTAINER.size or end > len(image):  # the same four bytes in something else
            at = image.find(MAGIC, at + 4)
            continue
        while entry < end:
            _, _, entry_header, num_bytes = ENTRY.unpack_from(image, entry)
            start = entry + entry_header
            if entry_header == 0 or start + num_bytes > end:
                raise ValueError(f"an entry of device code at {entry:#x} has a size that its container cannot hold")
            if struct.unpack_from("<I", image, entry + ARCHITECTURE_AT)[0] == architecture:
                kept += num_bytes
            else:
                image[start : start + num_bytes] = bytes(num_bytes)
                blanked += num_bytes
            entry = start + num_bytes
        at = image.find(MAGIC, end)
    return kept, blanked


def slim(library: Path, architecture: int) -> int:
    """Strips the library and blanks the device code of other architectures, in place; returns the bytes kept of it."""
    subprocess.run(["strip", "--strip-unneeded", library], check=True)
    image = bytearray(library.read_bytes())
    kept, _ = blank_others(image, architecture)
    library.write_bytes(image)
    return kept


def pack(library: Path, out: Path, architecture: int) -> None:
    """Writes out, an .xz, with the library for one architecture."""
    stripped = out.with_suffix(".stripped")
    shutil.copy(library, stripped)
    try:
        kept = slim(stripped, architecture)
        image = stripped.read_bytes()
    finally:
        stripped.unlink()
    if kept == 0:
        raise ValueError(f"{library} has no device code for sm_{architecture}")
    out.write_bytes(lzma.compress(image, preset=4))


def unpack(packed: Path, out: Path) -> None:
    with lzma.open(packed) as source, out.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 22)
