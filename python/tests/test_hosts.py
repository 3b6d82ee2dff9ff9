# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts, rehearsed on this one: processes with different CROSSDOCK_HOST meet over the network."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

import crossdock as ep
from reference import Problem, random_problem
from test_high_throughput import flat
from test_low_latency import expert_major


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def layer(rank: int, address: str, problem: Problem, by_environment: bool) -> tuple[int, int]:
    os.environ["CROSSDOCK_HOST"] = f"host {rank // 2}"
    if by_environment:
        own = {"CROSSDOCK_RANK": rank, "CROSSDOCK_NUM_RANKS": problem.num_ranks, "CROSSDOCK_ADDRESS": address}
        os.environ.update({name: str(value) for name, value in own.items()})
        comm = ep.Communicator.from_environment()
    else:
        comm = ep.Communicator.join_hosts(problem.num_ranks, rank, address)
    with comm:
        expert_major(comm, problem)
        flat(comm, problem, 200)
        return comm.rank, len(comm.all_gather(b"x"))


def torch_layer(rank: int, address: str, problem: Problem, path: str) -> tuple[int, int]:
    import torch.distributed as dist

    import crossdock.torch as ept

    os.environ.update({"CROSSDOCK_HOST": f"host {rank}", "MASTER_ADDR": "127.0.0.1"})
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=problem.num_ranks)
    with ept.communicator_of() as comm:
        expert_major(comm, problem)
        found = comm.rank, comm.num_ranks
    dist.destroy_process_group()
    return found


def run(num_ranks: int, program: Callable[..., tuple[int, int]], argument: Any) -> list[tuple[int, int]]:
    address, problem = free_address(), random_problem(17, num_ranks, 2, 8, 32, 3)
    with ProcessPoolExecutor(num_ranks, mp_context=multiprocessing.get_context("forkserver")) as pool:
        ranks = [pool.submit(program, rank, address, problem, argument) for rank in range(num_ranks)]
        return [rank.result() for rank in ranks]


@pytest.fixture(autouse=True, scope="module")
def needs_ucx() -> None:
    try:
        ep.Communicator.join_hosts(1, 0, free_address()).close()
    except ep.InvalidUsage as error:
        pytest.skip(f"no UCX: {error}")


@pytest.mark.parametrize("by_environment", [False, True])
def test_two_hosts_with_two_ranks(by_environment: bool) -> None:
    assert run(4, layer, by_environment) == [(rank, 4) for rank in range(4)]


def test_a_process_group_of_torch_over_two_hosts(tmp_path: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    assert run(2, torch_layer, str(tmp_path / "store")) == [(0, 2), (1, 2)]


def test_wrong_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("", "here", "host:0", "host:port"):
        with pytest.raises(ep.InvalidArgument, match="address"):
            ep.Communicator.join_hosts(1, 0, address)
    with pytest.raises(ep.InvalidArgument, match="rank"):
        ep.Communicator.join_hosts(2, 2, "127.0.0.1:7000")
    monkeypatch.setenv("CROSSDOCK_RANK", "first")
    monkeypatch.setenv("CROSSDOCK_NUM_RANKS", "2")
    with pytest.raises(ep.InvalidUsage, match="CROSSDOCK_RANK is 'first', allowed: "):
        ep.Communicator.from_environment()
