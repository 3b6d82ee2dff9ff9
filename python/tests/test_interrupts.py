# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends what waits for other ranks, long before any timeout: KeyboardInterrupt, with what was waited for."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Rank 1 is there, but stays away.
BEGIN = """
import os, signal, sys, time
import numpy as np
import crossdock as ep

rank, folder, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore interrupts

def waits():
    print("waits", flush=True)

def join():
    path = os.path.join(folder, "id")
    if rank == 0:
        with open(path + ".new", "wb") as file:
            file.write(ep.Communicator.unique_id())
        os.rename(path + ".new", path)
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, "rb") as file:
        return ep.Communicator.join(2, rank, file.read())

def make_group(comm):
    return ep.Group(comm, num_experts=2, max_dispatch_tokens_per_rank=4, max_token_bytes=64)

def stay_away():
    if rank == 1:
        time.sleep(600)
    waits()
"""

WAITS = {
    "join": ("waits(); ep.Communicator.join(2, 0, ep.Communicator.unique_id())", "waiting for ranks 1 to join"),
    "join_hosts, rank 0": ("waits(); ep.Communicator.join_hosts(2, 0, address)", "interrupted"),
    "join_hosts, rank 1": ("waits(); ep.Communicator.join_hosts(2, 1, address)", "interrupted"),
    "barrier": (
        "comm = join(); stay_away(); comm.barrier()",
        "interrupted in crossdockCommBarrier, waiting for rank 1",
    ),
    "making a group": ("comm = join(); stay_away(); make_group(comm)", "interrupted in ncclEpCreateGroup, waiting for"),
    "closing a group": ("comm = join(); group = make_group(comm); stay_away(); group.close(); time.sleep(0)", ""),
    "threads": (
        """
def program(comm):
    if comm.rank == 0:
        waits()
        comm.barrier()
    else:
        while not interrupted:
            time.sleep(0.01)

def handler(*_):
    interrupted.append(True)
    raise KeyboardInterrupt

interrupted = []
signal.signal(signal.SIGINT, handler)
ep.run_threads(2, program)
""",
        "",
    ),
    "threads that keep pace": (
        """
def program(comm):
    if comm.rank == 0:
        waits()
    begin = time.monotonic()
    while time.monotonic() - begin < 60:
        comm.barrier()

ep.run_threads(2, program)
""",
        "",
    ),
    "dispatch": (
        """
comm = join()
group = make_group(comm)
handle = group.create_handle(ep.Layout.EXPERT_MAJOR, np.array([[0, 1]] * 4))
stay_away()
tokens, received = np.ones((4, 32), np.float16), np.zeros((1, 8, 32), np.float16)
info = ep.LayoutInfo(expert_counters=np.zeros(1, np.int32))
try:
    handle.dispatch(tokens, received, layout_info=info)
except KeyboardInterrupt:
    begin = time.monotonic()
    try:
        handle.dispatch(tokens, received, layout_info=info)
    except ep.RemoteError as error:
        assert "the group has failed: rank 0 was interrupted" in str(error), error
    else:
        raise AssertionError("a group that was interrupted goes on")
    for each in handle, group, comm:
        each.close()
    assert time.monotonic() - begin < 5
    raise
""",
        "the group has failed: rank 0 was interrupted after ",
    ),
}


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@pytest.mark.parametrize("case", WAITS)
def test_an_interrupt_ends_the_wait(case: str, tmp_path: Path) -> None:
    program, message = WAITS[case]
    script = tmp_path / "program.py"
    script.write_text(BEGIN + program)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path, free_address()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2 if "join()" in program else 1)
    ]
    try:
        assert ranks[0].stdout is not None and ranks[0].stdout.readline() == "waits\n"
        time.sleep(0.3)
        begin = time.monotonic()
        ranks[0].send_signal(signal.SIGINT)
        _, errors = ranks[0].communicate(timeout=60)
        elapsed_s = time.monotonic() - begin
        assert "KeyboardInterrupt" in errors and "Error" not in errors.replace("RemoteError", ""), errors
        assert message in errors
        # Half a second on an idle machine, with the interpreter's end.
        assert elapsed_s < 5, elapsed_s
        assert ranks[0].returncode in (1, -signal.SIGINT)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


HANDLER = """
def handler(*_):
    try:
        comm.all_gather(b"")
    except ep.InvalidUsage as error:
        print(error, flush=True)
    raise SystemExit(7)

signal.signal(signal.SIGUSR1, handler)
comm = join()
stay_away()
comm.barrier()
"""


def test_any_handler_runs_and_may_end_the_wait(tmp_path: Path) -> None:
    """It finds the library busy, as a handler in C would."""
    script = tmp_path / "program.py"
    script.write_text(BEGIN + HANDLER)
    command = [sys.executable, script]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path, ""], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None and ranks[0].stdout.readline() == "waits\n"
        time.sleep(0.3)
        ranks[0].send_signal(signal.SIGUSR1)
        printed, _ = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 7
        assert "a signal handler has run while the library waits" in printed
    finally:
        for process in ranks:
            process.kill()
            process.wait()
