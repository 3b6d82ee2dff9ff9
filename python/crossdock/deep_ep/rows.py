# SPDX-License-Identifier: Apache-2.0
"""Rows of any type and length as what groups carry: 16-byte multiples of bytes, with words beside them."""

from __future__ import annotations

import torch

from crossdock.deep_ep.config import align

UNIT = 16  # bytes
# ncclDataType_t of types that the library carries as such; rows of other types go as bytes.
CARRIED_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
BYTES = CARRIED_TYPES[torch.uint8]


def padded_bytes(num_bytes: int) -> int:
    return align(max(num_bytes, 1), UNIT)


def as_carried(rows: torch.Tensor) -> torch.Tensor:
    """[T, H] of any type as [T, n] of a known one, padded with zeros where that is needed."""
    if rows.stride(1) != 1:  # a contiguous tensor without rows, or of one column, has any strides
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1))
    num_bytes = rows.shape[1] * rows.element_size()
    if num_bytes % UNIT == 0 and num_bytes > 0:
        return rows if rows.dtype in CARRIED_TYPES else rows.view(torch.uint8)
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
