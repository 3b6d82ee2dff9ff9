# SPDX-License-Identifier: Apache-2.0
"""Programs that use NVIDIA's nccl.ep (wheels nccl-extensions and nccl4py) on Crossdock's library, unchanged.

Those bindings look for every function among the symbols that the process has made global before they open a library of
their own. So opening ours globally, before their first call, is all it takes. nccl-extensions 0.2.0 has libraries in a
folder for each version of CUDA; one that is opened by its path first is out of reach, and then its user is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from crossdock._core import has_cuda
from crossdock.errors import InvalidUsage
from crossdock.launcher import own_library as package
from crossdock.launcher.libraries import OURS, preloaded
from crossdock.launcher.loaded import file_of, loaded_files

NCCL_EP_PACKAGES = ("nccl-extensions", "nccl4py")
# Prints the libraries that a process has when nccl.ep has made a call.
_CALL = """
import nccl.ep
nccl.ep.get_lib_version()
with open("/proc/self/maps") as maps:
    print(*dict.fromkeys(line.split(maxsplit=5)[5].strip() for line in maps if "/libnccl_ep.so" in line), sep="\\n")
"""
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


def files_by_path() -> list[str]:
    """The libraries that an installed nccl.ep has in folders for versions of CUDA."""
    for name in NCCL_EP_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            package = distribution(name)
            files = [file for file in package.files or [] if file.match("nccl/ep/lib/*/libnccl_ep.so*")]
            if found := [str(file.locate()) for file in files if Path(str(file.locate())).exists()]:
                return found
    return []


def nccl_ep_note(variables: Mapping[str, str], ours: Sequence[str]) -> str:
    """One line if nccl.ep, started with these variables, uses another library than ours, or "". Which one it uses is
    seen from a process that calls it; none is started where it has no library that it could open by its path."""
    files = files_by_path()
    if not files:
        return ""
    command = [sys.executable, "-c", _CALL]
    try:
        environment = os.environ | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"nccl.ep may open {files[0]} by its path, instead of Crossdock's"
    own = {os.path.realpath(file) for file in ours}
    others = [file for file in done.stdout.splitlines() if os.path.realpath(file) not in own]
    return f"nccl.ep opens {others[0]} by its path, so it does not use Crossdock" if others else ""


def take_over_nccl_ep() -> str:
    """Makes nccl.ep use Crossdock, in this process, and returns the message that says so.

    Call it before nccl.ep's first call; python -m crossdock run does that for a whole program, and more. InvalidUsage:
    another library's functions are global already, so nccl.ep would find those, or it opens a library by its path.
    """
    path = own_library()
    if other := nccl_ep_note({"LD_PRELOAD": path}, [path]):
        raise InvalidUsage(other)
    ctypes.CDLL(path, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
    expect_ours_first()
    if "nccl.ep" in sys.modules and "nccl._extensions.bindings._internal.nccl_ep" in sys.modules:
        note = "; nccl.ep was imported before, which is fine as long as it made no call"
    else:
        note = ""
    backends = "" if has_cuda else "; this build has no GPU backend, only CPU communicators work"
    return f"nccl.ep uses {own_name()}, {path}{note}{backends}"
