# SPDX-License-Identifier: Apache-2.0
"""Which libraries a running process has loaded, from /proc: files, versions, and which project they belong to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from crossdock.cli.table import aligned
from crossdock.errors import InvalidArgument
from crossdock.launcher.libraries import NCCL_EP_VERSION, NCCL_PACKAGE, NCCL_VERSION, OURS, OWN_VERSION, ask
from crossdock.launcher.loaded import all_loaded_files
from crossdock.nccl import MIN_VERSION

VARIABLES = ("LD_PRELOAD", "NCCL_EP_HOME", "NCCL_RMA_PLUGIN", "CUDA_MODULE_LOADING", "CROSSDOCK_NCCL_LIBRARY")
DELETED = " (deleted)"
# Ends of paths in any installation of Crossdock: the process may have another one than this command.
HOME_LIBRARY, DEEP_EP_FOLDER = "/crossdock/nccl_ep_home/lib/libnccl_ep.so", "/crossdock/launcher/deep_ep_path"


def report(pid: int) -> int:
    """Prints the libraries of process pid; returns 1 if two have the same name, or if NCCL is too old. Beside an NCCL
    that was preloaded another one may be: torch 2.14 opens its own by its path, and calls the preloaded one."""
    files, command, environment = _read(pid)
    libraries = [
        file for file in _named(files, "libnccl_ep.so") if not file.removesuffix(DELETED).endswith(HOME_LIBRARY)
    ]
    nccls = _named(files, "libnccl.so")
    called = [file for file in nccls if _is_preloaded(pid, file, environment)] or nccls
    rows = [("process", f"{pid}: {' '.join(command)}")]
    rows += [("libnccl_ep", f"{file}, {_whose(pid, file)}") for file in libraries] or [("libnccl_ep", "not loaded")]
    beside = ", beside the preloaded one: for whoever has opened it by its path"
    rows += [("NCCL", f"{file}, {_nccl_version(pid, file)}{'' if file in called else beside}") for file in nccls] or [
        ("NCCL", "not loaded")
    ]
    rows += [("plugin", file) for prefix in ("libnccl-rma", "libnccl-net") for file in _named(files, prefix)]
    rows += [("TransformerEngine", file) for file in _named(files, "libtransformer_engine.so")]
    rows += [("deep_ep", text) for text in _deep_ep(files, command, environment)]
    # What the process itself has set since it started is not to be seen.
    rows += [(name, f"was {environment[name]} at its start") for name in VARIABLES if environment.get(name)]
    print("\n".join(aligned(rows)))
    was_run = environment.get("NCCL_EP_HOME", "").endswith(os.path.dirname(os.path.dirname(HOME_LIBRARY)))
    remedy = "Start the program with python -m crossdock run"
    if was_run:
        remedy = "python -m crossdock run started it, so it opens one of them by its path: change that"
    problems = [
        f"{' and '.join(files_of_kind)} are of the same name: a caller gets the one that its own search finds. {remedy}"
        for files_of_kind in (libraries, called)
        if len(files_of_kind) > 1
    ]
    problems += [
        f"{file} is too old: GPUs need NCCL 2.30.4 or newer, loaded first "
        f"({f'pip install {NCCL_PACKAGE}' if was_run else 'python -m crossdock run does that'})"
        for file in called
        if 0 < ask(_path(pid, file), NCCL_VERSION).code < MIN_VERSION
    ]
    for problem in problems:
        print(f"crossdock: {problem}")
    return 1 if problems else 0


def _read(pid: int) -> tuple[list[str], list[str], dict[str, str]]:
    """Loaded files, command line and environment. InvalidArgument: there is no such process, or it is another's."""
    try:
        files = all_loaded_files(pid) if pid > 0 else []
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        raise InvalidArgument(f"--pid is {pid}, and there is no such process") from None
    except PermissionError:
        if Path(f"/proc/{pid}").stat().st_uid != os.getuid():
            raise InvalidArgument(f"--pid is {pid}, a process of another user: ask as that user, or as root") from None
        raise InvalidArgument(
            f"--pid is {pid}, and the system does not let this user read /proc/{pid}/maps (limits of ptrace, or of a "
            "container)"
        ) from None
    return files, command, {name: value for name, _, value in (line.partition("=") for line in variables)}


def _named(files: Sequence[str], prefix: str) -> list[str]:
    return [file for file in files if os.path.basename(file).startswith(prefix)]


def _is_preloaded(pid: int, file: str, environment: dict[str, str]) -> bool:
    words = environment.get("LD_PRELOAD", "").replace(" ", ":").split(":")
    return any(os.path.realpath(_path(pid, word)) == os.path.realpath(_path(pid, file)) for word in words if word)


def _path(pid: int, file: str) -> str:
    """Where this process finds the file: in a container, that name may be another file's."""
    inside = f"/proc/{pid}/root{file}"
    return inside if os.path.exists(inside) else file


def _whose(pid: int, file: str) -> str:
    if file.endswith(DELETED):
        return "which has been replaced since"
    found = ask(_path(pid, file), NCCL_EP_VERSION, OURS)
    if OURS in found.symbols:
        own = ask(_path(pid, file), OWN_VERSION)
        return f"Crossdock {own.version}" if own.code else f"Crossdock, with the interface of NCCL EP {found.version}"
    return f"not Crossdock's, {found.version}{f' ({found.problem})' if found.problem else ''}"


def _nccl_version(pid: int, file: str) -> str:
    found = ask(_path(pid, file), NCCL_VERSION)
    return f"{found.version}{f' ({found.problem})' if found.problem else ''}"


def _deep_ep(files: Sequence[str], command: Sequence[str], environment: dict[str, str]) -> list[str]:
    """Whether the process was started with --as-deep-ep: crossdock.deep_ep has no library that could tell."""
    others = [file for file in files if "deep_ep" in file and ".so" in os.path.basename(file)]
    found = [f"{file}, not Crossdock's" for file in others]
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    if "--as-deep-ep" in command or any(folder.endswith(DEEP_EP_FOLDER) for folder in path):
        found.append("import deep_ep finds crossdock.deep_ep")
    return found or ["no library of that name is loaded"]
