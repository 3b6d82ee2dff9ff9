# SPDX-License-Identifier: Apache-2.0
"""A MoE layer whose experts run beside dispatch and combine, and the same layer one step after the other: same bits,
times side by side.

    torchrun --nproc-per-node 4 examples/overlap/moe_layer.py [--tokens 8 32 128 512] [--hidden 7168] [--inner 2048]
    torchrun --nproc-per-node 4 examples/overlap/moe_layer.py --high-throughput [--tokens 1024 4096]

Experts are SwiGLU, two grouped GEMMs in Triton, in bf16 or with --fp8 in FP8. All variants are CUDA graphs and use the
same GEMM kernels.

- Low latency: overlapped, the second GEMM runs beside the sending half of combine, and sends rows when they are done.
  With --publish, the first GEMM also runs beside dispatch, and waits for blocks of rows.
- High throughput: overlapped, the first GEMM runs beside dispatch.
- Two micro-batches: the layer's tokens in two halves, each one step after the other, on a stream of its own. A half's
  dispatch and combine run beside the other's experts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import crossdock as ep
from crossdock.torch import communicator_of
from crossdock.triton import is_dispatch_over, leave, overlap_turn, wait_block, wait_counts


@triton.jit
def grouped_gemm(
    x,  # [E, SLOTS, K]; PACKED: [rows, K], each expert's rows from a multiple of BM on
    weights,  # [E, N, K], or [E, 2 N, K]: gate, then up
    y,  # [E, SLOTS, N]; PACKED: [rows, N]
    x_scales,  # [E, SLOTS, K / BK]: with SCALED, factors of x
    row_weights,  # [rows]: with WEIGHS, factors of y's rows
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
    PACKED: tl.constexpr,
    WEIGHS: tl.constexpr,
    SCALED: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr,  # that weights are to be multiplied with
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Tiles of all blocks of rows, of which each program takes the next one, so that programs may start late."""
    BLOCKS: tl.constexpr = (SLOTS + BM - 1) // BM
    TILES: tl.constexpr = N // BN
    zones = tl.arange(0, ZONES)
    turn = 0
    waits = WAITS
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
        if waits:
            waits = not is_dispatch_over(words, turn)
            if waits:
                left = wait_block(words, turn, zone, block, ZONES, BLOCKS)
        m = tl.arange(0, BM)
        n = column + tl.arange(0, BN)
        k = tl.arange(0, BK)
        first = tile // TILES * BM if PACKED else zone * SLOTS + block * BM
        of_row = (first + m).to(tl.int64)
        width: tl.constexpr = 2 * N if GATED else N
        from_x = x + of_row[:, None] * K + k[None, :]
        from_w = weights + (zone * width + n).to(tl.int64)[None, :] * K + k[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        other = tl.zeros((BM, BN), tl.float32)
        for i in range(0, K // BK):
            part = tl.load(from_x, mask=(m < left)[:, None], other=0.0)
            if SCALED:
                scale = tl.load(x_scales + of_row * (K // BK) + i, mask=m < left, other=0.0)[:, None]
                total += tl.dot(part, tl.load(from_w)) * scale
                if GATED:
                    other += tl.dot(part, tl.load(from_w + N * K)) * scale
            else:
                total = tl.dot(part, tl.load(from_w), total)
                if GATED:
                    other = tl.dot(part, tl.load(from_w + N * K), other)
            from_x += BK
            from_w += BK
        if WEIGHT_SCALE != 1:
            total *= WEIGHT_SCALE
            other *= WEIGHT_SCALE
        if GATED:
            total = total * tl.sigmoid(total) * other
        if WEIGHS:
            total *= tl.load(row_weights + of_row, mask=m < left, other=0.0)[:, None]
        tl.store(y + of_row[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=(m < left)[:, None])
        if FINISHES:
            tl.debug_barrier()  # all of the program's stores come before the count
            tl.atomic_add(done + zone * BLOCKS + block, 1, sem="release", scope="gpu")
        tile = tl.atomic_add(tiles_taken, 1)
    if WAITS:
        leave(words, tl.num_programs(0))


class Layer:
    """The experts of this rank, and both ways to run them."""

    def __init__(
        self,
        comm: ep.Communicator,
        ht: bool,
        fp8: bool,
        tokens: int,
        hidden: int,
        inner: int,
        experts: int,
        topk: int,
        weights_of: Layer | None = None,
    ) -> None:
        ranks, self.local = comm.num_ranks, experts // comm.num_ranks
        self.ht, self.fp8, self.block_rows = ht, fp8, 128 if ht else 64
        self.kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.slots, self.hidden, self.inner, self.tokens = ranks * tokens, hidden, inner, tokens
        device = torch.device("cuda", torch.cuda.current_device())
        make = torch.Generator(device).manual_seed(comm.rank)
        if weights_of is not None:
            self.up, self.down = weights_of.up, weights_of.down
        else:
            up = torch.randn(self.local, 2 * inner, hidden, device=device, generator=make).bfloat16() * hidden**-0.5
            down = torch.randn(self.local, hidden, inner, device=device, generator=make).bfloat16() * inner**-0.5
            self.up, self.down = ((w / self.weight_scale()).to(self.kind) for w in (up, down))
        self.x = torch.randn(tokens, hidden, device=device, generator=make).bfloat16()
        self.ids = torch.rand(tokens, experts, device=device, generator=make).topk(topk, dim=1).indices
        self.weights = torch.rand(tokens, topk, device=device, generator=make)
        # High throughput: room for twice the rows of an even routing, and for what zones are rounded up by.
        most = max(2 * tokens * topk, self.slots) + self.local * self.block_rows
        shape = (most,) if ht else (self.local, self.slots)
        self.rows = torch.empty(*shape, hidden, dtype=self.kind, device=device)
        self.row_scales = torch.empty(*shape, hidden // 128, device=device)
        self.middle = torch.empty(*shape, inner, dtype=self.kind, device=device)
        self.answers = torch.zeros(*shape, hidden, dtype=torch.bfloat16, device=device)
        self.row_weights = torch.empty(most, device=device)
        self.counts = torch.zeros(self.local, dtype=torch.int32, device=device)
        self.sums = torch.empty_like(self.x)
        self.group = ep.Group(
            comm,
            num_experts=experts,
            max_dispatch_tokens_per_rank=tokens,
            max_token_bytes=2 * hidden,
            algorithm=ep.Algorithm.HIGH_THROUGHPUT if ht else ep.Algorithm.LOW_LATENCY,
            max_recv_tokens_per_rank=most if ht else 0,
        )
        alignment = self.block_rows if ht else 0
        self.handle = self.group.init_handle(
            ep.Layout.EXPERT_MAJOR, topk, dispatch_output_per_expert_alignment=alignment
        )
        self.handle.update(self.ids)
        self.words = torch.zeros(self.handle.overlap_words(self.block_rows), dtype=torch.int32, device=device)
        blocks = (self.slots + self.block_rows - 1) // self.block_rows
        self.done = torch.zeros(self.local, blocks, dtype=torch.int32, device=device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.taken = torch.zeros(2, dtype=torch.int32, device=device)
        self.beside = torch.cuda.Stream()

    def forget(self) -> None:
        """What is not computed anew shows in the sums."""
        for made in (self.rows, self.middle, self.answers, self.sums):
            made.copy_(torch.full((), float("nan"), device=made.device).to(made.dtype))

    def weight_scale(self) -> float:
        """FP8 weights are stored larger than they are: so small numbers would have few digits."""
        return 1 / 16 if self.fp8 else 1

    def dispatch(self) -> None:
        info = ep.LayoutInfo(expert_counters=self.counts)
        if not self.ht:
            recipe = ep.DispatchQuantizationRecipe
            scales = self.row_scales if self.fp8 else None
            outputs = ep.DispatchOutputs(tokens=self.rows, scales=scales)
            kind = recipe.DS_FP8E3M4 if self.fp8 else recipe.NONE
            return self.handle.dispatch(self.x, outputs, layout_info=info, quant_recipe=kind)
        inputs = ep.DispatchInputs(tokens=self.x, topk_weights=self.weights)
        outputs = ep.DispatchOutputs(tokens=self.rows, topk_weights=self.row_weights)
        self.handle.dispatch(inputs, outputs, layout_info=info)

    def combine(self, send_only: bool = False) -> None:
        if self.ht:
            return self.handle.combine(self.answers, self.sums)
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
        n, k = y.shape[-1], x.shape[-1]
        common = {"ZONES": self.local, "SLOTS": self.slots, "BM": self.block_rows, "PACKED": self.ht}
        common |= {"BK": 128 if self.fp8 else 64, "SCALED": self.fp8 and i == 0, "WEIGHT_SCALE": self.weight_scale()}
        warps = {"num_warps": 8 if self.ht else 4, "num_stages": 3 if self.ht else 4}
        columns = (128 if self.ht else 64) if i == 0 else 128
        grouped_gemm[((1 if self.ht else 2) * sms,)](
            x, w, y, self.row_scales, self.row_weights, self.counts, self.words, self.done, taken, other, N=n, K=k,
            GATED=i == 0, WAITS=waits, FINISHES=finishes, WEIGHS=self.ht and i == 1, BN=columns, launch_pdl=waits,
            **common, **warps,
        )  # fmt: skip

    def sequential(self) -> None:
        self.dispatch()
        self.first_gemm(waits=False)
        self.second_gemm(self.sms, finishes=False)
        self.combine()

    def begin_overlap(self, publish: bool) -> None:
        """Dispatch publishes rows in words, if at all; in low latency, combine waits for done."""
        if self.ht:
            return self.handle.set_overlap(self.words, block_rows=self.block_rows)
        words = self.words if publish else None
        self.handle.set_overlap(words, block_rows=self.block_rows, done=self.done, done_value=self.hidden // 128)

    def load_kernels(self, publish: bool) -> None:
        """Runs the overlapped kernels one after the other. CUDA loads a kernel at its first launch, and loading may
        wait for running kernels, for example for a combine that waits for the kernel being loaded.
        """
        self.begin_overlap(publish)
        self.done.zero_()
        self.dispatch()
        self.first_gemm(waits=publish)
        self.second_gemm(self.sms, finishes=not self.ht)
        self.combine(send_only=True)
        self.handle.complete()
        self.handle.set_overlap()
        torch.cuda.synchronize()

    def overlapped_ht(self, dispatch_sms: int) -> None:
        """The first GEMM beside dispatch: it starts once the dispatch has all its SMs, and has the others."""
        self.begin_overlap(publish=True)
        self.handle.set_sms(dispatch_sms)
        self.dispatch()
        self.first_gemm(waits=True)
        self.handle.set_overlap()
        self.second_gemm(self.sms, finishes=False)
        self.handle.set_sms(0)
        self.combine()

    def overlapped(self, publish: bool, dispatch_sms: int, combine_sms: int) -> None:
        """Low latency: the second GEMM, on another stream, beside the sending half of combine. The receiving half then
        has all SMs. If dispatch publishes rows, the first GEMM runs beside it.

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


def two_micro_batches(halves: list[Layer]) -> None:
    """Operations of both may run at once, and ranks may start them in another order: so all of them must fit."""
    for half in halves:
        half.handle.set_sms(half.sms // 2 // 8 * 8)
    main, beside = torch.cuda.current_stream(), halves[0].beside
    beside.wait_stream(main)
    with torch.cuda.stream(beside):
        halves[1].sequential()
    halves[0].sequential()
    main.wait_stream(beside)


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
    """The slowest rank's median of a replay, of ten back to back, without the first."""
    times: list[float] = []
    for _ in range(repetitions):
        dist.barrier()
        torch.cuda.synchronize()
        ends = []
        for _ in range(10):
            graph.replay()
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        ends[-1].synchronize()
        times += [1000 * begin.elapsed_time(end) for begin, end in itertools.pairwise(ends)]
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="of a rank (8 32 128 512; high throughput: 1024 4096)")
    parser.add_argument("--high-throughput", action="store_true", help="for prefill and training")
    for name, value in (("hidden", 7168), ("inner", 2048), ("experts", 256), ("topk", 8), ("repetitions", 20)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"({value})")
    parser.add_argument("--dispatch-sms", type=int, default=0, help="of the overlapped dispatch (0: all)")
    parser.add_argument("--combine-sms", type=int, default=24, help="of the overlapped combine (24)")
    parser.add_argument("--fp8", action="store_true", help="low latency: rows and weights of the experts in FP8")
    parser.add_argument("--publish", action="store_true", help="the first GEMM runs beside dispatch")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if ranks == 0:
        parser.error("start this program with torchrun")
    for name, multiple in (("hidden", 128), ("inner", 128 if options.fp8 or options.high_throughput else 64)):
        value = getattr(options, name)
        if value < 1 or value % multiple != 0:
            parser.error(f"--{name} is {value}, allowed: multiples of {multiple}")
    if options.fp8 and options.high_throughput:
        parser.error("--fp8 goes without --high-throughput")
    if options.publish and options.high_throughput:
        parser.error("--publish goes without --high-throughput, which always publishes")
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
        print("times in us")
        print("tokens  sequential  overlapped  micro-batches  dispatch + combine  hidden %  same bits", flush=True)
    ht = options.high_throughput
    for tokens in options.tokens or ([1024, 4096] if ht else [8, 32, 128, 512]):
        shape = (options.hidden, options.inner, options.experts, options.topk)
        layer = Layer(comm, ht, options.fp8, tokens, *shape)
        halves = [Layer(comm, ht, options.fp8, (tokens + 1) // 2, *shape, weights_of=layer) for _ in range(2)]
        batches = graph_of(lambda: two_micro_batches(halves))  # noqa: B023
        alone = graph_of(lambda: (layer.dispatch(), layer.combine()))  # noqa: B023
        sequential = graph_of(layer.sequential)
        layer.load_kernels(options.publish or ht)
        if ht:
            overlapped = graph_of(lambda: layer.overlapped_ht(options.dispatch_sms))  # noqa: B023
        else:
            overlap = (options.publish, options.dispatch_sms, options.combine_sms)
            overlapped = graph_of(lambda: layer.overlapped(*overlap))  # noqa: B023
        sequential.replay()
        expected = layer.sums.clone()
        pair, before, halved = (time_us(graph, options.repetitions) for graph in (alone, sequential, batches))
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
                f"{tokens:6}  {before:10.1f}  {after:10.1f}  {halved:13.1f}  {pair:18.1f}  {hidden:8.0f}  "
                f"{'yes' if same else 'NO'}",
                flush=True,
            )
        if not same:
            raise SystemExit("overlapped and sequential sums differ")
        for made in (layer, *halves):
            made.handle.close()
            made.group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
