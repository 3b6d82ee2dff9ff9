# SPDX-License-Identifier: Apache-2.0
"""What test_gpu.py runs in every rank where ranks are processes with a GPU each, or share one; needs torch."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import crossdock as ep
import crossdock.deep_ep as deep_ep
import crossdock.torch as ept
from crossdock import nccl
from crossdock.torch import token_switch
from gpu_checks_a2sgd import averaged_tensors, averaging_hook, averaging_optimizer
from lifetime_checks import elastic_buffers_one_after_another, random_orders

HIDDEN, TOPK, MAX_TOKENS, LOCAL = 512, 4, 32, 4
MODES = list(ep.Algorithm)

Comm = ep.Communicator
new_stream: Any = torch.cuda.Stream


def exchange_of(gpu: Any, mode: ep.Algorithm, **fields: Any) -> ept.Exchange:
    sizes = {"num_experts": LOCAL * gpu.nranks, "num_topk": TOPK, "max_tokens": MAX_TOKENS, "hidden": HIDDEN}
    settings: dict[str, Any] = sizes | fields
    return ept.Exchange(gpu, algorithm=mode, **settings)


def problem(comm: Comm, seed: int, dtype: torch.dtype, num_tokens: int | None = None) -> tuple[Any, Any, Any]:
    """Tokens, choices and weights; as many tokens as the seed says, other ones on every rank."""
    random = torch.Generator("cuda").manual_seed(1000 * seed + comm.rank)
    if num_tokens is None:
        num_tokens = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=random, device="cuda"))
    tokens = torch.randn(num_tokens, HIDDEN, generator=random, device="cuda").to(dtype)
    scores = torch.rand(num_tokens, LOCAL * comm.num_ranks, generator=random, device="cuda")
    weights = torch.rand(num_tokens, TOPK, generator=random, device="cuda")
    return tokens.requires_grad_(), scores.argsort(dim=1)[:, :TOPK].contiguous(), weights.requires_grad_()


def layer(exchange: ept.Exchange, tokens: Any, topk_idx: Any, weights: Any) -> Any:
    """Experts are tanh times the expert's number plus one."""
    received = exchange.dispatch(tokens, topk_idx, weights)
    number = received.experts + 1.0 + exchange.rank * exchange.num_local_experts
    factor = (received.weights * torch.where(received.experts >= 0, number, 0.0)).sum(dim=1, keepdim=True)
    return exchange.combine(torch.tanh(received.rows) * factor.to(tokens.dtype), received)


def plain_layer(tokens: Any, topk_idx: Any, weights: Any) -> Any:
    return torch.tanh(tokens) * (weights * (topk_idx + 1.0)).sum(dim=1, keepdim=True).to(tokens.dtype)


def compare(found: Any, expected: Any, bound: float) -> None:
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * 10)


def gradients_agree(comm: Comm, exchange: ept.Exchange, dtype: torch.dtype, bound: float, steps: int = 6) -> None:
    for step in range(steps):
        tokens, topk_idx, weights = problem(comm, step, dtype)
        result, expected = layer(exchange, tokens, topk_idx, weights), plain_layer(tokens, topk_idx, weights)
        compare(result, expected, bound)
        direction = torch.randn_like(expected)
        found = torch.autograd.grad(result, (tokens, weights), direction)
        compare(found, torch.autograd.grad(expected, (tokens, weights), direction), bound * 4)


def values_and_gradients(comm: Comm, gpu: Comm) -> None:
    for mode in MODES:
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            with exchange_of(gpu, mode, dtype=dtype) as exchange:
                gradients_agree(comm, exchange, dtype, bound)


def zero_copy(comm: Comm, gpu: Comm) -> None:
    """Rows that peers wrote into this rank's window, forward; gradients as ever."""
    for mode in MODES:
        with exchange_of(gpu, mode, zero_copy=True) as exchange:
            gradients_agree(comm, exchange, torch.float32, 1e-5, steps=10)


