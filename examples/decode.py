#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decode steps in low-latency mode, with a batch of another size in every step, and one rank lost on the way.

    python examples/decode.py [--ranks 4] [--steps 30] [--device cuda] [--loss kill] [--plot times.svg]

Every rank hosts two experts of a layer. In the middle of the run the last rank is killed (or falls silent): the others
mask it after 0.5 s and go on; what its experts would have added is missing, and nothing else. On GPUs each batch size
is a CUDA graph, whose tokens and routing are written into the captured tensors. Every result is checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crossdock as ep

EXPERTS_PER_RANK, TOPK, HIDDEN, BATCHES = 2, 2, 256, (1, 3, 8, 16)


class Batch:
    """The tensors of a batch size, and a step over them: called as it is on CPUs, replayed as a graph on GPUs."""

    def __init__(self, group: ep.Group, size: int, device: str) -> None:
        self.tokens = torch.zeros(size, HIDDEN, device=device)
        self.topk_idx = torch.zeros(size, TOPK, dtype=torch.int64, device=device)
        self.weights = torch.zeros(size, TOPK, device=device)
        self.result = torch.zeros(size, HIDDEN, device=device)
        self.received = torch.zeros(EXPERTS_PER_RANK, group.num_ranks * max(BATCHES), HIDDEN, device=device)
        self.counts = torch.zeros(EXPERTS_PER_RANK, dtype=torch.int32, device=device)
        self.factors = factors(group.rank * EXPERTS_PER_RANK + torch.arange(EXPERTS_PER_RANK, device=device))
        # The routing is bound once: later steps write into topk_idx.
        self.handle = group.create_handle(ep.Layout.EXPERT_MAJOR, self.topk_idx)
        self.step: Callable[[], Any] = self.enqueue
        if device != "cpu":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.enqueue()
            self.step = graph.replay

    def enqueue(self) -> None:
        self.handle.dispatch(self.tokens, self.received, layout_info=ep.LayoutInfo(expert_counters=self.counts))
        rows = self.received * self.factors[:, None, None]  # the experts
        self.handle.combine(rows, ep.CombineOutputs(tokens=self.result, topk_weights=self.weights))

    def fill(self, seed: int, num_experts: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.tokens.copy_(torch.randn(self.tokens.shape, generator=random))
        self.weights.copy_(torch.rand(self.weights.shape, generator=random))
        self.topk_idx.copy_(torch.rand(len(self.tokens), num_experts, generator=random).argsort(dim=1)[:, :TOPK])


def factors(expert: Tensor) -> Tensor:
    return 1.0 + expert * 0.5


def active_ranks(group: ep.Group, device: str) -> Tensor:
    mask = torch.ones(group.num_ranks, dtype=torch.int32, device=device)
    group.mask_query(mask)
    return mask.bool()


def run_rank(rank: int, unique_id: bytes, options: argparse.Namespace, report: Any) -> None:
    host = ep.Communicator.join(options.ranks, rank, unique_id)
    comm = host
    if options.device != "cpu":
        from crossdock import nccl

        torch.cuda.set_device(rank % torch.cuda.device_count())
        comm = nccl.join(options.ranks, rank, host.all_gather(nccl.unique_id() if rank == 0 else bytes(128))[0])
    num_experts = options.ranks * EXPERTS_PER_RANK
    group = ep.Group(
        comm,
        num_experts=num_experts,
        max_dispatch_tokens_per_rank=max(BATCHES),
        max_token_bytes=HIDDEN * 4,
        enable_mask=True,
        timeout_ns=500_000_000,
    )
    batches = {size: Batch(group, size, options.device) for size in BATCHES}
    host.barrier()
    worst, times = 0.0, []
    for step in range(options.steps):
        if step == options.steps // 2 and rank == options.ranks - 1:
            if options.loss == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5)
            os._exit(0)
        batch = batches[BATCHES[(step + rank) % len(BATCHES)]]
        batch.fill(1000 * step + rank, num_experts)
        start = time.perf_counter()
        batch.step()
        active = active_ranks(group, options.device)
        lost = (~active).nonzero().flatten().tolist()  # waits for the step
        times.append(1000 * (time.perf_counter() - start))
        answered = active[batch.topk_idx // EXPERTS_PER_RANK]
        expected = batch.tokens * (batch.weights * factors(batch.topk_idx) * answered).sum(dim=1, keepdim=True)
        worst = max(worst, float((batch.result - expected).abs().max()))
    report.put((rank, worst, lost, group.get_async_error(), str(group.diagnosis()), times))
    for batch in batches.values():
        batch.handle.close()
    group.close()


def plot(times: dict[int, list[float]], steps: int, file: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "decode"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for rank, own in sorted(times.items()):
        axes.semilogy(own, "o-", ms=3, linewidth=0.8, label=f"rank {rank}")
    axes.axvline(steps // 2, color="#b03030", linewidth=0.8)
    top = axes.get_xaxis_transform()
    axes.text(steps // 2 + 0.3, 0.97, "the last rank is lost", color="#b03030", va="top", transform=top)
    axes.set(xlabel="step", ylabel="time of a step, ms")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes, 2 or more (4)")
    parser.add_argument("--steps", type=int, default=30, help="decode steps, 2 or more (30)")
    devices = ["cpu", "cuda"]
    parser.add_argument("--device", choices=devices, default="cpu", help="cpu or cuda (cpu); ranks may share a GPU")
    parser.add_argument("--loss", choices=["kill", "silence"], default="kill", help="how the last rank goes (kill)")
    parser.add_argument("--plot", default="", help="file for the times of the steps")
    parser.add_argument("--json", default="", help="file for the same")
    options = parser.parse_args()
    if min(options.ranks, options.steps) < 2:
        parser.error(f"--ranks is {options.ranks}, --steps is {options.steps}, allowed for both: 2 and more")
    spawn = multiprocessing.get_context("spawn")
    report, unique_id = spawn.Queue(), ep.Communicator.unique_id()
    ranks = [spawn.Process(target=run_rank, args=(r, unique_id, options, report)) for r in range(options.ranks)]
    for process in ranks:
        process.start()
    passed = True
    times: dict[int, list[float]] = {}
    for _ in range(options.ranks - 1):
        rank, worst, lost, has_error, found, times[rank] = report.get(timeout=120)
        print(f"rank {rank}: {options.steps} steps, largest error {worst:.1e}, masked ranks {lost}, {found}")
        passed &= worst < 1e-4 and lost == [options.ranks - 1] and has_error
    for process in ranks:
        process.join()
    if options.plot:
        plot(times, options.steps, options.plot)
    if options.json:
        Path(options.json).write_text(json.dumps({"device": options.device, "step_ms": times}))
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
