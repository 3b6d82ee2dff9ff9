#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a dispatch call costs the host in Python: host_cost.c's call, with arrays of every kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import crossdock as ep

ROUNDS, CALLS = 50, 2000


def smallest_mean_us(call: Callable[[], Any]) -> float:
    best = 1e9
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) * 1e6 / CALLS)
    return best


def main() -> None:
    [comm] = ep.Communicator.create_threads(1)
    with comm, ep.Group(comm, num_experts=1, max_dispatch_tokens_per_rank=1, max_token_bytes=16) as group:
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((1, 1), np.int32))

        def measure(name: str, tokens: Any, rows: Any, counts: Any) -> None:
            def fresh() -> None:
                handle.dispatch(
                    ep.DispatchInputs(tokens=tokens),
                    ep.DispatchOutputs(tokens=rows),
                    layout_info=ep.LayoutInfo(expert_counters=counts),
                )

            inputs, outputs = ep.DispatchInputs(tokens=tokens), ep.DispatchOutputs(tokens=rows)
            info = ep.LayoutInfo(expert_counters=counts)
            kept = smallest_mean_us(lambda: handle.dispatch(inputs, outputs, layout_info=info))
            print(f"Python, {name}: {smallest_mean_us(fresh):.2f} us, with arguments made once {kept:.2f} us")

        tokens, rows = np.ones((1, 4), np.float32), np.zeros((1, 1, 4), np.float32)
        counts = np.zeros(1, np.int32)
        measure("NumPy", tokens, rows, counts)
        measure("crossdock.Tensor", ep.Tensor(tokens), ep.Tensor(rows), ep.Tensor(counts))
        try:
            import torch
        except ModuleNotFoundError:
            print("torch is not installed")
        else:
            measure("torch", torch.from_numpy(tokens), torch.from_numpy(rows), torch.from_numpy(counts))
        handle.close()


if __name__ == "__main__":
    main()
