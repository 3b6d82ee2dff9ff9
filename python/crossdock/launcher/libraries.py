# SPDX-License-Identifier: Apache-2.0
"""What a shared library says about itself, and which NCCL a program should have.

Each library is opened in its own process: opened here, it would hide other libraries of the same name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from crossdock.launcher.as_deep_ep import FOLDER

NCCL = "libnccl.so.2"
NCCL_PACKAGE = "nvidia-nccl-cu13==2.30.7"
NCCL_EP_VERSION, NCCL_VERSION, OWN_VERSION = "ncclEpGetVersion", "ncclGetVersion", "crossdockGetVersion"
OURS = "crossdockGetLastError"  # no other libnccl_ep has it

_PROBE = """
import ctypes, sys
class Symbol(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p),
                ("address", ctypes.c_void_p)]
file, function, *symbols = sys.argv[1:]
library, number, symbol = ctypes.CDLL(file), ctypes.c_int(), Symbol()
if function:
    call = getattr(library, function)
    call(ctypes.byref(number))
    ctypes.CDLL(None).dladdr(ctypes.cast(call, ctypes.c_void_p), ctypes.byref(symbol))
print(number.value, *(int(hasattr(library, name)) for name in symbols))
print((symbol.file or file.encode()).decode(errors="surrogateescape"))
"""


@dataclass(frozen=True)
class Library:
    """A file. code is 0 if the version is unknown; problem says why."""

    file: str
    code: int = 0
    symbols: frozenset[str] = frozenset()
    problem: str = ""

    @property
    def version(self) -> str:
        return version_text(self.code) if self.code else "of unknown version"


def version_text(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


@cache
def ask(file: str, function: str, *symbols: str) -> Library:
    """Opens a library by path or by name, calls function(int*), and checks which symbols it has."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    # An empty entry is the current folder.
    environment["LD_LIBRARY_PATH"] = ":".join(_library_folders(environment))
    command = [sys.executable, "-I", "-S", "-c", _PROBE, file, function, *symbols]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Library(file, problem=str(error))
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) < 2:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Library(file, problem=last.partition("Error: ")[2] or last)
    code, *found = map(int, lines[-2].split())
    return Library(lines[-1], code, frozenset(name for name, is_there in zip(symbols, found, strict=True) if is_there))


def preloaded(environment: Mapping[str, str], prefix: str) -> list[str]:
    """The files of LD_PRELOAD whose names begin with prefix."""
    files = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    return [file for file in files if os.path.basename(file).startswith(prefix)]


def _library_folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _candidates(environment: Mapping[str, str]) -> Iterator[str]:
    if named := environment.get("CROSSDOCK_NCCL_LIBRARY"):
        yield named
    yield from preloaded(environment, "libnccl.so")
    # The first is the program's folder, or the current one: no package is installed there.
    packages = [path for path in sys.path if path != str(FOLDER)]
    packages = packages if sys.flags.safe_path else packages[1:]
    of_packages = [os.path.join(path, "nvidia", "nccl", "lib") for path in packages if path]
    for folder in [*_library_folders(environment), *of_packages]:
        if (file := Path(folder, NCCL)).is_file():
            yield str(file)
    yield NCCL


def find_nccl(environment: Mapping[str, str], min_code: int) -> Library:
    """The NCCL to load first: the one CROSSDOCK_NCCL_LIBRARY or LD_PRELOAD names, or else the first new enough one of
    LD_LIBRARY_PATH, of nvidia-nccl-cu13 beside this package, and of the loader's path. With a problem if there is none,
    or if the named one is too old."""
    found: list[Library] = []
    is_asked_for = bool(environment.get("CROSSDOCK_NCCL_LIBRARY")) or bool(preloaded(environment, "libnccl.so"))
    for candidate in dict.fromkeys(_candidates(environment)):
        # What the program starts may be in another folder.
        library = ask(os.path.abspath(candidate) if "/" in candidate else candidate, NCCL_VERSION)
        if library.code >= min_code:
            return library
        if library.code or is_asked_for:
            found.append(library)
        if is_asked_for:
            break
    needed = f"{version_text(min_code)} or newer is needed: pip install {NCCL_PACKAGE}"
    if not found:
        return Library(NCCL, problem=f"no {NCCL} found, {needed}")
    if is_asked_for:
        needed += ", and name that in CROSSDOCK_NCCL_LIBRARY, or take this one out of it and of LD_PRELOAD"
    if not found[0].code:
        problem = f"{found[0].file} cannot be opened as NCCL ({found[0].problem}), {needed}"
        return Library(found[0].file, problem=problem)
    problem = f"NCCL {found[0].version} ({found[0].file}) is too old, {needed}"
    return Library(found[0].file, found[0].code, problem=problem)
