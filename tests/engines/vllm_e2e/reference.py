# SPDX-License-Identifier: Apache-2.0
"""A MoE layer by plain loops, and how far a layer's output is from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_e2e.models import FP8_BLOCK
from vllm_e2e.weights import FP8, Expert

BF16_ROUNDING = 2.0**-8  # the largest relative error of one rounding to bf16
STAGES = 4  # that round to bf16: both matrix products, the activation, the sum
# The activation is quantised to FP8. A value that was rounded otherwise before then moves by a whole FP8 step, at most
# 1/8 of itself. One bf16 rounding decides this for 1/32 of the values on average: together sqrt(1/32) / 8 of a row. In
# rows that few values dominate it can be twice as much.
FP8_STEPS = 2 * 2.0**-5.5


def limit_of(is_fp8: bool) -> float:
    """The largest relative error of a row: one bf16 rounding per stage, and with FP8 those steps."""
    return STAGES * BF16_ROUNDING + (FP8_STEPS if is_fp8 else 0)


def quantised(x: torch.Tensor) -> torch.Tensor:
    """In fp32, what FP8 with a scale per 128 columns keeps of x."""
    groups = x.float().unflatten(-1, (-1, FP8_BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).clamp(-448, 448).to(FP8).float() * scale).flatten(-2)


def moe_layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, expert: Callable[[int], Expert], is_fp8: bool
) -> torch.Tensor:
    """x [T, H], experts ids [T, K] and weights [T, K] -> [T, H] in fp32. It rounds where the layer does."""
    sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    inputs = quantised(x) if is_fp8 else x.float()
    for number in ids.unique().tolist():
        if number < 0:
            continue
        w13, w2 = expert(number).matrices()
        token, choice = (ids == number).nonzero(as_tuple=True)
        gate, up = (inputs[token] @ w13.T).bfloat16().chunk(2, 1)
        active = torch.nn.functional.silu(gate) * up
        rows = ((quantised(active) if is_fp8 else active.float()) @ w2.T).bfloat16()
        sums.index_add_(0, token, rows.float() * weights[token, choice].float().unsqueeze(1))
    return sums.bfloat16().float()


def rounded_again(output: torch.Tensor) -> torch.Tensor:
    """As if one more stage had rounded it: each value moves by up to one rounding."""
    moves = torch.empty(output.shape, device=output.device).uniform_(-BF16_ROUNDING, BF16_ROUNDING)
    return (output.float() * (1 + moves)).to(output.dtype)


def row_errors(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|output - expected| / |expected| of each row; infinite where the output is not finite."""
    distance = (output.float() - expected).norm(dim=1)
    errors = distance / expected.norm(dim=1).clamp(min=1e-30)
    errors = torch.where(distance == 0, 0, errors)  # 0 rows that should be 0
    return torch.where(errors.isfinite(), errors, torch.inf)


@dataclass(frozen=True)
class Comparison:
    num_tokens: int
    worst: float
    worst_token: int
    num_wrong: int  # rows over the limit
    median: float


def compare(output: torch.Tensor, expected: torch.Tensor, limit: float) -> Comparison:
    if len(output) == 0:
        return Comparison(0, 0.0, -1, 0, 0.0)
    errors = row_errors(output, expected)
    worst = errors.argmax()
    values = torch.stack([errors[worst], worst.float(), (errors > limit).sum().float(), errors.median()]).tolist()
    return Comparison(len(errors), values[0], int(values[1]), int(values[2]), values[3])
