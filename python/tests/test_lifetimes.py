# SPDX-License-Identifier: Apache-2.0
"""Objects that share a communicator, in random orders of making, using, dropping and destroying them. CPU ranks."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
import lifetime_checks as checks  # noqa: E402


@pytest.mark.parametrize("seed", range(4))
def test_random_orders_in_threads(seed: int) -> None:
    ep.run_threads(2, lambda comm: checks.random_orders(comm, comm, "cpu", seed, 150))


def test_random_orders_in_processes() -> None:
    ep.run_processes(2, random_orders_of_seeds)


def random_orders_of_seeds(comm: ep.Communicator) -> None:
    for seed in range(4, 6):
        checks.random_orders(comm, comm, "cpu", seed, 100)


def test_elastic_buffers_one_after_another() -> None:
    ep.run_threads(2, lambda comm: checks.elastic_buffers_one_after_another(comm, "cpu"))


def shared_mappings() -> int:
    """Of this process: what ranks share."""
    with open("/proc/self/maps") as maps:
        return sum("/memfd:crossdock" in line for line in maps)


def test_a_result_keeps_no_memory_of_a_destroyed_buffer() -> None:
    ep.run_processes(2, results_outlive_buffers)


class LikeMpi4py:
    """From which a buffer makes communicators of its own."""

    def __init__(self, comm: ep.Communicator) -> None:
        self._comm = comm

    def Get_rank(self) -> int:
        return self._comm.rank

    def Get_size(self) -> int:
        return self._comm.num_ranks

    def allgather(self, own: Any) -> list[Any]:
        return [pickle.loads(part) for part in self._comm.all_gather(pickle.dumps(own).ljust(1024))]


def results_outlive_buffers(comm: ep.Communicator) -> None:
    given = checks.Given(comm, "cpu")
    before = shared_mappings()
    kept: list[Any] = []
    for _ in range(3):
        buffer: Any = deep_ep.Buffer(None, comm=LikeMpi4py(comm), low_latency_mode=True, explicitly_destroy=True)
        kept.append(buffer.low_latency_dispatch(given.x, given.ids, 4, given.num_experts, use_fp8=False))
        assert shared_mappings() > before
        buffer.destroy()
        assert shared_mappings() == before
    kept.clear()
    gc.collect()
    assert shared_mappings() == before


def dropped_buffers(comm: ep.Communicator) -> None:
    given = checks.Given(comm, "cpu")
    before = shared_mappings()
    counts = []
    for _ in range(6):
        buffer: Any = deep_ep.Buffer(comm, low_latency_mode=True)
        buffer.low_latency_dispatch(given.x, given.ids, 4, given.num_experts, use_fp8=False)
        del buffer
        gc.collect()
        counts.append(shared_mappings())
    last: Any = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
    last.destroy()
    assert counts[1:] == [counts[1]] * 5 and shared_mappings() == before


def test_the_next_buffer_of_a_communicator_closes_what_was_dropped() -> None:
    ep.run_processes(2, dropped_buffers)