def symmetric_tensors(comm: Comm, gpu: Comm) -> None:
    """The same by hand, through the C API's names."""
    shape = (comm.num_ranks, MAX_TOKENS, HIDDEN)
    fields: dict[str, Any] = {"num_experts": LOCAL * comm.num_ranks, "max_dispatch_tokens_per_rank": MAX_TOKENS}
    with (
        ept.SymmetricMemory(gpu, ept.SymmetricMemory.bytes_of(shape, torch.bfloat16)) as memory,
        ep.Group(gpu, **fields, max_token_bytes=HIDDEN * 2, zero_copy=ep.ZeroCopyMode.ON) as group,
    ):
        rows = memory.empty(*shape, dtype=torch.bfloat16)
        tokens, topk_idx, weights = (part.detach() for part in problem(comm, 3, torch.bfloat16))
        ids = torch.zeros(*shape[:2], TOPK, dtype=torch.int32, device="cuda")
        with group.create_handle(ep.Layout.RANK_MAJOR, topk_idx) as handle:
            outputs = ep.DispatchOutputs(tokens=memory.of(rows), topk_weights=torch.zeros_like(ids.float()))
            outputs.topk_idx = ids
            handle.dispatch(ep.DispatchInputs(tokens=tokens, topk_weights=weights), outputs)
            result = torch.empty_like(tokens)
            handle.combine(memory.of(rows), result)
            torch.cuda.synchronize()
            ranks = torch.zeros(len(tokens), comm.num_ranks, device="cuda").scatter_(1, topk_idx // LOCAL, 1.0)
            compare(result.float(), tokens.float() * ranks.sum(dim=1, keepdim=True), 1e-2)


def recipes(comm: Comm, gpu: Comm) -> None:
    for mode in MODES:
        recipe = ep.DispatchQuantizationRecipe.DS_FP8E3M4
        with exchange_of(gpu, mode, dtype=torch.bfloat16, recipe=recipe) as exchange:
            tokens, topk_idx, weights = problem(comm, 5, torch.bfloat16)
            result, expected = layer(exchange, tokens, topk_idx, weights), plain_layer(tokens, topk_idx, weights)
            error = (result - expected).float().norm() / expected.float().norm().clamp_min(1e-3)
            assert error < 0.05, error


def captured_operators(comm: Comm, gpu: Comm) -> None:
    """A training step through torch.ops in a CUDA graph, replayed with other tokens, routing and weights."""
    for mode in MODES:
        with exchange_of(gpu, mode) as exchange:
            tokens, topk_idx, weights = problem(comm, 0, torch.float32, 8)
            direction = torch.ones_like(tokens)

            def step() -> tuple[Any, ...]:
                result = layer(exchange, tokens, topk_idx, weights)  # noqa: B023
                return (result, *torch.autograd.grad(result, (tokens, weights), direction))  # noqa: B023

            side = new_stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.synchronize()
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = step()
            for replay in range(1, 11):
                with torch.no_grad():
                    new = problem(comm, replay, torch.float32, 8)
                    for own, other in zip((tokens, topk_idx, weights), new, strict=True):
                        own.copy_(other)
                graph.replay()
                expected = plain_layer(tokens, topk_idx, weights)
                compare(found, (expected, *torch.autograd.grad(expected, (tokens, weights), direction)), 1e-5)
                if replay == 5:  # eager calls between replays
                    compare(step()[0], expected, 1e-5)
            torch.cuda.synchronize()


def captured_module(comm: Comm, gpu: Comm) -> None:
    """ExpertParallel as engines decode: a graph, the shared expert between the halves."""
    torch.manual_seed(0)
    num_experts = LOCAL * comm.num_ranks
    gate = torch.nn.Linear(HIDDEN, num_experts, bias=False).cuda()
    experts = [torch.nn.Linear(HIDDEN, HIDDEN).cuda() for _ in range(num_experts)]
    shared = torch.nn.Linear(HIDDEN, HIDDEN).cuda()
    with torch.no_grad(), exchange_of(gpu, ep.Algorithm.LOW_LATENCY) as exchange:
        mine = experts[comm.rank * LOCAL : (comm.rank + 1) * LOCAL]
        module = ept.ExpertParallel(exchange, gate, mine, shared)
        x = torch.zeros(8, HIDDEN, device="cuda")
        module(x)
        torch.cuda.synchronize()
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = module(x)
        for replay in range(6):
            x.copy_(problem(comm, replay, torch.float32, 8)[0])
            graph.replay()
            chosen, topk_idx = gate(x).topk(TOPK, dim=-1)
            weights = chosen.softmax(dim=-1)
            expected = shared(x)
            for number, expert in enumerate(experts):
                expected = expected + expert(x) * (weights * (topk_idx == number)).sum(dim=-1, keepdim=True)
            compare(result, expected, 1e-4)
        torch.cuda.synchronize()


def compiled(comm: Comm, gpu: Comm) -> None:
    for mode in MODES:
        with exchange_of(gpu, mode) as exchange:
            arguments = problem(comm, 2, torch.float32, 8)
            step = torch.compile(layer, fullgraph=True, backend="aot_eager")
            compare(step(exchange, *arguments), plain_layer(*arguments), 1e-5)


def arrays_and_streams(comm: Comm, gpu: Comm) -> None:
    """Tensors of torch and CuPy, DLPack, and streams of all kinds."""
    cupy = pytest.importorskip("cupy")
    fields: dict[str, Any] = {"num_experts": LOCAL * comm.num_ranks, "max_dispatch_tokens_per_rank": MAX_TOKENS}
    tokens, topk_idx, weights = (part.detach() for part in problem(comm, 1, torch.float32, 8))
    received = torch.zeros(LOCAL, comm.num_ranks * MAX_TOKENS, HIDDEN, device="cuda")
    counts = cupy.zeros(LOCAL, cupy.int32)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()

    class Dlpack:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **arguments: Any) -> Any:
            return self.tensor.__dlpack__(**arguments)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    streams = [None, new_stream(), cupy.cuda.Stream(), new_stream().cuda_stream]
    with (
        ep.Group(gpu, **fields, max_token_bytes=HIDDEN * 4) as group,
        group.create_handle(ep.Layout.EXPERT_MAJOR, cupy.asarray(topk_idx)) as handle,
    ):
        for stream, source in zip(streams, [tokens, cupy.asarray(tokens), Dlpack(tokens), tokens], strict=True):
            result = torch.zeros_like(tokens)
            torch.cuda.synchronize()
            handle.dispatch(source, received, layout_info=ep.LayoutInfo(expert_counters=counts), stream=stream)
            handle.combine(received, ep.CombineOutputs(tokens=result, topk_weights=weights), stream=stream)
            torch.cuda.synchronize()
            compare(result, tokens * weights.sum(dim=1, keepdim=True), 1e-5)
        for wrong, message in [
            (tokens.cpu(), "inputs.tokens is in host memory, expected GPU memory"),
            (tokens.cpu().numpy(), "inputs.tokens is in host memory"),
            (tokens[:, ::2], "not contiguous"),
            (tokens.double(), "float64"),
        ]:
            with pytest.raises(ep.InvalidArgument, match=message):
                handle.dispatch(wrong, received, layout_info=ep.LayoutInfo(expert_counters=counts))
        with pytest.raises(ep.InvalidArgument, match="stream is of type str"):
            handle.dispatch(tokens, received, stream="0")
        with pytest.raises(ep.InvalidUsage):
            gpu.barrier()


