# SPDX-License-Identifier: Apache-2.0
"""What travels beside the rows of a fresh dispatch, in an array of words: numbers, experts, weights, and scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from crossdock._core import pack_routing
from crossdock.deep_ep.config import align
from crossdock.deep_ep.makers import makers_of
from crossdock.deep_ep.rows import UNIT

MOST_TARGETS = 64  # columns of a group's routing


def num_words(topk: int, num_scales: int, has_weights: bool = True) -> int:
    """Of 4 bytes, with what fills them up."""
    return align(1 + (2 if has_weights else 1) * topk + num_scales, UNIT // 4)


class PackedRouting(NamedTuple):
    """The routing of a dispatch's tokens, as crossdockPackRouting writes it."""

    words: torch.Tensor  # [T, W] int32
    targets: torch.Tensor  # [T, N] int32: the ranks of each token, -1 where there are fewer

    @staticmethod
    def of(
        x: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        first_number: int,
        rank_experts: int,
        is_in_rank: torch.Tensor | None,
        zeros: torch.Tensor | None = None,
    ) -> PackedRouting:
        """is_in_rank [T, R]: says the ranks; None: those of topk_idx are. zeros: filled with such on the way."""
        make, num_tokens = makers_of(x.device), x.shape[0]
        topk = 0 if topk_idx is None else topk_idx.shape[1]
        num_scales = 0 if scales is None else scales.shape[1]
        words = make.int32(num_tokens, num_words(topk, num_scales, topk_weights is not None))
        num_targets = topk if is_in_rank is None else min(is_in_rank.shape[1], MOST_TARGETS)
        targets = make.int32(num_tokens, num_targets)
        if is_in_rank is not None:
            is_in_rank = is_in_rank.contiguous()
        pack_routing(words, first_number, topk_idx, topk_weights, scales, targets, rank_experts, is_in_rank, zeros)
        return PackedRouting(words, targets)
