# SPDX-License-Identifier: Apache-2.0
"""The normal mode of Buffer: dispatch of any number of tokens, fresh or along an earlier handle, and combine."""

from __future__ import annotations

from typing import Any

import torch

from crossdock._core import ElasticLease, count_routing
from crossdock.deep_ep.agreement import Agreement, call_form
from crossdock.deep_ep.checks import check_normal, check_values, check_weights, refuse
from crossdock.deep_ep.elastic_groups import Biases, ElasticGroups, Kind
from crossdock.deep_ep.handles import DispatchHandle
from crossdock.deep_ep.rows import bytes_either_way, tag_of_dispatch

MOST_TARGETS = 64  # columns of a group's routing
FEWEST_SCALES = 96  # that have room beside a row at least


def targets_of(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """The ranks of each token, [T, R] or [T, 64] with more ranks, in any columns; -1 where there is none."""
    size = is_token_in_rank.shape[1]
    if size <= MOST_TARGETS:
        return torch.where(is_token_in_rank, torch.arange(size, dtype=torch.int64, device=is_token_in_rank.device), -1)
    ranks = (~is_token_in_rank).byte().argsort(dim=1, stable=True)[:, :MOST_TARGETS]
    return torch.where(is_token_in_rank.gather(1, ranks), ranks, -1)


def expect_alike(layout: tuple[Any, Any, Any], topk_idx: torch.Tensor | None) -> None:
    """Checks that a layout's parts and topk_idx match; not on GPUs, where the check would wait for the device."""
    per_rank, is_in_rank, per_expert = layout
    if not is_in_rank.is_cpu:
        return
    if topk_idx is not None:
        check_values(topk_idx, per_expert.shape[0])
    if not torch.equal(is_in_rank.sum(dim=0, dtype=torch.int32), per_rank):
        found = is_in_rank.sum(dim=0).tolist()
        refuse(f"num_tokens_per_rank is {per_rank.tolist()}, is_token_in_rank has {found} for the ranks")
    if topk_idx is None:
        return
    _, _, counts, chosen = count_routing(topk_idx, per_expert.shape[0], per_rank.shape[0])
    if not torch.equal(per_expert, counts):
        refuse(f"num_tokens_per_expert is {per_expert.tolist()}, topk_idx has {counts.tolist()} for the experts")
    if not torch.equal(is_in_rank, chosen):
        token, rank = (is_in_rank != chosen).nonzero()[0].tolist()
        said, other = ("True", "no") if is_in_rank[token, rank] else ("False", "an")
        refuse(f"is_token_in_rank[{token}, {rank}] is {said}, and topk_idx[{token}] has {other} expert of rank {rank}")


class Normal(ElasticGroups):
    """Of one Buffer."""

    budget_is = "num_worst_tokens"
    sums_of = (torch.bfloat16, torch.float16, torch.float32)

    def lease_of(self, handle: Any) -> ElasticLease:
        """What a handle of this buffer, or a plain tuple with its items, stands for."""
        items = tuple.__iter__(handle) if isinstance(handle, tuple) else ()
        lease = next((item for item in items if isinstance(item, ElasticLease)), None)
        return self.expect_own(lease, handle, "one that a fresh dispatch returned")

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        layout: tuple[Any, Any, Any],
        routing: tuple[Any, Any, int, int],
        has_nodes: bool,
        sms: int,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int], DispatchHandle]:
        """A fresh one. layout: per rank, is_in_rank, per expert; routing: ids, weights, alignment, num_worst_tokens."""
        ranks, device, is_cpu = self.ranks, x.device, x.is_cpu
        check_normal(x, scales, *layout, *routing, ranks.size)
        (per_rank, is_in_rank, per_expert), (topk_idx, topk_weights, alignment, num_worst_tokens) = layout, routing
        expect_alike(layout, topk_idx)
        num_experts, topk = per_expert.shape[0], topk_idx.shape[1] if topk_idx is not None else 0
        kind, counts, worst = "with topk_idx" if topk_idx is not None else "without topk_idx", None, num_worst_tokens
        if num_worst_tokens > 0:
            kind = "with num_worst_tokens"
        if worst == 0 or is_cpu:  # else the host would wait for the GPU, so num_worst_tokens is the same on all ranks
            counts, worst = (per_rank, per_expert), 0
        form = call_form(kind, x, scales, num_experts, topk, None, ("num_worst_tokens", worst))
        agreed = Agreement(ranks, form, x.shape[0], num_worst_tokens, counts)
        if num_worst_tokens > 0 and is_cpu:
            agreed.expect_room()
        if agreed.most_tokens > worst > 0:
            most = agreed.most_tokens
            refuse(f"num_worst_tokens is {worst}, allowed on GPUs: at least the {most} tokens of a rank")
        num_rows = num_worst_tokens or agreed.rows_here()

        # Without topk_idx, ranks play the experts.
        ids = targets_of(is_in_rank) if topk_idx is None else topk_idx
        experts = ranks.size if topk_idx is None else num_experts
        num_scales = max(0 if scales is None else scales.shape[1], FEWEST_SCALES)  # with those of later calls
        longest = bytes_either_way(x, 4 * num_scales)
        plan = self.plan(
            Kind(device, experts, ids.shape[1], agreed.most_tokens, longest, False, worst, 1, 0, topk_idx is not None)
        )
        is_copied = topk_idx is not None and plan.is_low_latency  # high throughput keeps what it reads itself
        numbers = num_rows, num_rows, sms, tag_of_dispatch(x, scales), is_copied, False, False
        received, own_ids, weights, lease, _, rank_ends, _, _, sources = self.send(
            plan, x, scales, ids, topk_weights, None, *numbers
        )
        items: tuple[Any, ...] = (..., lease, None, sources[:, 0], is_in_rank, None)
        if has_nodes:
            items = (is_in_rank, lease, None, sources[:, 0], None, None, rank_ends, None, None, None)
        handle = DispatchHandle(items)
        handle.agreed = agreed if counts is not None else None
        expert_counts = agreed.expert_counts_here(alignment) if num_worst_tokens == 0 else []
        return received, own_ids if topk_idx is not None else None, weights, expert_counts, handle

    def combine(
        self, x: torch.Tensor, lease: ElasticLease, topk_weights: torch.Tensor | None, biases: Biases, sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights return as rows of their own: their sums are over all ranks, whatever the choices are."""
        if topk_weights is None:
            return self.add_up(lease, x, None, biases, sms)
        check_weights(topk_weights, lease.num_rows, lease.topk_idx)
        sums, _ = self.add_up(lease, x, None, biases, sms, True)
        return sums, self.add_up(lease, topk_weights, None, (None, None), sms, True)[0]
