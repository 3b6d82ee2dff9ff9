# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: its names, the two kinds of CPU backends, what imports what."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import crossdock as ep


def test_all_names_exist_and_are_documented() -> None:
    for name in ep.__all__:
        assert getattr(ep, name).__doc__ or name == "has_cuda", name


def test_versions_are_of_the_project_and_of_the_interface() -> None:
    """Each stands in one file; wheels take theirs from the same line of CMakeLists.txt."""
    root = Path(__file__).resolve().parents[2]
    assert f"project(crossdock VERSION {ep.__version__} " in (root / "CMakeLists.txt").read_text()
    header = (root / "include" / "nccl_ep.h").read_text()
    numbers = [re.search(rf"define NCCL_EP_{part} +(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    assert ep.get_lib_version() == ".".join(number[1] for number in numbers if number)


def test_enums_have_all_values_of_the_header() -> None:
    """So every recipe and every layout of nccl_ep/ep_enums.h is in its table in src/core, from which these are made."""
    header = (Path(__file__).resolve().parents[2] / "include" / "nccl_ep" / "ep_enums.h").read_text()
    pattern_of = {
        "Algorithm": r"ALGO_(\w+)",
        "Layout": r"LAYOUT_(\w+)",
        "PassDir": r"(\w+)_PASS",
        "OverflowPolicy": r"OVERFLOW_(\w+)",
        "ZeroCopyMode": r"ZERO_COPY_(\w+)",
        "ExpertIdKind": r"EXPERT_ID_(\w+)",
        "DispatchQuantizationRecipe": r"DISP_QUANT_(\w+)",
        "CombineQuantizationRecipe": r"COMB_QUANT_(\w+)",
    }
    for name, pattern in pattern_of.items():
        values = {each[1]: int(each[2]) for each in re.finditer(rf"\bNCCL_EP_{pattern} = (\d+)", header)}
        assert len(values) > 1
        assert {member.name: int(member) for member in getattr(ep, name)} == values


def test_names_are_those_of_nccl_ep() -> None:
    for name in ("create", "create_handle", "destroy", "ptr"):
        assert hasattr(ep.Group, name)
    for name in ("update", "dispatch", "combine", "complete", "destroy", "ptr"):
        assert hasattr(ep.Handle, name)
    config = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)
    assert config.quant_recipe == ep.DispatchQuantizationRecipe.FWD


def test_importing_it_does_not_import_torch() -> None:
    program = "import sys, crossdock; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def rank_and_all(comm: ep.Communicator) -> list[bytes]:
    comm.barrier()
    return comm.all_gather(bytes([comm.rank, 7]))


@pytest.mark.parametrize("run", [ep.run_threads, ep.run_processes])
def test_ranks_talk(run: object) -> None:
    expected = [bytes([rank, 7]) for rank in range(3)]
    assert run(3, rank_and_all) == [expected] * 3  # type: ignore[operator]


def test_an_adopted_communicator_of_cpus_is_one_of_cpus() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm:
        adopted = ep.Communicator.adopt(comm.ptr)
        assert adopted.is_cpu and "CPU" in repr(adopted)
        assert adopted.all_gather(b"x") == [b"x"]
        with ep.Group(adopted, num_experts=1, max_dispatch_tokens_per_rank=1, max_token_bytes=16):
            pass
        adopted.close()
        comm.barrier()  # it was borrowed
    with pytest.raises(ep.InvalidArgument, match="is a CPU communicator that has been destroyed"):
        ep.Communicator.adopt(comm.ptr)


def failing(comm: ep.Communicator) -> None:
    raise KeyError(comm.rank)


def test_a_process_that_raises_is_reported() -> None:
    with pytest.raises(KeyError, match="0") as raised:
        ep.run_processes(2, failing)
    [note] = raised.value.__notes__
    assert "on rank 0:" in note and "raise KeyError(comm.rank)" in note


class Unsendable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def one_is_killed(comm: ep.Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def one_cannot_be_sent(comm: ep.Communicator) -> None:
    if comm.rank == 1:
        raise Unsendable("out of ", "order")


def test_processes_without_a_result_are_named() -> None:
    with pytest.raises(ep.SystemFailure, match="rank 1's process ended without a result, with exit code -9"):
        ep.run_processes(2, one_is_killed)
    with pytest.raises(ep.InvalidUsage, match="rank 1's exception is Unsendable.'out of order'., which cannot be pick"):
        ep.run_processes(2, one_cannot_be_sent)
    for run in (ep.run_processes, ep.run_threads):
        with pytest.raises(ep.InvalidArgument, match="num_ranks is '2', allowed: 1..4096"):
            run("2", one_is_killed)  # type: ignore[arg-type]
        with pytest.raises(ep.InvalidArgument, match="num_ranks is 0, allowed: 1..4096"):
            run(0, one_is_killed)


def leaves_its_group(comm: ep.Communicator) -> int:
    """As a program does whose buffer lives until the process's end, or that has caught a RemoteError."""
    left.append(ep.Group(comm, num_experts=2, max_dispatch_tokens_per_rank=1, max_token_bytes=16))
    return comm.rank


def dies_beside_it(comm: ep.Communicator) -> None:
    leaves_its_group(comm)
    one_is_killed(comm)


left: list[ep.Group] = []


def test_groups_that_are_open_end_with_their_process() -> None:
    assert ep.run_processes(2, leaves_its_group) == [0, 1]
    with pytest.raises(ep.SystemFailure, match="rank 1's process ended without a result, with exit code -9"):
        ep.run_processes(2, dies_beside_it)


INTERRUPTED = """
import multiprocessing, os, signal, sys, time, crossdock as ep

def program(comm):
    os.write(1, f"{os.getpid()}\\n".encode())  # whole lines, whatever the other rank writes
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore interrupts
    multiprocessing.set_start_method(sys.argv[1])
    ep.run_processes(2, program)
"""


def has_ended(pid: int) -> bool:
    """Also one that nobody has waited for, as where no process adopts orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_launcher(tmp_path: Path, sent: signal.Signals, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, script, method]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ranks = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(sent)  # to it alone
    _, errors = parent.communicate(timeout=600)
    assert ("KeyboardInterrupt" in errors) == (sent == signal.SIGINT), errors
    until = time.monotonic() + 120
    while not all(map(has_ended, ranks)) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(map(has_ended, ranks))


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "100")
    with pytest.raises(ep.RemoteError, match="1"):
        ep.Communicator.join(2, 0, ep.Communicator.unique_id())
