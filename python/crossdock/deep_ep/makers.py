# SPDX-License-Identifier: Apache-2.0
"""Allocates tensors without torch's dispatcher, as code that torch.compile generates does.

A low-latency dispatch takes 3.3 µs so, else 4.2, a combine 2.6 and 3.3, a fresh dispatch and combine 52 and 62 (AMD
EPYC, bench/deep_ep_host_cost.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from crossdock._core import PairMaker, PieceMaker, TensorMaker

Make = Callable[..., torch.Tensor]  # of extents
Extents = tuple[int, ...]

# (sizes, strides, dtype) to a tensor, by type of device: on GPUs on the current one. Not every torch has them.
_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_QUICK: dict[str, Any] = {kind: getattr(_GUARDS, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}


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
    """Of dense tensors with one dimension or two."""
    make = _strided_maker(dtype, device)

    def make_dense(*extents: int) -> torch.Tensor:
        return make(extents, (extents[1] or 1, 1) if len(extents) == 2 else (1,))

    return make_dense


def shaped_maker(
    dtype: torch.dtype, device: torch.device, sizes: Extents, strides: Extents | None = None
) -> TensorMaker:
    """Of tensors that are all alike; strides: None for dense ones."""
    return TensorMaker(torch.empty(0, dtype=dtype, device=device), sizes, strides or _dense(sizes))


def pair_maker(dtype: torch.dtype, device: torch.device, sizes: Extents, strides: Extents | None = None) -> PairMaker:
    """The same for long ones, in two memories that serve in turn."""
    return PairMaker(torch.empty(0, dtype=dtype, device=device), sizes, strides or _dense(sizes))


def _dense(sizes: Extents) -> Extents:
    return torch.empty(sizes, dtype=torch.uint8, device="meta").stride()


def piece_maker(device: torch.device, length: int) -> PieceMaker:
    """Of short int32 tensors that are all alike."""
    return PieceMaker(torch.empty(0, dtype=torch.int32, device=device), length)


def _strided_maker(dtype: torch.dtype, device: torch.device) -> Callable[[Extents, Extents], torch.Tensor]:
    quick, like = _QUICK.get(device.type), torch.empty(0, dtype=dtype, device=device)
    if quick is None:  # an empty tensor still makes others sooner than torch.empty does
        return like.new_empty_strided
    if device.type == "cpu":
        return lambda sizes, strides: quick(sizes, strides, dtype)
    current_device, index = torch._C._cuda_getDevice, like.device.index

    def make(sizes: Extents, strides: Extents) -> torch.Tensor:
        if current_device() != index:
            return like.new_empty_strided(sizes, strides)
        made: torch.Tensor = quick(sizes, strides, dtype)
        return made

    return make
