# SPDX-License-Identifier: Apache-2.0
"""A MoE layer for decoding whose rows return while others are still computed, beside the same layer one step after the
other: same bits, times side by side.

    torchrun --nproc-per-node 4 examples/overlap/moe_layer.py [--tokens 8 32 128 512] [--hidden 7168] [--inner 2048]

Experts are SwiGLU in bf16, two grouped GEMMs in Triton. Both variants are CUDA graphs and use the same GEMM kernels.
Overlapped, the second GEMM runs beside the sending half of combine. With --publish, the first GEMM also runs beside
dispatch, and waits for blocks of rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import crossdock as ep
from crossdock.torch import communicator_of
from crossdock.triton import leave, overlap_turn, wait_block, wait_counts

BLOCK_ROWS = 64


@triton.jit
def grouped_gemm(
    x,  # [E, SLOTS, K]
    weights,  # [E, N, K], or [E, 2 N, K]: gate, then up
    y,  # [E, SLOTS, N]
    counts,  # [E]: rows; where the kernel does not wait
    words,  # where it waits
    done,  # [E, blocks]: where it finishes, how many tiles of a block of rows are computed
    tiles_taken,  # how many tiles programs have taken; 0 before the kernel
    tiles_of_other,  # the same of the GEMM that runs before or after this one
    ZONES: tl.constexpr,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    WAITS: tl.constexpr,
    FINISHES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Tiles of all blocks of rows, of which each program takes the next one, so that programs may start late."""
    BLOCKS: tl.constexpr = (SLOTS + BM - 1) // BM
    TILES: tl.constexpr = N // BN
    zones = tl.arange(0, ZONES)
    turn = 0
    if WAITS:
        turn = overlap_turn(words)
        rows = wait_counts(words, turn, zones, ZONES, BLOCKS)
    else:
        rows = tl.load(counts + zones)
    tiles = (rows + BM - 1) // BM * TILES
    ends = tl.cumsum(tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(tiles_of_other, 0)
    total_tiles = tl.sum(tiles)
    tile = tl.atomic_add(tiles_taken, 1)
    while tile < total_tiles:
        zone = tl.sum((ends <= tile).to(tl.int32))
        at = tile - tl.sum(tl.where(zones < zone, tiles, 0))
        block = at // TILES
        column = at % TILES * BN
        left = tl.sum(tl.where(zones == zone, rows, 0)) - block * BM
        if WAITS:
            left = wait_block(words, turn, zone, block, ZONES, BLOCKS)
        m = tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        k = tl.arange(0, BK)
        of_row = (zone * SLOTS + block * BM + m).to(tl.int64)
        width: tl.constexpr = 2 * N if GATED else N
        from_x = x + of_row[:, None] * K + k[None, :]
        from_w = weights + (zone * width + n).to(tl.int64)[None, :] * K + k[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        other = tl.zeros((BM, BN), tl.float32)
        for _ in range(0, K, BK):
            part = tl.load(from_x, mask=(m < left)[:, None], other=0.0)
            total = tl.dot(part, tl.load(from_w), total)
            if GATED:
                other = tl.dot(part, tl.load(from_w + N * K), other)
            from_x += BK
            from_w += BK
        if GATED:
            total = total * tl.sigmoid(total) * other
        tl.store(y + of_row[:, None] * N + n[None, :], total.to(tl.bfloat16), mask=(m < left)[:, None])
        if FINISHES:
            tl.debug_barrier()  # all of the program's stores come before the count
            tl.atomic_add(done + zone * BLOCKS + block, 1, sem="release", scope="gpu")
        tile = tl.atomic_add(tiles_taken, 1)
    if WAITS:
        leave(words, tl.num_programs(0))


class Layer:
    """The experts of this rank, and both ways to run them."""

    def __init__(self, comm: ep.Communicator, tokens: int, hidden: int, inner: int, experts: int, topk: int) -> None:
        ranks, self.local = comm.num_ranks, experts // comm.num_ranks
        self.slots, self.hidden, self.inner, self.tokens = ranks * tokens, hidden, inner, tokens
        device = torch.device("cuda", torch.cuda.current_device())
        make = torch.Generator(device).manual_seed(comm.rank)
        self.up = torch.randn(self.local, 2 * inner, hidden, device=device, generator=make).bfloat16() * hidden**-0.5
        self.down = torch.randn(self.local, hidden, inner, device=device, generator=make).bfloat16() * inner**-0.5
        self.x = torch.randn(tokens, hidden, device=device, generator=make).bfloat16()
        self.ids = torch.rand(tokens, experts, device=device, generator=make).topk(topk, dim=1).indices
        self.weights = torch.rand(tokens, topk, device=device, generator=make)
        self.rows = torch.empty(self.local, self.slots, hidden, dtype=torch.bfloat16, device=device)
        self.middle = torch.empty(self.local, self.slots, inner, dtype=torch.bfloat16, device=device)
        self.answers = torch.zeros_like(self.rows)
        self.counts = torch.zeros(self.local, dtype=torch.int32, device=device)
        self.sums = torch.empty_like(self.x)
        self.group = ep.Group(
            comm, num_experts=experts, max_dispatch_tokens_per_rank=tokens, max_token_bytes=2 * hidden
        )
        self.handle = self.group.init_handle(ep.Layout.EXPERT_MAJOR, topk)
        self.handle.update(self.ids)
        self.words = torch.zeros(self.handle.overlap_words(BLOCK_ROWS), dtype=torch.int32, device=device)
        blocks = (self.slots + BLOCK_ROWS - 1) // BLOCK_ROWS
        self.done = torch.zeros(self.local, blocks, dtype=torch.int32, device=device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.taken = torch.zeros(2, dtype=torch.int32, device=device)
        self.beside = torch.cuda.Stream()

    def forget(self) -> None:
        """What is not computed anew shows in the sums."""
        for made in (self.rows, self.middle, self.answers, self.sums):
            made.fill_(float("nan"))

    def dispatch(self) -> None:
        info = ep.LayoutInfo(expert_counters=self.counts)
        self.handle.dispatch(self.x, self.rows, layout_info=info)

    def combine(self, send_only: bool = False) -> None:
        outputs = ep.CombineOutputs(tokens=self.sums, topk_weights=self.weights)
        self.handle.combine(self.answers, outputs, send_only=send_only)

    def first_gemm(self, waits: bool) -> None:
        """waits: it starts when all blocks of the kernel before it have started (programmatic dependent launch)."""
        self.gemm(self.rows, self.up, self.middle, 0, self.sms, waits=waits, finishes=False)

    def second_gemm(self, sms: int, finishes: bool) -> None:
        self.gemm(self.middle, self.down, self.answers, 1, sms, waits=False, finishes=finishes)

    def gemm(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        i: int,
        sms: int,
        waits: bool,
        finishes: bool,
    ) -> None:
        taken, other = self.taken[i : i + 1], self.taken[1 - i : 2 - i]
        n, k = y.shape[2], x.shape[2]
        common = {"ZONES": self.local, "SLOTS": self.slots, "BM": BLOCK_ROWS, "BK": 64, "num_warps": 4, "num_stages": 4}
        grouped_gemm[(2 * sms,)](
            x, w, y, self.counts, self.words, self.done, taken, other, N=n, K=k, GATED=i == 0, WAITS=waits,
            FINISHES=finishes, BN=64 if i == 0 else 128, launch_pdl=waits, **common,
        )  # fmt: skip

    def sequential(self) -> None:
        self.dispatch()
        self.first_gemm(waits=False)
        self.second_gemm(self.sms, finishes=False)
        self.combine()

    def begin_overlap(self, publish: bool) -> None:
        """Dispatch publishes rows in words, if at all; combine waits for done."""
        words = self.words if publish else None
        self.handle.set_overlap(words, block_rows=BLOCK_ROWS, done=self.done, done_value=self.hidden // 128)

    def load_kernels(self, publish: bool) -> None:
        """Runs the overlapped kernels one after the other. CUDA loads a kernel at its first launch, and loading may
        wait for running kernels, for example for a combine that waits for the kernel being loaded.
        """
        self.begin_overlap(publish)
        self.done.zero_()
        self.dispatch()
        self.first_gemm(waits=publish)
        self.second_gemm(self.sms, finishes=True)
        self.combine(send_only=True)
        self.handle.complete()
        self.handle.set_overlap()
        torch.cuda.synchronize()

    def overlapped(self, publish: bool, dispatch_sms: int, combine_sms: int) -> None:
        """The second GEMM, on another stream, beside the sending half of combine. The receiving half then has all SMs.
        If dispatch publishes rows, the first GEMM runs beside it.

        Kernels that wait for each other all fit: the first GEMM starts once the dispatch has all its SMs. A block of a
        combine needs a whole SM. So the combine is launched before the second GEMM, which leaves its SMs free. If the
        GEMM's blocks come first nevertheless, they spread over all SMs, and the combine starts when they end.
        """
        main = torch.cuda.current_stream()
        between = torch.cuda.Event()
        self.begin_overlap(publish)
        self.handle.set_sms(dispatch_sms)
        self.done.zero_()
        self.dispatch()
        self.first_gemm(waits=publish)
        between.record(main)
        self.handle.set_sms(combine_sms)
        self.combine(send_only=True)
        with torch.cuda.stream(self.beside):
            self.beside.wait_event(between)
            self.second_gemm(self.sms - combine_sms, finishes=True)
        self.handle.set_sms(0)
        self.handle.complete()
        main.wait_stream(self.beside)
        self.handle.set_overlap()


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph


def time_us(graph: torch.cuda.CUDAGraph, repetitions: int) -> float:
    """The slowest rank's median of a replay, of ten back to back."""
    times = []
    for _ in range(repetitions):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128, 512], help="of a rank (8 32 128 512)")
    for name, value in (("hidden", 7168), ("inner", 2048), ("experts", 256), ("topk", 8), ("repetitions", 20)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"({value})")
    parser.add_argument("--dispatch-sms", type=int, default=0, help="of the overlapped dispatch (0: all)")
    parser.add_argument("--combine-sms", type=int, default=24, help="of the overlapped combine (24)")
    parser.add_argument("--publish", action="store_true", help="the first GEMM runs beside dispatch")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if ranks == 0:
        parser.error("start this program with torchrun")
    for name, multiple in (("hidden", 128), ("inner", 64)):
        value = getattr(options, name)
        if value < 1 or value % multiple != 0:
            parser.error(f"--{name} is {value}, allowed: multiples of {multiple}")
    local = options.experts // ranks
    if options.experts % ranks != 0 or local < 1 or local & (local - 1) != 0:
        parser.error(f"--experts is {options.experts}, allowed: a power of two for each of the {ranks} ranks")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    for name, least in (("dispatch", 0), ("combine", 1)):
        value = getattr(options, f"{name}_sms")
        if not least <= value < sms:
            parser.error(f"--{name}-sms is {value}, allowed: {least}..{sms - 1}")
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    comm = communicator_of(dist.group.WORLD)
    if dist.get_rank() == 0:
        print("tokens  sequential us  overlapped us  dispatch + combine us  hidden %  same bits", flush=True)
    for tokens in options.tokens:
        layer = Layer(comm, tokens, options.hidden, options.inner, options.experts, options.topk)
        alone = graph_of(lambda: (layer.dispatch(), layer.combine()))  # noqa: B023
        sequential = graph_of(layer.sequential)
        layer.load_kernels(options.publish)
        overlap = (options.publish, options.dispatch_sms, options.combine_sms)
        overlapped = graph_of(lambda: layer.overlapped(*overlap))  # noqa: B023
        sequential.replay()
        expected = layer.sums.clone()
        pair, before = (time_us(graph, options.repetitions) for graph in (alone, sequential))
        layer.forget()
        overlapped.replay()
        torch.cuda.synchronize()
        is_same = torch.equal(layer.sums, expected)
        after = time_us(overlapped, options.repetitions)
        is_same = is_same and torch.equal(layer.sums, expected) and bool(expected.any())
        same = torch.tensor([int(is_same)], device="cuda")
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if dist.get_rank() == 0:
            hidden = 100 * (before - after) / pair
            print(
                f"{tokens:6}  {before:13.1f}  {after:13.1f}  {pair:21.1f}  {hidden:8.0f}  {'yes' if same else 'NO'}",
                flush=True,
            )
        if not same:
            raise SystemExit("overlapped and sequential sums differ")
        layer.handle.close()
        layer.group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
