# SPDX-License-Identifier: Apache-2.0
"""Which files a process has loaded, and which of them a function comes from."""

from __future__ import annotations

import ctypes
import os
from typing import Any


class _SymbolInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def loaded_files(prefix: str, process: int | str = "self") -> list[str]:
    """Paths of the loaded files whose names begin with prefix, in the order of their addresses."""
    return [path for path in all_loaded_files(process) if os.path.basename(path).startswith(prefix)]


def all_loaded_files(process: int | str = "self") -> list[str]:
    with open(f"/proc/{process}/maps", errors="surrogateescape") as maps:
        # The path is the sixth field, and may have spaces; memory without a file has five.
        fields = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    return list(dict.fromkeys(field[5] for field in fields if len(field) == 6 and field[5].startswith("/")))


def file_of(function: Any) -> str:
    """The file of a function that ctypes has found."""
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    return (info.file or b"a file of unknown name").decode(errors="surrogateescape")
