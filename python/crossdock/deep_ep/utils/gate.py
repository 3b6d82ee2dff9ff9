# SPDX-License-Identifier: Apache-2.0
"""Gating scores for tests."""

from __future__ import annotations

import torch

__all__ = ["get_unbalanced_scores"]


def get_unbalanced_scores(
    num_tokens: int,
    num_experts: int,
    num_ranks: int,
    num_topk: int,
    unbalanced_ratio: float = 1.0,
    precise: bool = False,
) -> torch.Tensor:
    """fp32 scores [T, E], at least 0, on torch's default device. Their top-k gives the first rank unbalanced_ratio
    times the mean number of pairs of token and expert, as far as it has experts.

    precise: exactly, to a pair, also where the ratio is 1; else on average.
    """
    device = torch.get_default_device()
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=device) + 1
    if unbalanced_ratio == 1 and not precise:
        return scores
    num_local = num_experts // num_ranks
    mean = min(unbalanced_ratio * num_topk / num_ranks, num_topk, num_local)
    if precise:
        ends = (torch.arange(num_tokens + 1, dtype=torch.float64, device=device) * mean).round().long()
        of_first = ends.diff()
    else:
        of_first = (mean + torch.rand(num_tokens, dtype=torch.float32, device=device)).floor().long()
    # The first rank's best `of_first` come before all others, its other experts behind them.
    place = scores[:, :num_local].argsort(dim=1, descending=True).argsort(dim=1)
    scores[:, :num_local] += torch.where(place < of_first.unsqueeze(1), 1.0, -1.0)
    return scores