def make_process_group(comm: Comm) -> None:
    path = comm.all_gather(tempfile.mktemp(prefix="store").ljust(200).encode())[0].decode().strip()
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=comm.rank, world_size=comm.num_ranks)


def process_group_of_torch(comm: Comm, gpu: Comm) -> None:
    make_process_group(comm)
    with ept.communicator_of() as own, exchange_of(own, ep.Algorithm.HIGH_THROUGHPUT) as exchange:
        assert (own.rank, own.num_ranks) == (comm.rank, comm.num_ranks)
        gradients_agree(comm, exchange, torch.float32, 1e-5, steps=2)
    some = dist.new_group([0, 1])
    if comm.rank < 2:
        with ept.communicator_of(some) as own, exchange_of(own, ep.Algorithm.LOW_LATENCY) as exchange:
            assert (own.rank, own.num_ranks) == (comm.rank, 2)
            gradients_agree(own, exchange, torch.float32, 1e-5, steps=2)
    else:
        with pytest.raises(ep.InvalidUsage, match="is not in the process group"):
            ept.communicator_of(some)
    dist.destroy_process_group()


def token_switch_of_torch(comm: Comm, gpu: Comm) -> None:
    """By the functions that TokenSwitchNCCL calls, since torch may be older than that class."""
    make_process_group(comm)
    num_rows, first = comm.num_ranks * MAX_TOKENS * LOCAL, comm.rank * LOCAL
    sizes = LOCAL * comm.num_ranks, MAX_TOKENS, num_rows, HIDDEN * 4
    group = token_switch._NcclEpGroup.create(dist.group.WORLD, *sizes)
    for layout in (ep.Layout.FLAT, ep.Layout.EXPERT_MAJOR):
        for step in range(3):
            tokens, topk_idx, weights = (part.detach() for part in problem(comm, step, torch.float32))
            counts = torch.zeros(LOCAL, dtype=torch.int32, device="cuda")
            routing = token_switch._NcclEpHandle.create(group, topk_idx, counts, layout)
            rows, result = tokens.new_zeros(num_rows, HIDDEN), torch.empty_like(tokens)
            if layout == ep.Layout.FLAT:
                row_weights, experts = tokens.new_zeros(num_rows, TOPK), topk_idx.new_zeros(num_rows, TOPK)
                token_switch._nccl_ep_dispatch(routing, tokens, weights, rows, row_weights, experts)
                factors = (row_weights * torch.where(experts >= 0, experts + first + 1.0, 0.0)).sum(dim=1)
            else:
                row_weights = tokens.new_zeros(num_rows)
                token_switch._nccl_ep_dispatch(routing, tokens, weights, rows, row_weights, None)
                numbers = torch.arange(LOCAL, device="cuda").repeat_interleave(counts) + first + 1.0
                factors = row_weights * torch.nn.functional.pad(numbers, (0, num_rows - len(numbers)))
            token_switch._nccl_ep_combine(routing, torch.tanh(rows) * factors.unsqueeze(1), result)
            compare(result, plain_layer(tokens, topk_idx, weights), 1e-5)
    group.close()
    dist.destroy_process_group()


