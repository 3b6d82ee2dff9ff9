# SPDX-License-Identifier: Apache-2.0
"""Reference results of DeepEP's tests of ElasticBuffer, by torch.distributed and plain operations of torch.

T tokens of a rank, N received rows, K columns (top-k), H hidden, M num_max_tokens_per_rank. Crossdock's own: from what
the tests pass and compare, and from the documented order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["combine", "dispatch", "generate_pre_combine_data", "ordered_accumulate"]


def dispatch(
    x: Any, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """What this rank receives, in the order of (source rank, token); all ranks of the default group call it.

    x: [T, H], or (values, scales). Returns the rows, in the form of x; their experts [N, K], counted from this rank's
    first, -1 for those of others; their weights [N, K]; int32 [N], source rank * M + token; rows of each source.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parts = x if isinstance(x, tuple) else (x,)
    *rows, ids, weights = (_gathered(part, num_max_tokens_per_rank) for part in (*parts, topk_idx, topk_weights))
    exists = _gathered(torch.ones(len(topk_idx), dtype=torch.uint8, device=topk_idx.device), num_max_tokens_per_rank)

    num_local = num_experts // num_ranks
    local = ids - rank * num_local
    local = torch.where((ids >= 0) & (local >= 0) & (local < num_local), local, -1)
    chosen = ((local >= 0).any(dim=1) & (exists > 0)).nonzero()[:, 0]
    of_each = torch.bincount(chosen // num_max_tokens_per_rank, minlength=num_ranks).tolist()
    rows = [part.index_select(0, chosen).view(own.dtype) for part, own in zip(rows, parts, strict=True)]
    return tuple(rows) if isinstance(x, tuple) else rows[0], local[chosen], weights[chosen], chosen.int(), of_each


def _gathered(own: torch.Tensor, most: int) -> torch.Tensor:
    """[ranks * most, ...] of all ranks, zeros behind each rank's own; 8-bit floats as bytes."""
    if own.element_size() == 1:
        own = own.view(torch.uint8)
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    return torch.cat(gathered)


def generate_pre_combine_data(
    src_token_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """bf16 [N, K, H], from -1 to 1: outputs of experts, which source rank * M + token alone decides, on every rank. M
    is in these numbers already."""
    channels = 2 * torch.arange(hidden, dtype=torch.int32, device=src_token_idx.device) + 1
    made = torch.empty(len(src_token_idx), num_topk, hidden, dtype=torch.bfloat16, device=src_token_idx.device)
    for column in range(num_topk):
        seeds = (src_token_idx.int() * num_topk + column + 1) * 0x3779B1  # products wrap
        made[:, column] = (seeds.unsqueeze(1) * (channels * 0x5EBCA7)).float() / 2**31
    return made


def ordered_accumulate(y: torch.Tensor) -> torch.Tensor:
    """bf16 [N, H]: the fp32 sum of y's columns, [N, K, H], in their order, rounded once."""
    return _sum(y).bfloat16()


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Any,
    rounds_per_rank: bool,
    rounds_per_scaleup: bool,
) -> torch.Tensor:
    """bf16 [T, H], the combine of y [T, K, H], one row per chosen expert; what topk_idx has -1 for is left out.

    Crossdock's order, all in fp32: bias (None, [T, H] or a tuple of them), then the sums of ranks, ascending, each of
    its rows by column; of several scale-up domains, the sums of domains. The flags say which sums are rounded to bf16
    on the way. If none is, all rows are added by column.
    """
    biases = () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,)
    total = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
    for added in biases:
        total += added
    num_ranks = num_scaleout_ranks * num_scaleup_ranks
    ranks = torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), -1)
    if not rounds_per_rank and not rounds_per_scaleup:
        return _sum(torch.where((ranks >= 0).unsqueeze(2), y, 0), total).bfloat16()
    for domain in range(num_scaleout_ranks):
        of_domain = total if num_scaleout_ranks == 1 else torch.zeros_like(total)
        for rank in range(domain * num_scaleup_ranks, (domain + 1) * num_scaleup_ranks):
            of_rank = _sum(torch.where((ranks == rank).unsqueeze(2), y, 0))
            of_domain += of_rank.bfloat16() if rounds_per_rank else of_rank
        if of_domain is not total:
            total += of_domain.bfloat16() if rounds_per_scaleup else of_domain
    return total.bfloat16()


def _sum(y: torch.Tensor, begin: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [T, H]: begin, then the columns of y, in order."""
    total = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device) if begin is None else begin
    for row in y.unbind(1):
        total += row
    return total
