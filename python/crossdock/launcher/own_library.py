# SPDX-License-Identifier: Apache-2.0
"""The package's own library, which must be loaded before another one of the same name. Importing this imports _core."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path

from crossdock.launcher.loaded import loaded_files

LIBRARY = "libnccl_ep.so.0"


def _import_core() -> None:
    """Imports the extension module. The loader gives it the first library named LIBRARY in the process. If that is
    another one, the loader only complains about a symbol; this error names both files."""
    try:
        importlib.import_module("crossdock._core")
    except ImportError as error:
        own = _own_library()
        others = [path for path in loaded_files("libnccl_ep.so") if path != own]
        if not others:
            raise
        message = (
            f"{others[0]} is loaded already and has the name {LIBRARY}, so {own} of this package cannot be: take it "
            "out of LD_PRELOAD, or import crossdock before what loads it (python -m crossdock run PROGRAM does)"
        )
        if _is_command():
            print(f"crossdock: {message}", file=sys.stderr)
            raise SystemExit(2) from None
        raise ImportError(message) from error


def _own_library() -> str:
    """The library's file; in a build tree, where it is in another folder, the extension module instead."""
    here = Path(__file__).parents[1]
    candidates = [here / "lib" / LIBRARY, *here.glob("_core*.so"), here]
    return str(next(path for path in candidates if path.exists()))


def version() -> str:
    """Crossdock's own version, from crossdockGetVersion."""
    code = ctypes.c_int()
    ctypes.CDLL(_own_library()).crossdockGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def _is_command() -> bool:
    # As long as python -m looks for a module, "-m" stands for the program's name.
    is_module = sys.argv[0] == "-m" and "crossdock" in sys.orig_argv
    return is_module or os.path.basename(sys.argv[0]) == "crossdock-run"


_import_core()
