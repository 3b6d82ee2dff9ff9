# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own dispatch and combine over DeepEP, on CPUs, a rank per process; one file of the wheel, unchanged.

    python tests/engines/check_torchtitan.py

Its operators are registered for GPUs alone; here the same functions are registered for CPUs, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ranks
import wheels
from stand_ins import load

HIDDEN, EXPERTS, TOPK, MOST = 64, 8, 3, 32


def layer(engine: Any, x: Any, ids: Any, scores: Any, first: int, local: int, in_graphs: bool) -> Any:
    """Expert e multiplies its rows by (e + 1) / EXPERTS; the calls are those of DeepEPTokenDispatcher."""
    rows, counts, state = engine.dispatch_tokens(
        x, ids, scores, local, EXPERTS, num_tokens_per_rank=MOST, cudagraphable=in_graphs
    )
    factors = torch.zeros(len(rows))  # of rows that are not there
    own = (torch.arange(first, first + local) + 1.0).repeat_interleave(counts) / EXPERTS
    factors[: len(own)] = own
    made = torch.where(factors[:, None] > 0, rows * factors[:, None].to(rows.dtype), 0)
    combined = engine.combine_tokens(made, state)
    engine.sync_combine()
    return combined


def run_rank() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = wheels.folder(wheels.TORCHTITAN)
    [engine] = load(folder, "torchtitan.distributed.deepep", ["deepep"], {})
    for name in ("dispatch", "combine"):
        engine._lib.impl(name, getattr(engine, f"_{name}_op_impl"), "CPU")
    engine.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=MOST, num_topk=TOPK)
    random, local, worst = torch.Generator().manual_seed(rank), EXPERTS // size, 0.0
    for step in range(4):
        num = MOST - 3 * step - rank
        x = torch.randn(num, HIDDEN, generator=random).bfloat16()
        ids = torch.rand(num, EXPERTS, generator=random).topk(TOPK).indices
        scores = torch.rand(num, TOPK, generator=random)
        plain_x, plain_scores = x.float().requires_grad_(), scores.clone().requires_grad_()
        expected = plain_x * (plain_scores * (ids + 1) / EXPERTS).sum(dim=1, keepdim=True)
        own_x, own_scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
        result = layer(engine, own_x, ids, own_scores, rank * local, local, False)
        for of in (expected, result):
            of.float().square().sum().backward()
        with torch.no_grad():
            again = layer(engine, x, ids, scores, rank * local, local, True)
        grads: list[tuple[Any, Any]] = [(own_x.grad, plain_x.grad), (own_scores.grad, plain_scores.grad)]
        pairs = [(result, expected), (again, expected), *grads]
        for name, (one, other) in zip(("result", "expanded", "tokens", "scores"), pairs, strict=True):
            error = float((one.float() - other).norm() / other.norm())
            assert error < 2e-2, f"step {step}, {name}: {error}"
            worst = max(worst, error)
    print(f"torchtitan {wheels.TORCHTITAN.version}'s dispatcher agrees; largest error {worst:.1e}", flush=True)
    dist.destroy_process_group()


def check() -> int:
    wheels.folder(wheels.TORCHTITAN)  # before ranks would all bring it
    return ranks.run_ranks(__file__, [])


if __name__ == "__main__":
    if ranks.is_rank():
        run_rank()
    else:
        ranks.main("torchtitan", check)