def objects_of_nccl4py(comm: Comm, gpu: Comm) -> None:
    core = pytest.importorskip("nccl.core")
    unique = comm.all_gather(bytes(core.get_unique_id()) if comm.rank == 0 else bytes(128))[0]
    own = core.Communicator.init(comm.num_ranks, comm.rank, core.UniqueId.from_bytes(unique))
    with exchange_of(own, ep.Algorithm.LOW_LATENCY) as exchange:
        gradients_agree(comm, exchange, torch.float32, 1e-5, steps=2)
    own.destroy()


def elastic_buffers_and_their_results(comm: Comm, gpu: Comm) -> None:
    elastic_buffers_one_after_another(comm, "cuda")


def objects_in_random_orders(comm: Comm, gpu: Comm) -> None:
    """Communicators of NCCL are borrowed, here from its owner, and made by buffers."""
    for seed in range(2):
        own = nccl.join(comm.num_ranks, comm.rank, comm.all_gather(nccl.unique_id())[0])
        random_orders(comm, own, "cuda", seed, 60)
        nccl.destroy(own)
    random_orders(comm, gpu, "cuda", 2, 60)


def a_handle_that_outlives_its_communicator(comm: Comm, gpu: Comm) -> None:
    handles = []
    for _ in range(3):
        own = nccl.join(comm.num_ranks, comm.rank, comm.all_gather(nccl.unique_id())[0])
        with ep.Group(
            own,
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=comm.num_ranks,
            max_dispatch_tokens_per_rank=4,
            max_recv_tokens_per_rank=4 * comm.num_ranks,
            max_token_bytes=256,
        ) as group:
            with pytest.raises(ep.InvalidUsage, match="has open groups"):
                nccl.destroy(own)
            handles = [group.init_handle(ep.Layout.FLAT, 1)]  # ends the one of the group before
            handles[0].update(torch.full((4, 1), comm.rank, device="cuda"))
        nccl.destroy(own)


