# SPDX-License-Identifier: Apache-2.0
"""Shows what this machine has, and what Crossdock would use; with --pid, what a running process has loaded."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys

import crossdock as ep
from crossdock import nccl
from crossdock._core import gpu_architectures
from crossdock.cli import process
from crossdock.cli.gpus import devices
from crossdock.cli.table import aligned
from crossdock.launcher.gpu_links import links
from crossdock.launcher.loaded import loaded_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, help="ID of a running process: list the libraries it has loaded")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _library() -> str:
    return ", ".join(loaded_files("libnccl_ep.so")) or "not found"


def _gpus() -> list[str]:
    return [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]


def _nccl() -> str:
    try:
        found = f"{nccl.version()} ({nccl.file()})"
    except ep.Error as error:
        return str(error) if ep.has_cuda else "not found; this build of Crossdock does not need it"
    if not ep.has_cuda:
        return f"{found}; this build of Crossdock does not use it"
    return found if nccl.is_new_enough() else f"{found}, too old: 2.30.4 or newer is needed for GPUs"


def _cpu_backends() -> str:
    def program(comm: ep.Communicator) -> int:
        return len(comm.all_gather(b"x"))

    return "works" if ep.run_threads(2, program) == [2, 2] else "does not work"


def main(options: argparse.Namespace) -> int:
    if options.pid is not None:
        return process.report(options.pid)
    gpus = _gpus()
    found = {
        "crossdock": f"{ep.__version__}, NCCL EP {ep.get_lib_version()}, library {_library()}",
        "Python": f"{sys.version.split()[0]} on {platform.platform()}, {os.cpu_count()} CPUs",
        "NumPy, ml_dtypes": f"{_version('numpy')}, {_version('ml_dtypes')}",
        "torch": _version("torch"),
        "CPU backends": _cpu_backends(),
        "GPUs": (f"{len(gpus)} NVIDIA" if gpus else "none")
        + ("" if ep.has_cuda else "; this build of Crossdock has no GPU backend"),
        **(dict([*devices(gpu_architectures), *links()]) if gpus else {}),
        "NCCL": _nccl(),
        "matplotlib": _version("matplotlib"),
    }
    print("\n".join(aligned(list(found.items()))))
    return 0
