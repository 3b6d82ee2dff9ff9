# SPDX-License-Identifier: Apache-2.0
"""nccl.ep as the nccl_ep branches of SGLang and vLLM call it, on CPUs, ranks as threads.

    python tests/engines/check_nccl_ep.py

Those branches are in no release that could be run (SGLang 0.5.23 and vLLM 0.33.0 have none), so their calls are made by
hand: a low-latency dispatch gets all tensors of LayoutInfo, and rows of FP8 come as bytes, without a recipe.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import crossdock
import ranks
import wheels

EXPERTS, LOCAL, TOPK, MOST, HIDDEN = 8, 4, 2, 8, 64


def low_latency(comm: Any, dtype: torch.dtype) -> str:
    """Dispatch in expert-major layout with every tensor of LayoutInfo; says what the library refuses."""
    import nccl.ep as ep

    group = ep.Group.create(
        comm,
        ep.GroupConfig(num_experts=EXPERTS, max_dispatch_tokens_per_rank=MOST, max_token_bytes=HIDDEN * 2),
    )
    random = torch.Generator().manual_seed(comm.rank)
    bits = torch.randint(0, 120, (5, HIDDEN), generator=random, dtype=torch.uint8)
    tokens = bits.view(torch.float8_e4m3fn) if dtype == torch.float8_e4m3fn else bits.to(dtype)
    every = [
        torch.rand(5, EXPERTS, generator=torch.Generator().manual_seed(7 + rank)).argsort(dim=1)[:, :TOPK].contiguous()
        for rank in range(2)
    ]
    rows = torch.zeros(LOCAL, 2 * MOST, HIDDEN, dtype=torch.uint8).to(dtype)
    counts, offsets = torch.zeros(LOCAL, dtype=torch.int32), torch.zeros(LOCAL, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    layout = ep.LayoutInfo(
        expert_counters=ep.Tensor(counts), expert_offsets=ep.Tensor(offsets), recv_total_counter=ep.Tensor(total)
    )
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(every[comm.rank]), stream=0)
    said = ""
    try:
        handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(tokens)),
            ep.DispatchOutputs(tokens=ep.Tensor(rows)),
            layout_info=layout,
            stream=0,
        )
        handle.complete(stream=0)
    except Exception as error:
        if "code 4" not in str(error):
            raise
        said = "an invalid argument"
    if not said:
        expected = torch.bincount(torch.cat(every).flatten(), minlength=EXPERTS)
        assert torch.equal(counts, expected[comm.rank * LOCAL :][:LOCAL].int()), f"{counts.tolist()} rows"
        own = [int((every[comm.rank] == expert + comm.rank * LOCAL).sum()) for expert in range(LOCAL)]
        for expert, number in enumerate(own):
            # Rows lie in order of their sources: rank 0's first.
            first = 0 if comm.rank == 0 else int(counts[expert]) - number
            chosen = (every[comm.rank] == expert + comm.rank * LOCAL).any(dim=1)
            found = rows[expert, first : first + number].view(torch.uint8)
            assert torch.equal(found, tokens[chosen].view(torch.uint8)), f"rows of expert {expert} differ"
    handle.destroy()
    group.destroy()
    return said


def check() -> int:
    if importlib.util.find_spec("nccl") is None or importlib.util.find_spec("nccl.ep") is None:
        raise wheels.Skip("the wheels nccl-extensions and nccl4py are not installed")
    print(crossdock.take_over_nccl_ep())
    for dtype in (torch.bfloat16, torch.uint8, torch.float8_e4m3fn):
        said = crossdock.run_threads(2, low_latency, dtype)
        assert said[0] == said[1], said
        print(f"{'refused' if said[0] else 'ok':8} {dtype}" + (f": {said[0]}" if said[0] else ""))
        assert not said[0] or dtype != torch.bfloat16
    print("nccl.ep: the calls of SGLang's and vLLM's branches")
    return 0


if __name__ == "__main__":
    ranks.main("nccl_ep", check)
