#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the operations of a library that has DeepEP's Python classes: Crossdock's own, or DeepEP itself.

    torchrun --nproc-per-node 4 bench/deep_ep_bench.py [CASE...] [--library deep_ep] [--json FILE]
    python bench/deep_ep_bench.py --list
    python bench/deep_ep_bench.py --compare FILE...

A case is elastic-TOKENS[-expand[-exact]][-fp8][-SMSsms] (ElasticBuffer without CPU sync; exact: with
allow_multiple_reduction=False), ll-TOKENS[-fp8] (Buffer, low latency) or normal-TOKENS[-fp8][-SMSsms] (Buffer, normal
mode); without one, all that --list names run. Before and after it is timed, the results of a case are compared with the
tokens; a wrong one fails the program, after the other cases.

Up to 512 tokens, and in low latency, dispatch, combine and both are timed in CUDA graphs, and both also eagerly, back
to back, which shows the host's cost. Otherwise calls are timed one by one, behind work that keeps the stream busy until
the host has launched them; a fresh dispatch of Buffer's normal mode, which waits on the host, is timed on an idle
stream. A sample is the slowest rank's. On CPUs all calls are timed one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.metadata
import os
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import deep_ep_report as report
from deep_ep_names import FORMS, FP8_BLOCK, STANDARD, Case, Shape

if TYPE_CHECKING:
    from deep_ep_cases import Bench

MODULES = {"crossdock": "crossdock.deep_ep", "deep_ep": "deep_ep"}
START_SECONDS = 300  # in which the processes meet, or part
METRICS = {"steady": "device_us", "queued": "queued_us", "latency": "time_us", "eager": "eager_us"}  # of ways to time


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("cases", nargs="*", metavar="CASE")
    made.add_argument("--library", choices=tuple(MODULES), default="crossdock", help="(crossdock)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the tensors (cuda)")
    made.add_argument("--hidden", type=int, default=7168, help="elements of a token, a multiple of 128 (7168)")
    made.add_argument("--experts", type=int, default=256, help="of all ranks (256)")
    made.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    made.add_argument("--repetitions", type=int, default=30, help="samples of each operation (30)")
    made.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="of a case, else all ends (120)")
    made.add_argument("--json", type=Path, metavar="FILE", help="for the results; those of other cases in it stay")
    made.add_argument("--commit", help="of the library, for --json (what git says of this file's folder)")
    made.add_argument("--list", action="store_true", help="print the cases that run without a CASE, and end")
    made.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="print files of --json, or runs of bench/results/deep_ep.jsonl by name, side by side, and end",
    )
    return made


def variable(name: str) -> int:
    """Of torchrun."""
    value = os.environ.get(name, "")
    if not value.isdecimal():
        fail(f"{name} is {value!r} in the environment, expected a number: start this program with torchrun")
    return int(value)


def fail(message: str) -> NoReturn:
    print(f"deep_ep_bench: {message}", file=sys.stderr)
    sys.exit(2)


def check_options(options: argparse.Namespace) -> None:
    """All but the cases. Exits with a message."""
    num_ranks = variable("WORLD_SIZE")
    for name, most in (("hidden", 1 << 20), ("experts", 1 << 20), ("topk", 64), ("repetitions", 1 << 20)):
        value = getattr(options, name)
        if not 1 <= value <= most:
            fail(f"--{name} is {value}, allowed: 1..{most}")
    if options.hidden % FP8_BLOCK != 0:
        fail(f"--hidden is {options.hidden}, allowed: multiples of {FP8_BLOCK}")
    if options.experts % num_ranks != 0:
        fail(f"--experts is {options.experts}, allowed: multiples of the number of ranks ({num_ranks})")
    if options.topk > options.experts:
        fail(f"--topk is {options.topk}, allowed: at most --experts ({options.experts})")
    if not options.limit > 0:
        fail(f"--limit is {options.limit:g}, allowed: more than 0")
    if options.json is not None and not options.json.parent.is_dir():
        fail(f"--json is {options.json}, allowed: files in a folder that exists")


def cases_of(names: list[str]) -> list[Case]:
    found = []
    for name in names or STANDARD:
        case = Case.of(name)
        if case is None:
            fail(f"CASE is {name!r}, allowed: {FORMS}, such as elastic-128-expand-fp8 (--list names the usual ones)")
        found.append(case)
    return found


@contextlib.contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Ends the process with a message if the block takes longer.

    By os._exit: the main thread may be in a call that never returns, and torchrun ends the other ranks. Where that call
    keeps the interpreter, no other thread of Python runs, and faulthandler ends the process.
    """

    def end() -> None:
        print(f"deep_ep_bench: {what} took longer than {seconds:g} s", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 5, exit=True)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def commit_here() -> str:
    """Of the tree that holds this file, or nothing."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""


def version_of(library: str) -> str:
    package = MODULES[library].partition(".")[0]
    own = getattr(sys.modules[package], "__version__", None)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        own = own or importlib.metadata.version(package)
    return str(own or "unknown")


