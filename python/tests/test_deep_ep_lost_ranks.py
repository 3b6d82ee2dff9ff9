# SPDX-License-Identifier: Apache-2.0
"""Ranks that are lost, and buffers that are dropped: what DeepEP's classes do then. CPU ranks."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")
import torch.distributed as dist  # noqa: E402

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
from patience import short_timeout_ms  # noqa: E402

RANKS, M, H, E = 3, 4, 128, 3


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", short_timeout_ms())


def timeout_s() -> float:
    return int(os.environ["NCCL_EP_TIMEOUT_MS"]) / 1000


def shrinking_buffer(comm: ep.Communicator, further_bytes: int = 0) -> Any:
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(M, H, RANKS, E) + further_bytes
    return deep_ep.Buffer(comm, 0, num_bytes, low_latency_mode=True, explicitly_destroy=True, enable_shrink=True)


def masked_of(buffer: Any) -> list[int]:
    status = torch.zeros(RANKS, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    found: list[int] = status.tolist()
    return found


def layer(buffer: Any) -> float:
    """Of a token of ones for every expert, each with weight 1: how many answered."""
    x, ids = torch.ones(2, H, dtype=torch.bfloat16), torch.arange(E).repeat(2, 1)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, M, E, use_fp8=False)
    sums = buffer.low_latency_combine(rows, ids, torch.ones(2, E), handle)[0]
    assert (sums == sums[0, 0]).all()
    return float(sums[0, 0])


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("further_bytes", [0, 1 << 20])  # as where the normal mode's hint is larger
def test_a_rank_that_is_silent_from_the_first_call_on(further_bytes: int) -> None:
    """Memory is made by the constructor, so survivors go on; cleaning masks is local and takes no time."""
    meet = threading.Barrier(RANKS, timeout=100)

    def program(comm: ep.Communicator) -> None:
        buffer = shrinking_buffer(comm, further_bytes)
        if comm.rank < 2:
            for _ in range(2):
                assert layer(buffer) == 2 and masked_of(buffer) == [0, 0, 1]
            begin = time.monotonic()
            buffer.low_latency_clean_mask_buffer()
            assert time.monotonic() - begin < timeout_s() and masked_of(buffer) == [0, 0, 0]
            assert layer(buffer) == 2 and masked_of(buffer) == [0, 0, 1]
        meet.wait()
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.usefixtures("short_timeouts")
def test_a_rank_that_was_slow_takes_part_again() -> None:
    """It has made the same calls, late and alone; once everybody has cleaned its masks, all are there."""
    meet = threading.Barrier(RANKS, timeout=100)

    def program(comm: ep.Communicator) -> None:
        buffer = shrinking_buffer(comm)
        assert layer(buffer) == RANKS
        if comm.rank < 2:
            assert layer(buffer) == 2
        meet.wait()
        if comm.rank == 2:
            layer(buffer)
        buffer.low_latency_clean_mask_buffer()
        assert masked_of(buffer) == [0, 0, 0]
        meet.wait()
        assert layer(buffer) == RANKS and masked_of(buffer) == [0, 0, 0]
        buffer.destroy()

    ep.run_threads(RANKS, program)


def dies_before_its_first_call(comm: ep.Communicator) -> None:
    buffer = shrinking_buffer(comm)
    comm.barrier()
    if comm.rank == 2:
        os._exit(3)
    assert layer(buffer) == 2 and masked_of(buffer) == [0, 0, 1]
    buffer.low_latency_clean_mask_buffer()
    assert layer(buffer) == 2 and masked_of(buffer) == [0, 0, 1]
    x, ids = torch.ones(2, H, dtype=torch.bfloat16), torch.arange(E).repeat(2, 1)
    with pytest.raises(ep.RemoteError, match="num_max_dispatch_tokens_per_rank 8, .* the constructor does"):
        buffer.low_latency_dispatch(x, ids, 2 * M, E, use_fp8=False)
    assert layer(buffer) == 2
    buffer.destroy()


def test_a_rank_that_dies_before_its_first_call() -> None:
    with pytest.raises(ep.SystemFailure, match="rank 2's process ended without a result, with exit code 3"):
        ep.run_processes(RANKS, dies_before_its_first_call)


def drops_buffers(rank: int, port: int, told: Any) -> None:
    """Of a process group: makes and drops buffers of both kinds; tells how many descriptors are open after each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ids, x = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 128, dtype=torch.bfloat16)
    counts = []
    for i in range(6):
        buffer: Any = deep_ep.ElasticBuffer(dist.group.WORLD) if i % 2 == 0 else deep_ep.Buffer(dist.group.WORLD)
        if i % 2 == 0:
            buffer.dispatch(x, topk_idx=ids, num_experts=2)
        else:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
            buffer.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        begin = time.monotonic()
        del buffer
        gc.collect()
        assert time.monotonic() - begin < timeout_s()  # nobody is waited for
        counts.append(len(os.listdir("/proc/self/fd")))
        dist.barrier()
    told.send(counts)
    dist.destroy_process_group()


def test_dropped_buffers_leave_nothing_open() -> None:
    """What all ranks have dropped is closed by the next buffer that they make."""
    import multiprocessing
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=drops_buffers, args=(rank, port, pipes[rank][1])) for rank in range(2)]
    for process in processes:
        process.start()
    for process, (receiver, _) in zip(processes, pipes, strict=True):
        counts = receiver.recv()
        process.join()
        assert process.exitcode == 0
        assert len(set(counts)) == 1, counts


def test_a_process_group_without_this_rank() -> None:
    with pytest.raises(AssertionError, match="group is a ProcessGroup without this rank"):
        deep_ep.ElasticBuffer(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(AssertionError, match="group is of type int, expected a ProcessGroup or Communicator"):
        deep_ep.Buffer(7)
