# SPDX-License-Identifier: Apache-2.0
"""Rows as 8-bit floats with a scale for each 128 elements: what recipe DS_FP8E3M4 sends."""

from __future__ import annotations

import torch

BLOCK = 128
LARGEST = 448.0  # of e4m3
SMALLEST_AMAX = 1e-4


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().view(*rows.shape[:-1], rows.shape[-1] // BLOCK, BLOCK)


def to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [..., H] e4m3, scales [..., H / 128] fp32); a value times its block's scale approximates the element."""
    blocks = _blocks(rows)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_AMAX)
    values = (blocks * (LARGEST / amax)).to(torch.float8_e4m3fn)
    return values.flatten(-2), (amax / LARGEST).squeeze(-1)


def from_fp8(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of to_fp8: rows from values and scales."""
    blocks = _blocks(values) * scales.unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)


def nvfp4_scales(rows: torch.Tensor) -> torch.Tensor:
    """[..., 1] fp32, what a combine with recipe NVFP4 takes: 2688 / amax of each row, 0 for a row of zeros, NaN for
    a row with a NaN."""
    amax = rows.abs().amax(dim=-1, keepdim=True).float()
    return torch.where(amax == 0, 0.0, 2688.0 / amax)
