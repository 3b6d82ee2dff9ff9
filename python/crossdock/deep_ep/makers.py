# SPDX-License-Identifier: Apache-2.0
"""New tensors, quickly: an empty tensor makes others of its type and device in half the time that torch.empty takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

Make = Callable[..., torch.Tensor]  # of extents


class Makers(NamedTuple):
    int32: Make
    int64: Make
    float32: Make
    bool: Make


@cache
def makers_of(device: torch.device) -> Makers:
    return Makers(*(maker_of(dtype, device) for dtype in (torch.int32, torch.int64, torch.float32, torch.bool)))


@cache
def maker_of(dtype: torch.dtype, device: torch.device) -> Make:
    make: Make = torch.empty(0, dtype=dtype, device=device).new_empty
    return make
