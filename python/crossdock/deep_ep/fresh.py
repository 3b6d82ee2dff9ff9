# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a fresh dispatch in normal mode."""

from __future__ import annotations

import torch

from crossdock.deep_ep import layout
from crossdock.deep_ep.errors import require
from crossdock.deep_ep.layout import check_memory, check_tensor, describe
from crossdock.deep_ep.normal import Tokens


def check_counts(
    tokens: Tokens, per_rank: torch.Tensor, is_in_rank: torch.Tensor, per_expert: torch.Tensor, size: int
) -> None:
    """Of size ranks; all but the values."""
    num_tokens = tokens.values.shape[0]
    counts = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": is_in_rank,
        "num_tokens_per_expert": per_expert,
    }
    for name, tensor in counts.items():
        check_tensor(name, tensor)
        check_memory(name, tensor, tokens.values.device)
    require(
        tuple(per_rank.shape) == (size,) and per_rank.dtype == torch.int32,
        lambda: f"num_tokens_per_rank is {describe(per_rank)}, expected [{size}] of int32",
    )
    require(
        tuple(is_in_rank.shape) == (num_tokens, size) and is_in_rank.dtype == torch.bool,
        lambda: f"is_token_in_rank is {describe(is_in_rank)}, expected {[num_tokens, size]} of torch.bool",
    )
    fits = per_expert.dim() == 1 and len(per_expert) > 0 and len(per_expert) % size == 0
    require(
        fits and per_expert.dtype == torch.int32,
        lambda: (
            f"num_tokens_per_expert is {describe(per_expert)}, expected [num_experts] of torch.int32, a multiple of "
            f"{size}"
        ),
    )


def expect_alike(
    tokens: Tokens,
    per_rank: torch.Tensor,
    is_in_rank: torch.Tensor,
    per_expert: torch.Tensor,
    topk_idx: torch.Tensor | None,
) -> None:
    """Checks that per_rank and topk_idx match is_in_rank; not on GPUs, where the check would wait for the device."""
    if not tokens.values.is_cpu:
        return
    if not torch.equal(is_in_rank.sum(dim=0, dtype=torch.int32), per_rank):
        found = is_in_rank.sum(dim=0).tolist()
        require(False, f"num_tokens_per_rank is {per_rank.tolist()}, is_token_in_rank has {found} for the ranks")
    if topk_idx is None:
        return
    chosen = layout.counts_of(topk_idx, per_expert.shape[0], per_rank.shape[0]).is_in_rank
    if not torch.equal(is_in_rank, chosen):
        token, rank = (is_in_rank != chosen).nonzero()[0].tolist()
        said, other = ("True", "no") if is_in_rank[token, rank] else ("False", "an")
        require(
            False,
            f"is_token_in_rank[{token}, {rank}] is {said}, and topk_idx[{token}] has {other} expert of rank {rank}",
        )


def check_routing(
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    values: torch.Tensor,
    num_experts: int,
    num_ranks: int,
) -> None:
    require(
        (topk_idx is None) == (topk_weights is None),
        "one of topk_idx and topk_weights is None, allowed: both or none",
    )
    if topk_idx is None or topk_weights is None:
        return
    layout.check_topk_idx(topk_idx, num_experts, num_ranks)
    require(
        topk_idx.shape[0] == values.shape[0],
        lambda: f"topk_idx has {topk_idx.shape[0]} rows, expected those of x: {values.shape[0]}",
    )
    check_tensor("topk_weights", topk_weights)
    require(
        topk_weights.shape == topk_idx.shape and topk_weights.dtype == torch.float32,
        lambda: f"topk_weights is {describe(topk_weights)}, expected {list(topk_idx.shape)} of torch.float32",
    )
    check_memory("topk_idx", topk_idx, values.device)
    check_memory("topk_weights", topk_weights, values.device)
