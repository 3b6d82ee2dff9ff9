# SPDX-License-Identifier: Apache-2.0
"""Runs an unchanged program on Crossdock: a Python script, a module (-m), or any other command (mpirun, torchrun, a
program in C or C++), with all processes that it starts. For nccl_ep.h, nccl.ep, TransformerEngine, and with
--as-deep-ep DeepEP."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from crossdock.cli.check import check
from crossdock.errors import InvalidUsage
from crossdock.launcher import engine_notes
from crossdock.launcher.program import Program, prepare

# Where launchers tell a process its rank: one of all says what is used.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options = "%(prog)s [-h] [--as-deep-ep] [--plugin FILE]"
    parser.usage = f"{options} [-m] PROGRAM ...\n       {options} --check"
    parser.add_argument("--as-deep-ep", action="store_true", help="make `import deep_ep` find Crossdock's module")
    parser.add_argument(
        "--plugin", default="", metavar="FILE", help="NCCL's network plugin, libnccl-rma-crossdock.so (NCCL_RMA_PLUGIN)"
    )
    parser.add_argument("--check", action="store_true", help="start nothing, print what each engine would use")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is the name of a Python module")
    # The program and its arguments in one: argparse takes a "--" away only where it follows an argument of its own.
    what = "Python script or any other command, with its arguments; with -m module"
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help=what)


def main(options: argparse.Namespace) -> int | Callable[[], int]:
    """Prepares this process; returns a function that runs the program, or what --check returns."""
    words = options.command_line
    is_behind_dashes = words[:1] == ["--"]
    if options.check:
        if words:
            raise InvalidUsage(f"PROGRAM is {words[0]}, and --check takes none: it checks what is installed")
        return check(options.as_deep_ep, options.plugin)
    if is_behind_dashes:
        del words[0]
    if not words:
        raise InvalidUsage("PROGRAM is missing: name a script or a command, or with -m a module (-h says more)")
    name, arguments = words[0], words[1:]
    kind = "module" if options.is_module else _kind_of(name, is_behind_dashes)
    if kind == "module":
        _begin_path(os.getcwd())
        _expect_module(name)
    elif kind == "script":
        path = os.path.realpath(name)
        _begin_path(path if os.path.isdir(path) else os.path.dirname(path))
    elif options.as_deep_ep:
        _expect_python_path(name, arguments)
    program = prepare(options.as_deep_ep, options.plugin)
    engine = engine_notes.notes(words, os.environ, options.as_deep_ep)
    os.environ.update(engine_notes.variables(words, os.environ))
    if kind != "command":
        program.enter()
    if not any(int(os.environ.get(rank) or 0) for rank in RANKS if os.environ.get(rank, "").isdigit()):
        for line in program.message(), *engine:
            print(f"crossdock: {line}", file=sys.stderr, flush=True)
    if kind == "command":
        return partial(_exec, program, name, arguments)
    return partial(_run, name, arguments, kind)


def _kind_of(name: str, is_behind_dashes: bool) -> str:
    """script or command. InvalidUsage: it is neither.

    As in a shell, a name without a slash is a command on PATH, whatever lies in the current folder. Names of Python's
    files are scripts; behind "--", so are files whose name is no command's.
    """
    path = Path(name)
    is_of_python = path.suffix in (".py", ".pyc", ".pyz")
    has_folder = "/" in name
    if not has_folder and not is_of_python:
        if shutil.which(name) is not None:
            return "command"
        if not is_behind_dashes:
            advice = f"./{name} runs a file of the current folder, -m {name} a module"
            raise InvalidUsage(f"PROGRAM is {name}, which is no command on PATH ({advice})")
    if is_of_python or (path / "__main__.py").is_file():
        if path.exists():
            return "script"
    elif path.is_file():
        if has_folder and os.access(path, os.X_OK):
            return "command"
        with path.open("rb") as file:
            first = file.readline(256)
        if not first.startswith(b"\x7fELF") and not (first.startswith(b"#!") and b"python" not in first):
            return "script"
        remedy = f"chmod +x {name}" if has_folder else f"write ./{name}"
        raise InvalidUsage(f"{name} is a program that is {'not executable' if has_folder else 'no script'}: {remedy}")
    raise InvalidUsage(
        f"PROGRAM is {name}, {'a folder without __main__.py' if path.is_dir() else 'and there is no such file'}"
    )


def _begin_path(folder: str) -> None:
    """Puts folder where Python itself does at a program's start, in place of what it has put there for this command."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _expect_module(name: str) -> None:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise InvalidUsage(f"PROGRAM is {name}, and there is no such module")


def _expect_python_path(name: str, arguments: Sequence[str]) -> None:
    """InvalidUsage: the command is a Python that ignores PYTHONPATH, by which it would find deep_ep."""
    if not Path(name).name.startswith("python"):
        return
    for option in itertools.takewhile(lambda argument: re.fullmatch("-[A-Zbdiqsuv]+", argument), arguments):
        if {"E", "I"} & set(option):
            raise InvalidUsage(
                f"{name} {option} ignores PYTHONPATH, by which --as-deep-ep reaches it: leave {option} out, or start "
                "the script with python -m crossdock run --as-deep-ep SCRIPT.py"
            )


def _run(name: str, arguments: Sequence[str], kind: str) -> int:
    sys.argv = [name, *arguments]
    if kind == "module":
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except ImportError as error:
            if not _is_of_runpy(error):
                raise
            print(f"crossdock: PROGRAM is {name}: {error}", file=sys.stderr)
            return 1
    else:
        runpy.run_path(os.path.abspath(name), run_name="__main__")
    return 0


def _is_of_runpy(error: ImportError) -> bool:
    """Whether runpy found no module to run, rather than the program's own code an import."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return bool(frame.f_globals["__name__"] == "runpy")


def _exec(program: Program, name: str, arguments: Sequence[str]) -> int:
    sys.stdout.flush()
    try:
        os.execvpe(name, [name, *arguments], os.environ | program.variables(os.environ))
    except OSError as error:
        print(f"crossdock: {name} cannot be started: {error.strerror}", file=sys.stderr)
        return 126
