# SPDX-License-Identifier: Apache-2.0
"""Rows of any type and length as what groups carry: 16-byte multiples of bytes, with words beside them."""

from __future__ import annotations

import torch

from crossdock.deep_ep.config import align

UNIT = 16  # bytes
# What the library knows the size of; rows of other types are carried as bytes.
KNOWN_TYPES = frozenset(
    (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
        torch.int32,
    )
)


def padded_bytes(num_bytes: int) -> int:
    return align(max(num_bytes, 1), UNIT)


def as_carried(rows: torch.Tensor) -> torch.Tensor:
    """[T, H] of any type as [T, n] of a known one, padded with zeros where that is needed."""
    num_bytes = rows.shape[1] * rows.element_size()
    if num_bytes % UNIT == 0 and num_bytes > 0:
        return rows if rows.dtype in KNOWN_TYPES else rows.view(torch.uint8)
    padded = torch.zeros(rows.shape[0], padded_bytes(num_bytes), dtype=torch.uint8, device=rows.device)
    padded[:, :num_bytes] = rows.view(torch.uint8)
    return padded


def from_carried(carried: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows again, [N, H] contiguous; no copy where nothing was padded."""
    if carried.dtype == dtype and carried.shape[1] == hidden:
        return carried
    num_bytes = hidden * dtype.itemsize
    if carried.shape[1] != num_bytes:
        carried = carried[:, :num_bytes].contiguous()
    return carried.view(dtype)


class Beside:
    """What travels beside rows: tensors [T, n] of 4-byte types, by name, in one array of words [T, W].

    The first may have 8-byte elements, which are two words.
    """

    def __init__(self, parts: dict[str, torch.Tensor]) -> None:
        self._parts = {name: (part.shape[1], part.dtype) for name, part in parts.items()}
        words = [_as_words(part) for part in parts.values()]
        num = sum(part.shape[1] for part in words)
        padding = align(max(num, 1), UNIT // 4) - num
        if padding > 0:
            words.append(words[0][:, :1].expand(-1, padding))  # something that is there
        self.words = torch.cat(words, dim=1) if len(words) > 1 else words[0].contiguous()
        self.num_bytes = 4 * (num + padding)

    def split(self, received: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same tensors of received words, as views of them."""
        first, found = 0, {}
        for name, (columns, dtype) in self._parts.items():
            if dtype.itemsize == 8:
                found[name] = received.view(dtype)[:, :columns]
                first = 2 * columns
                continue
            part = received[:, first : first + columns]
            found[name] = part if dtype == torch.int32 else part.view(dtype)
            first += columns
        return found


def _as_words(part: torch.Tensor) -> torch.Tensor:
    if part.dtype == torch.int32:
        return part
    return (part.contiguous() if part.element_size() == 8 else part).view(torch.int32)
