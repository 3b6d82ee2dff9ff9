# SPDX-License-Identifier: Apache-2.0
"""crossdock.deep_ep on GPUs: checked, in CUDA graphs, too, and timed. Every rank is a process; ranks may share a GPU.

    NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=32 python deep_ep_gpu.py --ranks 4 [--json FILE]

NCCL 2.30.4 or newer must be loaded first (docs/guide.md).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from crossdock._core import count_routing

import crossdock as ep
import crossdock.deep_ep as deep_ep
from crossdock.deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8
from deep_ep_checks import Problem, arguments_of

REPLAYS = 50
BURST = 5  # calls in a row that are timed


def on_gpu(problem: Problem) -> Problem:
    """The same problem, with all that ranks give on the GPU."""
    for name in ("x", "ids", "weights"):
        setattr(problem, name, [part.cuda() for part in getattr(problem, name)])
    return problem


def captured(work: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of the work, which runs once before."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    return graph, made


def period_us(graph: Any) -> float:
    """Of a replay among many; ranks begin together."""
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / REPLAYS


def host_us(work: Callable[[], Any]) -> float:
    """What a call takes on the CPU: the median of calls that follow each other, without those that come cold."""
    times = []
    for _ in range(REPLAYS // BURST):
        torch.cuda.synchronize()
        dist.barrier()
        for call in range(BURST + 2):
            begin = time.perf_counter()
            work()
            if call >= 2:
                times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2] * 1e6


def low_latency(rank: int, size: int) -> dict[str, float]:
    """128 tokens of hidden 7168, top-8 of at most 64 experts per rank; sums, FP8 scales, hooks, graphs; C API
    beside."""
    tokens, hidden, topk = 128, 7168, 8
    local = max(2, 64 // size)
    problem = on_gpu(Problem(size, [tokens] * size, hidden, topk, local))
    x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
    buffer: Any = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 30, low_latency_mode=True, explicitly_destroy=True)
    expected = x.float() * torch.where(ids >= 0, weights, 0).sum(dim=1, keepdim=True)
    found = {}

    def pair(hooks: bool = False, **form: Any) -> Any:
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, tokens, problem.num_experts, return_recv_hook=hooks, **form
        )
        if hook is not None:
            hook()
        if isinstance(rows, tuple):
            flat = rows[0].view(-1, hidden), rows[1].reshape(rows[0].shape[0] * rows[0].shape[1], -1)
            rows = per_token_cast_back(*flat).view(rows[0].shape)
        out = torch.empty_like(x)
        _, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, out=out, return_recv_hook=hooks)
        if hook is not None:
            hook()
        return out, counts, handle

    forms: dict[str, tuple[dict[str, Any], float]] = {
        "bf16": ({"use_fp8": False}, 1e-5),
        "fp8": ({"use_fp8": True}, 1e-3),
        "ue8m0": ({"use_fp8": True, "round_scale": True, "use_ue8m0": True}, 2e-3),
    }
    for name, (form, bound) in forms.items():
        for hooks in (False, True):
            out, counts, handle = pair(hooks, **form)
            assert calc_diff(out, expected) < bound, f"{name}, hooks {hooks}: {calc_diff(out, expected)}"
            assert torch.equal(counts.cpu(), problem.counts(rank).cpu().int())
            assert int((handle[1] & 0xFFFFFFFF).sum()) == int(counts.sum())
        graph, (out, _, _) = captured(partial(pair, **form))
        for _ in range(3):
            out.zero_()
            graph.replay()
            assert calc_diff(out, expected) < bound, f"{name} in a graph"
        found[f"decode pair, {name}, graph, us"] = period_us(graph)
    dispatch = partial(buffer.low_latency_dispatch, x, ids, tokens, problem.num_experts)
    found["dispatch, host, us"] = host_us(partial(dispatch, use_fp8=False))
    found["dispatch of FP8, host, us"] = host_us(partial(dispatch, use_fp8=True))
    found["dispatch and hook, host, us"] = host_us(lambda: dispatch(use_fp8=False, return_recv_hook=True)[4]())
    found["dispatch, asynchronous, host, us"] = host_us(partial(dispatch, use_fp8=False, async_finish=True))
    found["dispatch, asynchronous, with its wait, host, us"] = host_us(
        lambda: dispatch(use_fp8=False, async_finish=True)[3].current_stream_wait()
    )
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, problem.num_experts, use_fp8=False)
    found["combine, host, us"] = host_us(lambda: buffer.low_latency_combine(rows, ids, weights, handle))

    # The same through the package's own classes, as the C API has them.
    group = buffer.runtime.low_latency.pool(x.device, tokens, hidden, problem.num_experts).group
    own = group.init_handle(ep.Layout.EXPERT_MAJOR, topk)
    counts, out, rows = (
        torch.empty(local, dtype=torch.int32, device="cuda"),
        torch.empty_like(x),
        torch.empty_like(rows),
    )

    def plain() -> None:
        own.update(ids)
        own.dispatch(x, rows, layout_info=ep.LayoutInfo(expert_counters=counts))
        own.combine(rows, ep.CombineOutputs(tokens=out, topk_weights=weights))

    found["decode pair, C API, graph, us"] = period_us(captured(plain)[0])
    found["decode pair, C API, host, us"] = host_us(plain)
    own.close()
    buffer.destroy()
    return found


def receive_tensors(rank: int, size: int) -> dict[str, float]:
    """Dispatches use two memories in turn; other streams, captures and those who hold rows are not disturbed."""
    tokens, hidden = 16, 1024
    problem = on_gpu(Problem(size, [tokens] * size, hidden, 4, 4, dropped=0))
    x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
    buffer: Any = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    expected = x.float() * weights.sum(dim=1, keepdim=True)

    def dispatch(**form: Any) -> Any:
        return buffer.low_latency_dispatch(x, ids, tokens, problem.num_experts, **form)

    def places(**form: Any) -> list[tuple[int, ...]]:
        found = []
        for _ in range(6):
            rows, _, _, event, hook = dispatch(**form)
            if hook is not None:
                hook()
            if event.event is not None:
                event.current_stream_wait()
            found.append(tuple(part.data_ptr() for part in (rows if isinstance(rows, tuple) else (rows,))))
        return found

    def pair() -> Any:
        rows, _, handle, _, _ = dispatch(use_fp8=False)
        return rows, buffer.low_latency_combine(rows, ids, weights, handle)[0]

    for settings in ({}, {"return_recv_hook": True}, {"async_finish": True}):
        for use_fp8 in (False, True):
            found = places(use_fp8=use_fp8, **settings)
            assert len(set(found)) == 2 and found[::2] == found[:1] * 3, f"{settings}, FP8 {use_fp8}: {found}"
    allocated = torch.cuda.memory_allocated()
    eager = places(use_fp8=False)
    row_bytes = problem.local * size * tokens * hidden * 2
    assert torch.cuda.memory_allocated() - allocated < row_bytes

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert not set(places(use_fp8=False)) & set(eager)
    torch.cuda.current_stream().wait_stream(side)

    graph, (rows, out) = captured(pair)
    held, sums = pair()
    others = places(use_fp8=False)
    assert rows.data_ptr() not in [held.data_ptr(), *(place for [place] in others)]
    before = held.clone()
    for _ in range(3):
        out.zero_()
        graph.replay()
        for _ in range(3):
            sums = pair()[1]
            assert calc_diff(sums, expected) < 1e-5
        assert calc_diff(out, expected) < 1e-5
        assert torch.equal(held.view(torch.uint8), before.view(torch.uint8))
    del graph, rows, out, held, sums, before
    buffer.destroy()
    return {}


def normal(rank: int, size: int) -> dict[str, float]:
    """4096 tokens: rows, weights, ids and sums are exact; cached, worst-case in a graph, asynchronous."""
    problem = on_gpu(Problem(size, [4096] * size, 7168, 8, max(2, 64 // size)))
    x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
    buffer: Any = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))
    routing = {"topk_idx": ids, "topk_weights": weights}
    expected = problem.received(rank)
    times = arguments["is_token_in_rank"].sum(dim=1, keepdim=True)
    for is_async in (False, True):
        previous = buffer.capture() if is_async else None
        rows, local_ids, local_weights, counts, handle, event = buffer.dispatch(
            x, **arguments, **routing, previous_event=previous, async_finish=is_async, allocate_on_comm_stream=is_async
        )
        if is_async:
            event.current_stream_wait()
        assert torch.equal(rows, expected[0]) and torch.equal(local_ids, expected[1])
        assert torch.equal(local_weights, expected[2]) and counts == problem.counts(rank).tolist()
        sums, returned, _ = buffer.combine(rows, handle, topk_weights=local_weights)
        assert torch.equal(sums, (x.float() * times).bfloat16())
        assert torch.equal(returned, torch.where(ids >= 0, weights, 0))
    values, scales = per_token_cast_to_fp8(x)
    quantised = buffer.dispatch((values, scales.t().contiguous().t()), **arguments, **routing)[0]
    assert torch.equal(per_token_cast_back(*quantised), per_token_cast_back(*per_token_cast_to_fp8(expected[0])))

    def worst() -> Any:
        rows, found_ids, _, _, handle, _ = buffer.dispatch(x, **arguments, **routing, num_worst_tokens=4096 * size)
        return rows, found_ids, buffer.combine(rows, handle)[0]

    graph, (rows, found_ids, sums) = captured(worst)
    for _ in range(2):
        sums.zero_()
        graph.replay()
        assert torch.equal(sums, (x.float() * times).bfloat16()) and (found_ids[len(expected[0]) :] == -1).all()
    found = {"normal pair, worst case, graph, us": period_us(graph)}
    cached, _ = captured(lambda: buffer.combine(buffer.dispatch(x, handle=handle)[0], handle))
    found["normal pair, cached, graph, us"] = period_us(cached)
    own = handle[1].handle
    # As many SMs as each call says, whatever the one before took; rows and sums stay the same.
    own.set_sms(1 << 16)
    usual, most = deep_ep.Buffer.num_sms, own.sms[1]
    for num_sms in (2, 8, 24, 64, 200):
        config = deep_ep.Config(num_sms)
        rows = buffer.dispatch(x, handle=handle, config=config)[0]
        assert own.sms[1] == min(num_sms, most) and torch.equal(rows, expected[0])
        deep_ep.Buffer.set_num_sms(num_sms + 2)
        assert torch.equal(buffer.combine(rows, handle)[0], (x.float() * times).bfloat16())
        assert own.sms[2] == min(num_sms + 2, most)
        cached, _ = captured(partial(lambda config: buffer.dispatch(x, handle=handle, config=config), config))
        found[f"normal dispatch, cached, {min(num_sms, most)} SMs, graph, us"] = period_us(cached)
    deep_ep.Buffer.set_num_sms(usual)
    rows = buffer.dispatch(x, handle=handle)[0]
    found["normal dispatch, fresh, host, us"] = host_us(lambda: buffer.dispatch(x, **arguments, **routing))
    found["normal dispatch, cached, host, us"] = host_us(lambda: buffer.dispatch(x, handle=handle))
    found["normal combine, host, us"] = host_us(lambda: buffer.combine(rows, handle))
    cached_async = partial(buffer.dispatch, x, handle=handle, async_finish=True)
    found["normal dispatch, cached, asynchronous, host, us"] = host_us(cached_async)
    found["layout, host, us"] = host_us(lambda: buffer.get_dispatch_layout(ids, problem.num_experts))
    buffer.destroy()
    return found


def elastic(rank: int, size: int) -> dict[str, float]:
    """By rank and by expert, exact and worst-case, in graphs."""
    problem = on_gpu(Problem(size, [128] * size, 2048, 8, max(8, 64 // size)))
    x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
    buffer: Any = deep_ep.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=128, hidden=2048, num_topk=8, explicitly_destroy=True
    )
    ranks = problem.is_in_rank(rank).sum(dim=1, keepdim=True)
    found = {}
    for expand in (False, True):
        times = (ids >= 0).sum(dim=1, keepdim=True) if expand else ranks

        def pair(sync: bool, expand: bool = expand) -> Any:
            rows, _, own, handle, _ = buffer.dispatch(
                x, ids, weights, num_experts=problem.num_experts, do_cpu_sync=sync, do_expand=expand
            )
            return buffer.combine(rows, handle, topk_weights=own)[:2]

        graph, (sums, returned) = captured(lambda: pair(False))
        graph.replay()
        for result, back in ((sums, returned), pair(True)):
            assert calc_diff(result, x.float() * times) < 1e-5
            assert torch.equal(back, torch.where(ids >= 0, weights, 0))
        found[f"elastic pair, expanded {expand}, graph, us"] = period_us(graph)
    # More tokens than small batches have, whose operations take all SMs.
    large = {"num_experts": problem.num_experts, "num_max_tokens_per_rank": 600}
    rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, do_cpu_sync=False, num_sms=6, **large)
    own, sums = handle._lease.handle, buffer.combine(rows, handle)[0]
    assert handle.num_sms == 6 and own.sms[1:] == (6, 6)
    num = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    again = buffer.dispatch(x, handle=handle, num_sms=2)[0]
    assert own.sms[1] == 2 and torch.equal(again[:num], rows[:num])
    assert torch.equal(buffer.combine(rows, handle)[0], sums)
    # The same bits as a small batch.
    few, _, _, small, _ = buffer.dispatch(x, ids, weights, num_experts=problem.num_experts)
    assert torch.equal(few, rows[:num]) and torch.equal(buffer.combine(few, small)[0], sums)
    rows, handle = few, small
    assert handle.num_sms == buffer.get_theoretical_num_sms(problem.num_experts, 8)
    fresh = partial(buffer.dispatch, x, ids, weights, num_experts=problem.num_experts)
    found["elastic dispatch, fresh, host, us"] = host_us(fresh)
    found["elastic dispatch, by expert, host, us"] = host_us(partial(fresh, do_expand=True))
    found["elastic dispatch, asynchronous, host, us"] = host_us(partial(fresh, async_with_compute_stream=True))
    found["elastic dispatch, cached, host, us"] = host_us(lambda: buffer.dispatch(x, handle=handle))
    found["elastic combine, host, us"] = host_us(lambda: buffer.combine(rows, handle))
    buffer.barrier(with_cpu_sync=True)
    buffer.destroy()
    return found


def routing(rank: int, size: int) -> dict[str, float]:
    """Counts are those of the CPU, which other tests check; the time of a whole call."""
    random = torch.Generator().manual_seed(rank)
    for tokens, topk, num_experts, num_ranks in ((0, 2, 8, 4), (1, 1, 4, 4), (777, 8, 96, 8), (4096, 9, 256, 64)):
        ids = torch.randint(-2, num_experts, (topk, tokens), generator=random).t()
        for dtype in (torch.int64, torch.int32):
            host, device_made = (
                count_routing(ids.to(dtype).to(device), num_experts, num_ranks, 2) for device in ("cpu", "cuda")
            )
            for name, expected, found in zip(("ranks", "nodes", "experts", "mask"), host, device_made, strict=True):
                assert expected is not None and found is not None, name
                assert torch.equal(expected, found.cpu()), f"{name} of {tokens} tokens, {dtype}"
    ids = torch.randint(0, 64 * size, (4096, 8)).cuda()
    graph, _ = captured(lambda: count_routing(ids, 64 * size, size))
    return {"count, graph, us": period_us(graph)}


def run_rank(options: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo")
    found: dict[str, float] = {}
    for check in (routing, low_latency, receive_tensors, normal, elastic):
        found |= check(rank, size)
        if rank == 0:
            print(f"ok      {check.__name__}", flush=True)
    if rank == 0:
        gpu = torch.cuda.get_device_name()
        report = {"gpu": gpu, "gpus": torch.cuda.device_count(), "ranks": size, "times": found}
        print(json.dumps(report, indent=1))
        if options.json:
            with open(options.json, "w") as file:
                json.dump(report, file, indent=1)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    common |= {"WORLD_SIZE": str(options.ranks)}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | common | {"RANK": str(rank)})
        for rank in range(options.ranks)
    ]
    return max(process.wait() for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
