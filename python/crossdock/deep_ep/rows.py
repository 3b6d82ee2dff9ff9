# SPDX-License-Identifier: Apache-2.0
"""Rows of any type and length as what groups carry: 16-byte multiples of bytes, with words beside them."""

from __future__ import annotations

import torch

from crossdock.deep_ep.config import align

UNIT = 16  # bytes
# Types of 1 and 2 bytes whose rows are moved, not understood.
BYTES, PAIRS = torch.float8_e4m3fn, torch.bfloat16


def padded_bytes(num_bytes: int) -> int:
    return align(max(num_bytes, 1), UNIT)


def as_carried(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, H] of any type as [T, n] of dtype (BYTES or PAIRS), padded with zeros where that is needed."""
    if rows.shape[1] * rows.element_size() % UNIT == 0 and rows.shape[1] > 0:
        return rows.view(dtype)
    num_bytes = rows.shape[1] * rows.element_size()
    padded = torch.zeros(rows.shape[0], padded_bytes(num_bytes), dtype=torch.uint8, device=rows.device)
    padded[:, :num_bytes] = rows.view(torch.uint8)
    return padded.view(dtype)


def empty_carried(num_rows: int, num_bytes: int, like: torch.Tensor) -> torch.Tensor:
    """[N, padded bytes] uint8."""
    return torch.empty(num_rows, padded_bytes(num_bytes), dtype=torch.uint8, device=like.device)


def from_carried(carried: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows again, [N, H] contiguous; no copy where nothing was padded."""
    num_bytes = hidden * dtype.itemsize
    if carried.shape[1] != num_bytes:
        carried = carried[:, :num_bytes].contiguous()
    return carried.view(dtype)


class Beside:
    """What travels beside rows: tensors [T, n] of 4-byte types, by name, in one array of words."""

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        self._parts = {name: (part.shape[1], part.dtype) for name, part in parts.items()}
        words = [part.contiguous().view(torch.int32) for part in parts.values()]
        num = sum(part.shape[1] for part in words)
        padding = align(max(num, 1), UNIT // 4) - num
        if padding > 0:
            words.append(words[0].new_zeros(words[0].shape[0], padding))
        self.words = torch.cat(words, dim=1).view(torch.uint8)

    def split(self, received: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same tensors of received rows, contiguous."""
        whole, first, found = received.view(torch.int32), 0, {}
        for name, (columns, dtype) in self._parts.items():
            found[name] = whole[:, first : first + columns].contiguous().view(dtype)
            first += columns
        return found
