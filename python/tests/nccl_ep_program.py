# SPDX-License-Identifier: Apache-2.0
"""A program that knows nccl.ep alone; python -m crossdock run gives it Crossdock, here with ranks on CPUs."""

import sys

import nccl.ep as ep
import torch

import crossdock


def run_rank(comm: crossdock.Communicator) -> list[float]:
    group = ep.Group.create(
        comm,  # type: ignore[arg-type]
        ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=1, max_token_bytes=16, enable_mask=True),
    )
    tokens, rows, result = torch.full((1, 4), comm.rank + 1.0), torch.zeros(1, 2, 4), torch.zeros(1, 4)
    counts, weights = torch.zeros(1, dtype=torch.int32), torch.tensor([[0.25, 0.75]])
    topk_idx = torch.tensor([[0, 1]])
    handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ep.Tensor(topk_idx), stream=0)
    handle.dispatch(
        ep.DispatchInputs(tokens=ep.Tensor(tokens)),
        ep.DispatchOutputs(tokens=ep.Tensor(rows)),
        layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts)),
        stream=0,
    )
    rows *= comm.rank + 1
    outputs = ep.CombineOutputs(tokens=ep.Tensor(result), topk_weights=ep.Tensor(weights))
    handle.combine(ep.CombineInputs(tokens=ep.Tensor(rows)), outputs, stream=0)
    handle.complete(stream=0)
    handle.destroy()
    group.destroy()
    assert counts.item() == 2
    return result[0].tolist()


assert sys.argv[1:] == ["--flag"]
assert crossdock.run_threads(2, run_rank) == [[1.75] * 4, [3.5] * 4]
print(f"nccl.ep {ep.get_lib_version()}")
