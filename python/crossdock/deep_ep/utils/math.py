# SPDX-License-Identifier: Apache-2.0
"""Numbers that tests compare by."""

from __future__ import annotations

from typing import Any

import torch

from crossdock.deep_ep.config import align
from crossdock.torch.quantise import BLOCK, from_fp8, to_fp8

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def safe_div(dividend: float, divisor: float) -> float:
    """The quotient; 0 where the divisor is 0."""
    return dividend / divisor if divisor != 0 else 0.0


def count_bytes(*values: Any) -> int:
    """Of all tensors, also those in tuples and lists; None has none."""
    num_bytes = 0
    for value in values:
        if isinstance(value, (tuple, list)):
            num_bytes += count_bytes(*value)
        elif value is not None:
            num_bytes += value.numel() * value.element_size()
    return num_bytes


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """scores [T, E], 0 outside of each token's groups: group_idx [T, n] of num_groups equal runs of experts."""
    num_tokens, num_experts = scores.shape
    is_chosen = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=scores.device)
    is_chosen.scatter_(1, group_idx.long(), True)
    of_experts = is_chosen.repeat_interleave(num_experts // num_groups, dim=1)
    return torch.where(of_experts, scores, 0)


def calc_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    """0 for equal tensors, up to 1: one minus twice the scalar product over the sum of squares, each element plus 1."""
    a, b = a.double() + 1, b.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] -> (e4m3 [T, H], fp32 [T, H / 128]); H a multiple of 128."""
    return to_fp8(x)


def per_token_cast_back(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16; scales fp32, or int32 with the exponents of four blocks."""
    if scales.dtype == torch.int32:
        packed = scales.clone(memory_format=torch.contiguous_format)  # also where a single column has any stride
        scales = (packed.view(torch.uint8).int() << 23).view(torch.float32)
    return from_fp8(values, scales.view(*values.shape[:-1], values.shape[-1] // BLOCK), torch.bfloat16)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Each row of x becomes its different values in 0 .. num_slots - 1, the most frequent first, then -1."""
    valid = x >= 0
    counts = torch.zeros(x.shape[0], num_slots, dtype=torch.int64, device=x.device)
    counts.scatter_add_(1, x.clamp_min(0).long(), valid.long())
    counts, order = counts.sort(dim=1, descending=True, stable=True)
    num = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :num] = torch.where(counts[:, :num] > 0, order[:, :num], -1).to(x.dtype)


def hash_tensor(x: torch.Tensor) -> int:
    """The sum of the bits as int32, which does not see the order of rows."""
    return int(x.contiguous().view(torch.int32).long().sum())
