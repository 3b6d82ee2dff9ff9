#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a dispatch call costs the host in Python, with arrays of every kind, above what it costs in C.

    python bench/host_cost.py [--device cuda] [--json FILE]

One rank and one token of 16 bytes. Every round times all kinds one after the other, on the same handle; the smallest
mean of the rounds counts. On a GPU calls only enqueue, and the GPU is waited for between rounds. The loop in C is in
libhost_cost.so, which is built beside the package.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import crossdock as ep
from stopwatch import mean_us


def c_loop(file: str, handle: ep.Handle, stream: int, arrays: list[ep.Tensor]) -> Callable[[int], float]:
    function = ctypes.CDLL(file).mean_dispatch_us
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int]
    function.restype = ctypes.c_double
    pointers = [handle.ptr, *(array.data for array in arrays), stream]
    return lambda calls: float(function(*pointers, calls))


def kinds_of(handle: ep.Handle, name: str, tokens: Any, rows: Any, counts: Any, stream: Any) -> dict[str, Any]:
    """Calls that make their arguments, and calls with arguments that were made once."""

    def fresh() -> None:
        handle.dispatch(
            ep.DispatchInputs(tokens=tokens),
            ep.DispatchOutputs(tokens=rows),
            layout_info=ep.LayoutInfo(expert_counters=counts),
            stream=stream,
        )

    inputs, outputs = ep.DispatchInputs(tokens=tokens), ep.DispatchOutputs(tokens=rows)
    info = ep.LayoutInfo(expert_counters=counts)

    def repeated() -> None:
        handle.dispatch(inputs, outputs, layout_info=info, stream=stream)

    return {name: fresh, f"{name}, arguments made once": repeated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--calls", type=int, default=0, help="a round (2000; 100 on GPUs, whose queues must not fill)")
    beside = Path(str(ep._core.__file__)).parents[2] / "bench" / "libhost_cost.so"
    parser.add_argument("--c-library", default=str(beside), help="libhost_cost.so (beside the package's build)")
    parser.add_argument("--json", default="", help="file for the results")
    options = parser.parse_args()
    is_gpu = options.device != "cpu"
    calls = options.calls or (100 if is_gpu else 2000)

    try:
        import torch
    except ModuleNotFoundError:
        if is_gpu:
            raise
        torch = None
    stream = None
    if is_gpu:
        from crossdock import nccl

        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        comm, stream = nccl.join(1, 0, nccl.unique_id()), torch.cuda.current_stream().cuda_stream
    else:
        [comm] = ep.Communicator.create_threads(1)

    with ep.Group(comm, num_experts=1, max_dispatch_tokens_per_rank=1, max_token_bytes=16) as group:
        host = [np.ones((1, 4), np.float32), np.zeros((1, 1, 4), np.float32), np.zeros(1, np.int32)]
        tensors = [torch.from_numpy(array.copy()).to(options.device) for array in host] if torch is not None else []
        routing = torch.zeros(1, 1, dtype=torch.int32, device="cuda") if is_gpu else np.zeros((1, 1), np.int32)
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, routing)
        described = [ep.Tensor(array) for array in (tensors if is_gpu else host)]
        in_c = c_loop(options.c_library, handle, stream or 0, described)
        kinds: dict[str, Callable[[], Any]] = {}
        if not is_gpu:
            kinds |= kinds_of(handle, "NumPy", *host, None)
        if tensors:
            kinds |= kinds_of(handle, "torch", *tensors, None)
        kinds |= kinds_of(handle, "crossdock.Tensor", *described, stream)
        best = dict.fromkeys(["C", *kinds], float("inf"))
        for _ in range(options.rounds):
            for name in best:
                best[name] = min(best[name], in_c(calls) if name == "C" else mean_us(kinds[name], calls))
                if is_gpu:
                    torch.cuda.synchronize()
        handle.close()
    for name, us in best.items():
        print(f"{name:<40} {us:6.2f} us per call" + ("" if name == "C" else f", {us - best['C']:5.2f} above C"))
    if options.json:
        Path(options.json).write_text(json.dumps({"device": options.device, "us_per_call": best}))


if __name__ == "__main__":
    main()
