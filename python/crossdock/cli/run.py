# SPDX-License-Identifier: Apache-2.0
"""Runs an unchanged program on Crossdock: a Python script, a module (-m), or any other command (mpirun, torchrun, a
program in C or C++), with all processes that it starts. For nccl_ep.h, nccl.ep, TransformerEngine, and with
--as-deep-ep DeepEP."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crossdock.cli.check import check
from crossdock.errors import InvalidUsage
from crossdock.program import Program, prepare

# Where launchers tell a process its rank: one of all says what is used.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class _Check(argparse.Action):
    """Like --help: it ends the command, so no program needs to be named."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        parser.exit(check(namespace.as_deep_ep, namespace.plugin))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--as-deep-ep", action="store_true", help="make `import deep_ep` find Crossdock's module")
    parser.add_argument(
        "--plugin", default="", metavar="FILE", help="NCCL's network plugin, libnccl-rma-crossdock.so (NCCL_RMA_PLUGIN)"
    )
    parser.add_argument("--check", action=_Check, nargs=0, help="start nothing, print what installed engines would use")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is the name of a Python module")
    parser.add_argument("program", metavar="PROGRAM", help="Python script or any other command; with -m module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own")


def main(options: argparse.Namespace) -> Callable[[], int]:
    """Prepares this process; returns a function that runs the program."""
    kind = "module" if options.is_module else _kind_of(options.program)
    if kind == "module":
        _expect_module(options.program)
    program = prepare(options.as_deep_ep, options.plugin)
    if kind != "command":
        program.enter()
    if not any(int(os.environ.get(name) or 0) for name in RANKS if os.environ.get(name, "").isdigit()):
        print(f"crossdock: {program.message()}", file=sys.stderr, flush=True)
    if kind == "command":
        return partial(_exec, program, options.program, options.arguments)
    return partial(_run, options, kind)


def _kind_of(name: str) -> str:
    """script or command. InvalidUsage: it is neither."""
    path = Path(name)
    if path.suffix in (".py", ".pyc", ".pyz") or (path / "__main__.py").is_file():
        if path.exists():
            return "script"
    elif path.is_file():
        if os.access(path, os.X_OK):
            return "command"
        with path.open("rb") as file:
            is_program = file.read(4) == b"\x7fELF"
        if not is_program:
            return "script"
        raise InvalidUsage(f"{name} is a program that is not executable: chmod +x {name}")
    elif shutil.which(name) is not None:
        return "command"
    raise InvalidUsage(f"PROGRAM is {name}, which is neither a file nor a command on PATH (-m {name} runs a module)")


def _expect_module(name: str) -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # where python -m looks, too
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise InvalidUsage(f"PROGRAM is {name}, and there is no such module")


def _run(options: argparse.Namespace, kind: str) -> int:
    sys.argv = [options.program, *options.arguments]
    if kind == "module":
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, options.program.rpartition("/")[0] or ".")
        runpy.run_path(options.program, run_name="__main__")
    return 0


def _exec(program: Program, name: str, arguments: Sequence[str]) -> int:
    command = name if "/" in name or not os.path.isfile(name) else f"./{name}"
    sys.stdout.flush()
    try:
        os.execvpe(command, [name, *arguments], os.environ | program.variables(os.environ))
    except OSError as error:
        print(f"crossdock: {name} cannot be started: {error.strerror}", file=sys.stderr)
        return 126
