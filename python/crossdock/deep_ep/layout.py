# SPDX-License-Identifier: Apache-2.0
"""Which ranks and experts the tokens of this rank are for: counts and masks out of topk_idx, on its device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock._core import count_routing, largest_id
from crossdock.deep_ep.errors import require

topk_idx_t = torch.int64
_ID_TYPES = (torch.int64, torch.int32)
MOST_COMPARISONS = 1 << 25  # of every choice with every expert


def check_topk_idx(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> None:
    """Shape, type and, on CPUs, values."""
    check_form(topk_idx, num_experts, num_ranks)
    check_values(topk_idx, num_experts)


def check_form(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> None:
    require(
        num_experts >= 1 and num_experts % num_ranks == 0,
        lambda: f"num_experts is {num_experts}, allowed: positive multiples of the {num_ranks} ranks",
    )
    require(
        isinstance(topk_idx, torch.Tensor) and topk_idx.dim() == 2 and topk_idx.dtype in _ID_TYPES,
        lambda: f"topk_idx is {describe(topk_idx)}, expected [tokens, top-k] of torch.int64",
    )
    require(topk_idx.shape[1] >= 1, lambda: f"topk_idx is {describe(topk_idx)}, expected at least one column")


def check_values(topk_idx: torch.Tensor, num_experts: int) -> None:
    """On CPUs, where that does not have to be awaited."""
    largest = largest_id(topk_idx)
    if largest is None and topk_idx.is_cpu and topk_idx.numel() > 0:
        largest = int(topk_idx.max())
    if largest is not None:
        _expect_below(largest, num_experts)


def _expect_below(largest: int, num_experts: int) -> None:
    if largest >= num_experts:
        require(False, f"topk_idx has the value {largest}, allowed: below num_experts ({num_experts})")


def describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"{list(value.shape)} of {value.dtype}"


class Counts(NamedTuple):
    """What a layout call returns of topk_idx [T, K]."""

    per_rank: torch.Tensor  # [R] int32, tokens
    per_node: torch.Tensor | None  # [nodes] int32, tokens; None: there is one
    per_expert: torch.Tensor  # [E] int32, selections
    is_in_rank: torch.Tensor  # [T, R] bool, whether a token is for a rank


def counts_of(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int = 1) -> Counts:
    """The form of topk_idx is checked; on CPUs its values are checked here."""
    if topk_idx.is_cpu:
        new = torch.empty(0, dtype=torch.int32).new_empty
        per_rank, per_expert = new(num_ranks), new(num_experts)
        per_node = new(num_nodes) if num_nodes > 1 else None
        is_in_rank = torch.empty(topk_idx.shape[0], num_ranks, dtype=torch.bool)
        largest = count_routing(topk_idx, num_ranks // num_nodes, per_rank, per_node, per_expert, is_in_rank)
        if largest is not None:
            _expect_below(largest, num_experts)
            return Counts(per_rank, per_node, per_expert, is_in_rank)
        check_values(topk_idx, num_experts)
    by_comparing = topk_idx.numel() * num_experts <= MOST_COMPARISONS
    per_expert, is_in_rank = (compare if by_comparing else scatter)(topk_idx, num_experts, num_ranks)
    per_rank = is_in_rank.sum(dim=0, dtype=torch.int32)
    return Counts(per_rank, tokens_per_node(is_in_rank, num_nodes), per_expert, is_in_rank)


def compare(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(per_expert, is_in_rank) in the fewest operations, with a byte of memory a comparison."""
    experts = torch.arange(num_experts, dtype=topk_idx.dtype, device=topk_idx.device)
    is_chosen = topk_idx.unsqueeze(2) == experts
    is_in_rank = is_chosen.view(*topk_idx.shape, num_ranks, num_experts // num_ranks).any(dim=(1, 3))
    return is_chosen.sum(dim=(0, 1), dtype=torch.int32), is_in_rank


def scatter(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without that memory."""
    valid = (topk_idx >= 0).int()
    ids = topk_idx.clamp_min(0).long()
    per_expert = torch.zeros(num_experts, dtype=torch.int32, device=topk_idx.device)
    per_expert.scatter_add_(0, ids.flatten(), valid.flatten())
    in_rank = torch.zeros(topk_idx.shape[0], num_ranks, dtype=torch.int32, device=topk_idx.device)
    in_rank.scatter_add_(1, ids // (num_experts // num_ranks), valid)
    return per_expert, in_rank > 0


def tokens_per_node(is_in_rank: torch.Tensor, num_nodes: int) -> torch.Tensor | None:
    """[nodes] int32, tokens for at least one rank of each; None: there is one."""
    if num_nodes == 1:
        return None
    num_tokens, num_ranks = is_in_rank.shape
    return is_in_rank.view(num_tokens, num_nodes, num_ranks // num_nodes).any(dim=2).sum(dim=0, dtype=torch.int32)


def routing_of_ids(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """[T, K] ranks, -1 for none."""
    return torch.div(topk_idx, num_experts // num_ranks, rounding_mode="floor")


def routing_of_mask(is_in_rank: torch.Tensor, most: int) -> torch.Tensor:
    """[T, n] ranks, -1 for none; n is R, or most where that is fewer, so many a token may have then."""
    num_ranks = is_in_rank.shape[1]
    ranks = torch.arange(num_ranks, device=is_in_rank.device)
    routing = torch.where(is_in_rank, ranks, -1)
    return routing if num_ranks <= most else routing.topk(most, dim=1).values
