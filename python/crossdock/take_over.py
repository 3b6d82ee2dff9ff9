# SPDX-License-Identifier: Apache-2.0
"""Programs that use NVIDIA's nccl.ep (wheels nccl-extensions and nccl4py) on Crossdock's library, unchanged.

Those bindings look for every function among the symbols that the process has made global before they open a library of
their own. So opening ours globally, before their first call, is all it takes.
"""

from __future__ import annotations

import ctypes
import os
import sys

from crossdock._core import get_version, has_cuda
from crossdock.errors import InvalidUsage
from crossdock.loaded import loaded_files

FUNCTIONS = tuple(
    "ncclEp" + name
    for name in (
        "GetVersion TensorAlloc TensorDestroy CreateGroup GroupDestroy HandleMemSize InitHandle UpdateHandle "
        "CreateHandle HandleDestroy Dispatch Combine Complete MaskQuery MaskUpdate MaskClean GetAsyncError ErrorClear"
    ).split()
)


def _library() -> str:
    """The file that this package's module has loaded."""
    for path in loaded_files("libnccl_ep.so"):
        if _is_ours(path):
            return path
    raise InvalidUsage("libnccl_ep.so.0 of this package is not among the loaded libraries")


def _is_ours(path: str) -> bool:
    library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | ctypes.RTLD_LOCAL)
    return hasattr(library, "crossdockGetLastError")


def take_over_nccl_ep() -> str:
    """Makes nccl.ep use Crossdock, in this process, and returns the sentence that says so.

    Call it before nccl.ep's first call; python -m crossdock run does that for a whole program. InvalidUsage: another
    library's functions are global already, so nccl.ep would find those.
    """
    path = _library()
    ours = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
    everybody = ctypes.CDLL(None)
    for name in FUNCTIONS:
        found = ctypes.cast(getattr(everybody, name), ctypes.c_void_p).value
        if found != ctypes.cast(getattr(ours, name), ctypes.c_void_p).value:
            raise InvalidUsage(
                f"{name} of another library is loaded globally already, and comes first: call take_over_nccl_ep before "
                "anything loads nccl.ep's library"
            )
    if "nccl.ep" in sys.modules and "nccl._extensions.bindings._internal.nccl_ep" in sys.modules:
        note = "; nccl.ep was imported before, which is fine as long as it made no call"
    else:
        note = ""
    world = "" if has_cuda else "; this build has no GPU world, only CPU communicators work"
    version = get_version()
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return f"nccl.ep uses Crossdock {number}, {path}{note}{world}"


def take_over_for_children() -> str:
    """The same, and for every program that this process starts: by LD_PRELOAD.

    Children by spawn, as multiprocessing's and torchrun's, start with nothing of their parent but the environment.
    """
    sentence = take_over_nccl_ep()
    path = _library()
    if any(separator in path for separator in " :"):
        return f"{sentence}; processes that it starts use NVIDIA's: LD_PRELOAD can have no spaces or colons in a path"
    os.environ["LD_PRELOAD"] = ":".join([path, *filter(None, [os.environ.get("LD_PRELOAD")])])
    return f"{sentence}, here and by LD_PRELOAD in processes that it starts"