def gpu_here() -> str:
    """Model and software, as ep_bench names them."""
    import torch

    index = torch.cuda.current_device()
    sms = torch.cuda.get_device_properties(index).multi_processor_count
    number = ctypes.c_int()  # torch tells the version that it was built with
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    nccl = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return (
        f"{torch.cuda.get_device_name(index)}, {sms} SMs, {torch.cuda.device_count()} here; CUDA {torch.version.cuda}, "
        f"NCCL {nccl}, torch {torch.__version__}"
    )


class Program:
    """One rank of a run."""

    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        import torch
        import torch.distributed as dist

        from deep_ep_timing import GRAPH_OPERATIONS, Clock, Team

        if options.device == "cuda":
            index = variable("LOCAL_RANK") % max(1, torch.cuda.device_count())
            self.device = torch.device("cuda", index)
            torch.cuda.set_device(index)
            dist.init_process_group("nccl", device_id=self.device)
            dist.all_reduce(torch.zeros(1, device=self.device))  # DeepEP needs a group that has communicated
        else:
            self.device = torch.device("cpu")
            dist.init_process_group("gloo")
        self.library = importlib.import_module(MODULES[options.library])
        self.options, self.shape, self.team = options, shape, Team()
        self.clock = Clock(self.team, self.device, options.repetitions)
        self.is_first = self.team.rank == 0
        settings = {"ranks": self.team.size, "device": options.device} | shape._asdict()
        settings |= {"repetitions": options.repetitions, "graph_operations": GRAPH_OPERATIONS}
        # Without the launcher's own name, which torchrun does not tell.
        command = f"torchrun --nproc-per-node {self.team.size} {shlex.join(sys.argv)}"
        commit = "" if options.library == "deep_ep" else commit_here() if options.commit is None else options.commit
        gpu = gpu_here() if options.device == "cuda" else ""
        version = version_of(options.library)
        self.document = report.new_document(options.library, version, commit, command, gpu, settings)
        if options.json is not None and self.is_first:
            report.go_on(options.json, self.document)

    def run(self, cases: list[Case]) -> list[str]:
        """The names of the cases that failed."""
        failed = []
        if self.is_first:
            print(report.heading(self.document), flush=True)
        for case in cases:
            begin = time.monotonic()
            with limited(self.options.limit, f"--limit: {case.name} on rank {self.team.rank}"):
                if not self.measure(case):
                    failed.append(case.name)
            if self.is_first:
                print(f"{case.name:28} {time.monotonic() - begin:.1f} s", flush=True)
        return failed

    def measure(self, case: Case) -> bool:
        """Whether it went well, the same on all ranks."""
        from deep_ep_cases import KINDS, WrongResult, check

        made, results, error = None, [], ""
        try:
            made = KINDS[case.kind](self.library, case, self.shape, self.device)
            check(made, self.clock)
            results = self.time(case, made)
            check(made, self.clock)
        except WrongResult as wrong:
            error = str(wrong)
        except Exception as raised:
            error = f"rank {self.team.rank}: {type(raised).__name__}: {raised}"
            traceback.print_exc()
        # A rank that failed alone comes here while others wait for it in the case, until the limit.
        errors = [text for text in dict.fromkeys(self.team.gather(error)) if text]
        self.clock.finish()
        self.team.barrier()
        if made is not None:
            made.close()
        made = None
        self.clock.release_memory()
        if self.is_first:
            for text in errors:
                print(f"deep_ep_bench: {case.name}: {text}", file=sys.stderr, flush=True)
            if not errors:
                self.keep(case.name, results)
        return not errors

    def time(self, case: Case, made: Bench) -> list[dict[str, Any]]:
        """A result per operation and way to time it."""
        found = []
        for operation, way, work in made.timed():
            way = "latency" if way in ("steady", "queued") and not self.clock.is_gpu else way
            spread = getattr(self.clock, way)(work)
            found.append({"case": case.name, "operation": operation, METRICS[way]: spread})
            if self.is_first:
                print(report.line_of(case.name, operation, METRICS[way], spread), flush=True)
        return found

    def keep(self, case: str, results: list[dict[str, Any]]) -> None:
        others = [result for result in self.document["results"] if result["case"] != case]
        self.document["results"] = [*others, *results]
        if self.options.json is not None:
            report.write_document(self.options.json, self.document)


def run(options: argparse.Namespace) -> int:
    check_options(options)
    cases = cases_of(options.cases)
    import torch.distributed as dist

    with limited(START_SECONDS, f"the start on rank {variable('RANK')}"):
        program = Program(options, Shape(options.hidden, options.experts, options.topk))
    failed = program.run(cases)
    with limited(START_SECONDS, f"the end on rank {program.team.rank}"):
        program.team.barrier()
        dist.destroy_process_group()
    if failed and program.is_first:
        print(f"deep_ep_bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main() -> int:
    options = parser().parse_args()
    try:
        if options.compare:
            print("\n".join(report.compared(options.compare)))
            return 0
        if options.list:
            print("\n".join(STANDARD))
            return 0
        return run(options)
    except report.Unfit as unfit:
        fail(str(unfit))


if __name__ == "__main__":
    sys.exit(main())
