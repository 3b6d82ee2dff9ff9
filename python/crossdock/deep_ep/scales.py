# SPDX-License-Identifier: Apache-2.0
"""Scales of rows as 8-bit floats, in the two forms that DeepEP's callers know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from crossdock.deep_ep.config import align
from crossdock.deep_ep.makers import maker_of, shaped_maker


def empty_scales(like: torch.Tensor, num_rows: int, column_major: bool) -> torch.Tensor:
    """For so many rows, [num_rows, S]; column_major: with strides (1, rows rounded up to 4)."""
    make, columns = maker_of(like.dtype, like.device), like.shape[1]
    if not column_major:
        return make(num_rows, columns)
    aligned = align(num_rows, 4)
    return make(columns, aligned).as_strided((num_rows, columns), (1, aligned))


class Scales(Protocol):
    """Of one dispatch. stored: what the library fills; tensor: what the caller gets, once finish() was called."""

    stored: torch.Tensor
    tensor: torch.Tensor

    def finish(self) -> None: ...


class Transposed:
    """fp32 [L, P, S] with strides (P*S, 1, P): the library lays them so by itself."""

    __slots__ = ("stored", "tensor")

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self.stored = self.tensor = make()

    @staticmethod
    def maker(local: int, slots: int, num_scales: int, device: torch.device) -> Callable[[], Scales]:
        shape, strides = (local, slots, num_scales), (slots * num_scales, 1, slots)
        return partial(Transposed, shaped_maker(torch.float32, device, shape, strides))

    def finish(self) -> None:
        pass


class Packed:
    """Exponents, four in an int32, [L, P, S / 4] with strides (P*S/4, 1, P)."""

    __slots__ = ("stored", "tensor")

    def __init__(self, local: int, slots: int, num_scales: int, device: torch.device) -> None:
        self.stored = torch.empty(local, slots, num_scales, dtype=torch.float32, device=device)
        shape, strides = (local, slots, num_scales // 4), (slots * num_scales // 4, 1, slots)
        self.tensor = torch.empty_strided(shape, strides, dtype=torch.int32, device=device)

    def finish(self) -> None:
        exponents = (self.stored.view(torch.int32) >> 23).to(torch.uint8)  # of powers of two
        self.tensor.copy_(exponents.view(torch.int32))
