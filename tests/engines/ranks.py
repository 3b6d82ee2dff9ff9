# SPDX-License-Identifier: Apache-2.0
"""Starts a check once per rank, as a user would: python -m crossdock run PROGRAM."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wheels import SKIPPED, Skip

NUM_RANKS = 2
Process = subprocess.Popen[Any]

if importlib.util.find_spec("torch") is None:  # before a check imports it
    print("skipped: torch is not installed")
    sys.exit(SKIPPED)


def is_rank() -> bool:
    return "RANK" in os.environ


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: Sequence[str], num_ranks: int, environment: Mapping[str, str], **options: Any) -> list[Process]:
    """The command once per rank, with torchrun's variables; options are Popen's."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return [subprocess.Popen(command, env={**environment, **common, **own}, **options) for own in ranks]


def run_ranks(program: str, folders: Sequence[Path], num_ranks: int = NUM_RANKS, timeout_s: int = 240) -> int:
    """Runs the program over DeepEP's module with the folders on its path; prints the last line that rank 0 says.

    Returns 0, or 1 after printing all that the failed ranks said.
    """
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "crossdock", "run", "--as-deep-ep", program, *sys.argv[1:]]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = start(command, num_ranks, environment, **output)
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if not failed:
        print(outputs[0].splitlines()[-1])
        return 0
    for rank in failed:
        print(outputs[rank], end="")
    print(f"FAILED: ranks {failed}")
    return 1


def main(name: str, check: Callable[[], int]) -> None:
    """What a check's file does at its end: runs it, or says why it cannot, and exits."""
    try:
        result = check()
    except Skip as reason:
        print(f"{name}: skipped: {reason}")
        result = SKIPPED
    sys.exit(result)
