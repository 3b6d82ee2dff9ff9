# SPDX-License-Identifier: Apache-2.0
"""Scales of rows as 8-bit floats, in the two forms that DeepEP's callers know."""

from __future__ import annotations

import torch

from crossdock.deep_ep.config import align
from crossdock.deep_ep.makers import maker_of


def empty_scales(like: torch.Tensor, num_rows: int, column_major: bool) -> torch.Tensor:
    """[num_rows, S]; column_major: with strides (1, rows rounded up to 4)."""
    make, columns = maker_of(like.dtype, like.device), like.shape[1]
    if not column_major:
        return make(num_rows, columns)
    aligned = align(num_rows, 4)
    return make(columns, aligned).as_strided((num_rows, columns), (1, aligned))


class Packed:
    """Exponents, four in an int32, [L, P, S / 4] with strides (P*S/4, 1, P): tensor, once finish() was called."""

    __slots__ = ("stored", "tensor")

    def __init__(self, stored: torch.Tensor, sizes: tuple[int, int, int]) -> None:
        """stored [L, P, S] fp32: what the library fills, with powers of two."""
        local, slots, num_scales = sizes
        self.stored = stored
        shape, strides = (local, slots, num_scales // 4), (slots * num_scales // 4, 1, slots)
        self.tensor = torch.empty_strided(shape, strides, dtype=torch.int32, device=stored.device)

    def finish(self) -> None:
        exponents = (self.stored.view(torch.int32) >> 23).to(torch.uint8)
        self.tensor.copy_(exponents.view(torch.int32))