def hooks_and_overwritten_choices(comm: Comm, gpu: Comm) -> None:
    """As test_hooks_that_are_never_called and test_low_latency_keeps_the_choices_that_were_dispatched, in small."""
    num_experts = 2 * comm.num_ranks
    buffer: Any = deep_ep.Buffer(comm, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True)
    x = torch.full((4, 256), comm.rank + 1.0, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(8, device="cuda").view(4, 2) % num_experts
    weights = torch.full((4, 2), 0.5, device="cuda")

    def dispatch(choices: Any, with_hook: bool) -> Any:
        return buffer.low_latency_dispatch(x, choices, 4, num_experts, use_fp8=False, return_recv_hook=with_hook)

    alive = [dispatch(ids, False) for _ in range(3)]
    del alive
    for _ in range(3):
        dispatch(ids, True)
    given_up = [dispatch(ids, True) for _ in range(2)]
    with pytest.raises(ep.InvalidUsage, match="wait for their hooks, allowed: at most 2"):
        dispatch(ids, True)
    del given_up
    for kind in (torch.int64, torch.int32):
        mine = ids.to(kind, copy=True)
        rows, _, handle, _, hook = dispatch(mine, True)
        mine.fill_(-1)
        hook()
        sums, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
        hook()
        assert torch.equal(sums, x)
        swapped = ids[:, [1, 0]].contiguous()
        assert torch.equal(buffer.low_latency_combine(rows, swapped, weights, handle)[0], x)
    buffer.destroy()


CHECKS: list[Callable[[Comm, Comm], None]] = [
    values_and_gradients,
    captured_operators,
    captured_module,
    symmetric_tensors,
    zero_copy,
    recipes,
    compiled,
    arrays_and_streams,
    averaged_tensors,
    averaging_optimizer,
    averaging_hook,
    elastic_buffers_and_their_results,
    a_handle_that_outlives_its_communicator,
    hooks_and_overwritten_choices,
    objects_in_random_orders,
    process_group_of_torch,
    token_switch_of_torch,
    objects_of_nccl4py,
]


def run_all(comm: Comm) -> dict[str, str]:
    """What each check says: nothing, why it was skipped, or how it failed, and then none is run after it."""
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    unique = comm.all_gather(nccl.unique_id() if comm.rank == 0 else bytes(nccl.ID_BYTES))[0]
    gpu = nccl.join(comm.num_ranks, comm.rank, unique)
    found: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(comm, gpu)
            found[check.__name__] = ""
        except pytest.skip.Exception as reason:
            found[check.__name__] = f"skipped: {reason}"
        except BaseException:
            found[check.__name__] = traceback.format_exc()
        has_failed = bool(found[check.__name__]) and not found[check.__name__].startswith("skipped")
        failures = [rank for rank, part in enumerate(comm.all_gather(bytes([has_failed]))) if part != b"\0"]
        if failures:
            found["stopped"] = f"{check.__name__} failed on ranks {failures}"
            return found
        print(f"rank {comm.rank}: {check.__name__} ok", flush=True)
    nccl.destroy(gpu)
    return found
