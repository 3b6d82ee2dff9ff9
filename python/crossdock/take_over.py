# SPDX-License-Identifier: Apache-2.0
"""Programs that use NVIDIA's nccl.ep (wheels nccl-extensions and nccl4py) on Crossdock's library, unchanged.

Those bindings look for every function among the symbols that the process has made global before they open a library of
their own. So opening ours globally, before their first call, is all it takes.
"""

from __future__ import annotations

import ctypes
import os
import sys

from crossdock import own_library as package
from crossdock._core import has_cuda
from crossdock.errors import InvalidUsage
from crossdock.libraries import OURS, preloaded
from crossdock.loaded import file_of, loaded_files

FUNCTIONS = tuple(
    "ncclEp" + name
    for name in (
        "GetVersion TensorAlloc TensorDestroy CreateGroup GroupDestroy HandleMemSize InitHandle UpdateHandle "
        "CreateHandle HandleDestroy Dispatch Combine Complete MaskQuery MaskUpdate MaskClean GetAsyncError ErrorClear"
    ).split()
)


def own_library() -> str:
    """The file that this package's module has loaded."""
    for path in loaded_files("libnccl_ep.so"):
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | ctypes.RTLD_LOCAL)
        if hasattr(library, OURS) and not os.path.basename(path) == "libnccl_ep.so":
            return path
    raise InvalidUsage("libnccl_ep.so.0 of this package is not among the loaded libraries")


def own_name() -> str:
    return f"Crossdock {package.version()}"


def expect_ours_first() -> None:
    """InvalidUsage if the global functions belong to another library."""
    path = own_library()
    ours, global_symbols = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | ctypes.RTLD_LOCAL), ctypes.CDLL(None)
    for name in FUNCTIONS:
        found = ctypes.cast(getattr(global_symbols, name), ctypes.c_void_p).value
        if found != ctypes.cast(getattr(ours, name), ctypes.c_void_p).value:
            file = file_of(getattr(global_symbols, name))
            remedy = (
                "start the program with python -m crossdock run, or call take_over_nccl_ep before anything loads the "
                "other one"
            )
            if any(os.path.realpath(one) == os.path.realpath(file) for one in preloaded(os.environ, "")):
                remedy = "take the other one out of LD_PRELOAD"
            raise InvalidUsage(
                f"{name} of {file} is loaded globally already, and comes before that of {path}: {remedy}"
            )


def take_over_nccl_ep() -> str:
    """Makes nccl.ep use Crossdock, in this process, and returns the message that says so.

    Call it before nccl.ep's first call; python -m crossdock run does that for a whole program, and more. InvalidUsage:
    another library's functions are global already, so nccl.ep would find those.
    """
    path = own_library()
    ctypes.CDLL(path, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
    expect_ours_first()
    if "nccl.ep" in sys.modules and "nccl._extensions.bindings._internal.nccl_ep" in sys.modules:
        note = "; nccl.ep was imported before, which is fine as long as it made no call"
    else:
        note = ""
    backends = "" if has_cuda else "; this build has no GPU backend, only CPU communicators work"
    return f"nccl.ep uses {own_name()}, {path}{note}{backends}"
