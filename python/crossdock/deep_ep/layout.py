# SPDX-License-Identifier: Apache-2.0
"""Which ranks and experts the tokens of this rank are for: counts and masks out of topk_idx, on its device."""

from __future__ import annotations

import torch

from crossdock._core import count_routing, largest_id
from crossdock.deep_ep.errors import require

topk_idx_t = torch.int64
_ID_TYPES = (torch.int64, torch.int32)


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
    if largest is not None and largest >= num_experts:
        _refuse(largest, num_experts)


def _refuse(largest: int, num_experts: int) -> None:
    require(False, f"topk_idx has the value {largest}, allowed: below num_experts ({num_experts})")


def describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"{list(value.shape)} of {value.dtype}"


def counts_of(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens a rank [R] int32, selections an expert [E] int32, whether a token is for a rank [T, R] bool)."""
    valid = topk_idx >= 0
    ids = topk_idx.clamp_min(0).long()
    per_expert = torch.zeros(num_experts, dtype=torch.int32, device=topk_idx.device)
    per_expert.scatter_add_(0, ids.flatten(), valid.flatten().int())
    in_rank = torch.zeros(topk_idx.shape[0], num_ranks, dtype=torch.int32, device=topk_idx.device)
    in_rank.scatter_add_(1, ids // (num_experts // num_ranks), valid.int())
    is_in_rank = in_rank > 0
    return is_in_rank.sum(dim=0, dtype=torch.int32), per_expert, is_in_rank


def tokens_per_node(is_in_rank: torch.Tensor, node_size: int) -> torch.Tensor:
    """[nodes] int32, tokens for at least one rank of each."""
    return is_in_rank.view(is_in_rank.shape[0], -1, node_size).any(dim=2).sum(dim=0, dtype=torch.int32)


def routing_of_ids(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """[T, K] ranks, -1 for none."""
    return torch.div(topk_idx, num_experts // num_ranks, rounding_mode="floor")


def routing_of_mask(is_in_rank: torch.Tensor, most: int) -> torch.Tensor:
    """[T, n] ranks, -1 for none; n is R, or most where that is fewer, so many a token may have then."""
    num_ranks = is_in_rank.shape[1]
    ranks = torch.arange(num_ranks, device=is_in_rank.device)
    routing = torch.where(is_in_rank, ranks, -1)
    return routing if num_ranks <= most else routing.topk(most, dim=1).values
