#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the calls of DeepEP's classes cost the host: one rank and one token of 128 elements, where little is moved.

    python bench/deep_ep_host_cost.py [--rounds 100] [--calls 20] [--device cuda] [--no-library FILE]

The rank is a thread. --device cuda: its tensors are on the current GPU, and the device is idle at the start of each
round. Prints the smallest mean of the rounds for each kind of call, for the calls of a crossdock.Handle that a
low-latency pair stands on, and for torch's add_ of one element. --no-library: build/cpu/bench/libno_library.so (target
no_library); a second column has repeated calls without the library's own operations, which is what this package costs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

import crossdock as ep
from stopwatch import mean_us

try:
    import torch
except ImportError:
    print("torch is not installed: skipped")
    sys.exit(77)

from crossdock._core import forget_arrays  # noqa: E402

from crossdock.deep_ep import Buffer, ElasticBuffer  # noqa: E402

NUM_EXPERTS, TOPK, HIDDEN = 4, 2, 128
DEVICE = "cpu"


def tensors() -> tuple[Any, Any, Any]:
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    return x, torch.tensor([[0, 1]], device=DEVICE), torch.full((1, TOPK), 0.5, device=DEVICE)


def low_latency_kinds(buffer: Any) -> dict[str, Callable[[], Any]]:
    x, ids, weights = tensors()

    def dispatch(**form: Any) -> Any:
        return buffer.low_latency_dispatch(x, ids, 1, NUM_EXPERTS, **{"use_fp8": False} | form)

    rows, _, handle, _, _ = dispatch()
    out = torch.empty_like(x)

    def pair() -> None:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 1, NUM_EXPERTS, use_fp8=False)
        buffer.low_latency_combine(rows, ids, weights, handle)

    return {
        "low-latency dispatch and combine": pair,
        "low-latency dispatch": lambda: buffer.low_latency_dispatch(x, ids, 1, NUM_EXPERTS, use_fp8=False),
        "low-latency dispatch and hook": lambda: dispatch(return_recv_hook=True)[4](),
        "low-latency dispatch of FP8": lambda: dispatch(use_fp8=True),
        "low-latency dispatch, asynchronous": lambda: dispatch(async_finish=True)[3].current_stream_wait(),
        "low-latency combine": lambda: buffer.low_latency_combine(rows, ids, weights, handle),
        "low-latency combine, out given": lambda: buffer.low_latency_combine(rows, ids, weights, handle, out=out),
    }


def normal_kinds(buffer: Any) -> dict[str, Callable[[], Any]]:
    x, ids, weights = tensors()

    def fresh() -> Any:
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, NUM_EXPERTS)
        received = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
        )
        buffer.combine(received[0], received[4])
        return received

    rows, _, own, _, handle, _ = fresh()

    def again_and_wait() -> None:
        buffer.dispatch(x, handle=handle, async_finish=True)[5].current_stream_wait()

    return {
        "layout": lambda: buffer.get_dispatch_layout(ids, NUM_EXPERTS),
        "layout, fresh dispatch, combine": fresh,
        "cached dispatch": lambda: buffer.dispatch(x, handle=handle),
        "cached dispatch, asynchronous": again_and_wait,
        "combine": lambda: buffer.combine(rows, handle),
        "combine with weights": lambda: buffer.combine(rows, handle, topk_weights=own),
    }


def elastic_kinds(buffer: Any) -> dict[str, Callable[[], Any]]:
    x, ids, weights = tensors()

    def fresh(expand: bool) -> Any:
        found = buffer.dispatch(x, ids, weights, num_experts=NUM_EXPERTS, do_expand=expand)
        buffer.combine(found[0], found[3])
        return found

    rows, _, _, handle, _ = fresh(False)
    return {
        "elastic: fresh dispatch, combine": lambda: fresh(False),
        "elastic: the same by expert": lambda: fresh(True),
        "elastic: cached dispatch": lambda: buffer.dispatch(x, handle=handle),
        "elastic: combine": lambda: buffer.combine(rows, handle),
    }


def handle_pair(group: ep.Group) -> Callable[[], Any]:
    """Dispatch and combine of low latency into new tensors, without the Buffer."""
    x, ids, weights = tensors()
    handle = group.init_handle(ep.Layout.EXPERT_MAJOR, TOPK)

    def pair() -> None:
        counts = torch.empty(NUM_EXPERTS, dtype=torch.int32, device=DEVICE)
        rows = torch.empty(NUM_EXPERTS, 1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        handle.update(ids)
        handle.dispatch(x, rows, layout_info=ep.LayoutInfo(expert_counters=counts))
        combined = torch.empty(1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        handle.combine(rows, ep.CombineOutputs(tokens=combined, topk_weights=weights))
        forget_arrays(handle)

    return pair


def best_us(call: Callable[[], Any], options: argparse.Namespace) -> float:
    best = float("inf")
    for _ in range(options.rounds):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        best = min(best, mean_us(call, options.calls))
    return best


def report(kinds: dict[str, Callable[[], Any]], options: argparse.Namespace) -> None:
    library = ctypes.CDLL(options.no_library) if options.no_library else None
    for name, call in kinds.items():
        line = f"{name:36} {best_us(call, options):8.1f} us"
        if library is not None and "fresh" not in name and "same by expert" not in name:
            library.crossdock_leave_out(1)
            line += f" {best_us(call, options):8.1f} us without the library"
            library.crossdock_leave_out(0)
        print(line)


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-library", metavar="FILE")
    options = parser.parse_args()
    preloaded = os.environ.get("LD_PRELOAD", "")
    if options.no_library and os.path.abspath(options.no_library) not in preloaded:
        preloaded = f"{os.path.abspath(options.no_library)} {preloaded}".strip()
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": preloaded})
    DEVICE = options.device
    torch.set_num_threads(1)
    [comm] = ep.Communicator.create_threads(1)
    sizes = {"num_experts": NUM_EXPERTS, "max_dispatch_tokens_per_rank": 1, "max_token_bytes": 2 * HIDDEN}
    with comm:
        buffer = Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
        elastic = ElasticBuffer(comm, num_max_tokens_per_rank=1, hidden=HIDDEN, explicitly_destroy=True)
        with ep.Group(buffer.runtime.ranks.communicator(torch.device(DEVICE)), **sizes) as group:
            one = torch.zeros(1, device=DEVICE)
            kinds = {"crossdock.Handle, the first's calls": handle_pair(group)}
            kinds = low_latency_kinds(buffer) | kinds | normal_kinds(buffer) | elastic_kinds(elastic)
            report(kinds | {"torch: add_ of one element": lambda: one.add_(1)}, options)
        elastic.destroy()
        buffer.destroy()


if __name__ == "__main__":
    main()
