# SPDX-License-Identifier: Apache-2.0
"""The clock of deep_ep_bench.py: samples of one operation, of which each is the slowest rank's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from stopwatch import mean_us, spread_of

Work = Callable[[], Any]

WARMUPS = 3
GRAPH_OPERATIONS = 10  # of a captured graph
REPLAYS = 10  # of a sample
EAGER_CALLS = 50  # of a sample
LEAD_NS = 300_000  # from the ranks' agreement on a start to the start
BUSY_CYCLES = 1_000_000  # of the GPU's clock, about 0.5 ms, in which the host calls an operation and is done


class Team:
    """What the ranks of this run tell each other outside what is timed, over gloo."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo")
        # Processes of one host read one monotonic clock.
        self._has_one_clock = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == self.size

    def gather(self, own: Any) -> list[Any]:
        """What every rank gave, by rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._group)
        return found

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def begin_together(self) -> None:
        """Returns on all ranks of one host within some microseconds; between hosts after a barrier."""
        if not self._has_one_clock:
            self.barrier()
            return
        latest = torch.tensor([time.monotonic_ns()], device="cpu")
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._group)
        start = int(latest) + LEAD_NS
        while time.monotonic_ns() < start:
            os.sched_yield()  # there may be more ranks than cores


class Clock:
    def __init__(self, team: Team, device: torch.device, repetitions: int) -> None:
        self.team, self.repetitions = team, repetitions
        self.is_gpu = device.type == "cuda"
        self._together = torch.zeros(1, device=device)

    def latency(self, work: Work) -> dict[str, float]:
        """Of one call on an idle stream, from event to event; on CPUs from its start to its return."""
        for _ in range(WARMUPS):
            work()
        return self._slowest(lambda: self._call_us(work))

    def queued(self, work: Work) -> dict[str, float]:
        """Of one call whose kernels wait on the stream behind other work, so that the host's time does not count.

        That work ends with an all-reduce, so that ranks start within some microseconds.
        """
        for _ in range(WARMUPS):
            work()

        def call() -> float:
            torch.cuda._sleep(BUSY_CYCLES)
            dist.all_reduce(self._together)
            return self._call_us(work)

        return self._slowest(call)

    def eager(self, work: Work) -> dict[str, float]:
        """Of one call among many that follow each other, by the host's clock, until the device is idle."""
        for _ in range(WARMUPS):
            work()

        def call() -> None:
            for _ in range(EAGER_CALLS):
                work()
            self.finish()

        return self._slowest(lambda: mean_us(call, 1) / EAGER_CALLS)

    def steady(self, work: Work) -> dict[str, float]:
        """Of one operation in a CUDA graph of GRAPH_OPERATIONS, among graphs that follow each other."""
        graph, _ = self.captured(work, GRAPH_OPERATIONS)
        for _ in range(WARMUPS):
            graph.replay()

        def replays() -> None:
            for _ in range(REPLAYS):
                graph.replay()

        found = self._slowest(lambda: self._call_us(replays) / (REPLAYS * GRAPH_OPERATIONS))
        graph.reset()
        return found

    def captured(self, work: Work, times: int) -> tuple[torch.cuda.CUDAGraph, Any]:
        """The graph of these calls, and what the last one returned."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                work()
        self.finish()
        self.team.barrier()  # the ranks' eager operations are over before one captures
        graph, made = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(times):
                made = work()
        self.team.barrier()
        return graph, made

    def finish(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def release_memory(self) -> None:
        """Gives the memory of dropped tensors and graphs back to the device, for libraries with allocators of their
        own."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def _call_us(self, work: Work) -> float:
        if not self.is_gpu:
            return mean_us(work, 1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def _slowest(self, sample: Callable[[], float]) -> dict[str, float]:
        own = []
        for _ in range(self.repetitions):
            self.finish()
            self.team.begin_together()
            own.append(sample())
        self.finish()
        return spread_of([max(ranks) for ranks in zip(*self.team.gather(own), strict=True)])
