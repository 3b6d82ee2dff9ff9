# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md lists what other processes can open of a running job: a job has that and nothing else, and another user
of the same group can open none of it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import crossdock as ep
from test_hosts import free_address

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
OTHER_USER = 65534


def listed() -> dict[str, str]:
    """What `ls -l /proc/PID/fd` shows, as SECURITY.md lists it, and its mode."""
    rows = re.findall(r"^\| [^|]+ \| `([^`|]+)` \| (?:(0\d+)|-) \|", SECURITY.read_text(), re.MULTILINE)
    assert rows, "SECURITY.md has no table of resources"
    return dict(rows)


def descriptors() -> dict[int, tuple[str, int]]:
    """Name and mode of each descriptor of this process."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
            found[int(entry)] = re.sub(r"\[\d+\]", "[]", name), stat.S_IMODE(os.stat(f"/proc/self/fd/{entry}").st_mode)
        except FileNotFoundError:
            pass  # the listing itself
    return found


def sockets_of(table: str, inode_column: int) -> Iterator[list[str]]:
    own = {match[1] for entry in os.listdir("/proc/self/fd") if (match := re.match(r"socket:\[(\d+)\]", target(entry)))}
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        if words[inode_column] in own:
            yield words


def target(entry: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{entry}")
    except FileNotFoundError:
        return ""


def listening() -> list[list[str]]:
    """Sockets of this process on which others can connect."""
    tcp = [words for table in ("tcp", "tcp6") for words in sockets_of(table, 9) if words[3] == "0A"]
    udp = [words for table in ("udp", "udp6") for words in sockets_of(table, 9)]
    unix = [words for words in sockets_of("unix", 6) if int(words[3], 16) & 0x10000]
    return tcp + udp + unix


def segments() -> list[str]:
    """Segments of System V that this process has made."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[4] == str(os.getpid())]


def rank_program(pipe: Any, backend: str, num_ranks: int, rank: int, place: Any) -> None:
    os.umask(0)
    before, before_files = descriptors(), set(os.listdir("/dev/shm"))
    if backend == "processes":
        comm = ep.Communicator.join(num_ranks, rank, place)
    else:
        os.environ["CROSSDOCK_HOST"] = f"host {rank // 2}"
        comm = ep.Communicator.join_hosts(num_ranks, rank, place)
    with comm:
        kept = comm.all_gather(b"x" * 100_000)
        new = {fd: named for fd, named in descriptors().items() if fd not in before or before[fd] != named}
        # sem.mp-*: multiprocessing's semaphores, which other programs of the machine make meanwhile.
        files = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} - before_files
        pipe.send((os.getpid(), new, listening(), segments(), files))
        pipe.recv()
        assert comm.all_gather(b"y") == [b"y"] * num_ranks and len(kept) == num_ranks
    left = {fd: named for fd, named in descriptors().items() if fd not in before}
    pipe.send(left)


def run_job(backend: str, look: Callable[[list[Any]], None]) -> None:
    context = multiprocessing.get_context("spawn")
    place = ep.Communicator.unique_id() if backend == "processes" else free_address()
    pipes, ranks = [], []
    for rank in range(4):
        here, there = context.Pipe()
        pipes.append(here)
        ranks.append(context.Process(target=rank_program, args=(there, backend, 4, rank, place)))
        ranks[-1].start()
        there.close()
    try:
        look([pipe.recv() for pipe in pipes])
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            assert pipe.recv() == {}, "left open after the communicator was closed"
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
        if isinstance(place, bytes):
            ep.Communicator.release_unique_id(place)
    assert [process.exitcode for process in ranks] == [0] * len(ranks)


@pytest.mark.parametrize("backend", ["processes", "hosts"])
def test_a_job_has_what_is_listed_and_nothing_else(backend: str) -> None:
    modes = listed()

    def look(reports: list[Any]) -> None:
        for _, new, listening_sockets, own_segments, files in reports:
            assert new, "a job without descriptors was looked at"
            for name, mode in new.values():
                assert name in modes, f"SECURITY.md does not list {name}"
                if modes[name]:
                    assert mode == int(modes[name], 8), f"{name} has mode {mode:o}"
            assert not listening_sockets and not own_segments and not files

    run_job(backend, look)


def attack(process: int, numbers: list[int]) -> list[str]:
    """What this process can open of another one."""
    opened = []
    for number in numbers:
        for flags in (os.O_RDONLY, os.O_RDWR):
            try:
                os.close(os.open(f"/proc/{process}/fd/{number}", flags | os.O_NONBLOCK))
                opened.append(f"descriptor {number}")
            except OSError:
                pass
    for file in ("mem", "maps"):
        try:
            (Path("/proc") / str(process) / file).open("rb").read(1)
            opened.append(file)
        except OSError:
            pass
    for name in os.listdir("/dev/shm"):
        if (Path("/dev/shm") / name).owner() == "root" and os.access(f"/dev/shm/{name}", os.W_OK):
            opened.append(name)
    library = ctypes.CDLL(None, use_errno=True)
    library.shmat.restype = ctypes.c_void_p
    for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        if (
            line.split()[4] == str(process)
            and library.shmat(int(line.split()[1]), None, 0) != ctypes.c_void_p(-1).value
        ):
            opened.append(f"segment {line.split()[1]}")
    for words in [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]:
        if len(words) > 7 and words[7].startswith("@crossdock"):
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(2)
                try:
                    other.connect("\0" + words[7][1:])
                    opened.append(words[7] if other.recv(1) else "")
                except OSError:
                    pass
    return [each for each in opened if each]


@pytest.mark.parametrize("backend", ["processes", "hosts"])
def test_another_user_of_the_group_opens_nothing(backend: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("to play another user takes root")

    def look(reports: list[Any]) -> None:
        for process, new, *_ in reports:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.setgroups([os.getegid()])
                    os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
                    os.write(writer, (" ".join(attack(process, list(new))) or "nothing").encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            assert os.read(reader, 10_000) == b"nothing"
            os.close(reader)
            os.close(writer)

    run_job(backend, look)


def test_the_attack_finds_what_is_open(tmp_path: Path) -> None:
    """So that the test above can fail: a segment that the group may write, which is what UCX makes."""
    library = ctypes.CDLL(None, use_errno=True)
    identity = library.shmget(0, 4096, 0o1000 | 0o660)
    assert identity >= 0
    assert attack(os.getpid(), [])[-1] == f"segment {identity}"
    library.shmctl(identity, 0, None)
