# SPDX-License-Identifier: Apache-2.0
"""Which ranks and experts the tokens of this rank are for: counts and masks out of topk_idx, on its device."""

from __future__ import annotations

import numbers
from typing import NamedTuple

import torch

from crossdock._core import count_routing, fault_of_memory, largest_id
from crossdock.deep_ep.errors import require
from crossdock.deep_ep.makers import makers_of

topk_idx_t = torch.int64
INT32_MAX = 2**31 - 1
MOST_EXPERTS = 32768  # of a rank
ID_TYPES = (torch.int64, torch.int32)


def is_whole(value: object, least: int, most: int | None = None) -> bool:
    if not isinstance(value, (int, numbers.Integral)):
        return False
    return least <= int(value) and (most is None or int(value) <= most)


def check_count(name: str, value: object, least: int, allowed: str = "", most: int | None = None) -> None:
    """A whole number in least..most; allowed: what is, where that is less."""
    fits = is_whole(value, least)
    require(fits, lambda: f"{name} is {value!r}, allowed: {allowed or f'{least} and more'}")
    require(is_whole(value, least, most), lambda: f"{name} is {value!r}, allowed: at most {most}")


def check_tensor(name: str, value: object) -> None:
    require(isinstance(value, torch.Tensor), lambda: f"{name} is {describe(value)}, expected a torch.Tensor")


def check_elements(name: str, tensor: torch.Tensor) -> None:
    """They are those in its memory."""
    fault = fault_of_memory(tensor)
    require(fault is None, lambda: f"{name} {fault}")


def check_memory(name: str, tensor: torch.Tensor, device: torch.device | None) -> None:
    """It holds the elements, on the device of the other tensors; None: on any that there is."""
    if device is None:
        kinds = ("cpu", "cuda")
        require(tensor.device.type in kinds, lambda: f"{name} is on device {tensor.device}, allowed: cpu, cuda")
    else:
        require(
            tensor.device == device,
            lambda: f"{name} is on device {tensor.device}, expected {device}, as the other tensors",
        )
    check_elements(name, tensor)


def is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two tensors of the same shape."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.stride() == b.stride())


def check_topk_idx(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> None:
    """Shape, type and, on CPUs, values."""
    check_form(topk_idx, num_experts, num_ranks)
    check_values(topk_idx, num_experts)


def check_form(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> None:
    require(
        num_experts >= 1 and num_experts % num_ranks == 0,
        lambda: f"num_experts is {num_experts}, allowed: positive multiples of the {num_ranks} ranks",
    )
    most = MOST_EXPERTS * num_ranks
    require(num_experts <= most, lambda: f"num_experts is {num_experts}, allowed: at most {most} for {num_ranks} ranks")
    require(
        isinstance(topk_idx, torch.Tensor) and topk_idx.dim() == 2 and topk_idx.dtype in ID_TYPES,
        lambda: f"topk_idx is {describe(topk_idx)}, expected [tokens, top-k] of torch.int64",
    )
    require(topk_idx.shape[1] >= 1, lambda: f"topk_idx is {describe(topk_idx)}, expected at least one column")
    check_elements("topk_idx", topk_idx)


def check_values(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Only on CPUs, where reading them needs no synchronization."""
    largest = largest_id(topk_idx)
    if largest is not None:
        _expect_below(largest, num_experts)


def _expect_below(largest: int, num_experts: int) -> None:
    if largest >= num_experts:
        require(False, f"topk_idx has the value {largest}, allowed: below num_experts ({num_experts})")


def describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"{list(value.shape)} of {value.dtype}"


class Counts(NamedTuple):
    """What a layout call returns of topk_idx [T, K]."""

    per_rank: torch.Tensor  # [R] int32, tokens
    per_node: torch.Tensor | None  # [nodes] int32, tokens; None: there is one
    per_expert: torch.Tensor  # [E] int32, selections
    is_in_rank: torch.Tensor  # [T, R] bool, whether a token is for a rank


def counts_of(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int = 1, distinct: bool = False
) -> Counts:
    """The form of topk_idx is checked; on CPUs its values are checked here.

    distinct: an expert counts a token that names it twice once.
    """
    make = makers_of(topk_idx.device)
    per_rank, per_expert = make.int32(num_ranks), make.int32(num_experts)
    per_node = make.int32(num_nodes) if num_nodes > 1 else None
    is_in_rank = make.bool(topk_idx.shape[0], num_ranks)
    largest = count_routing(topk_idx, num_ranks // num_nodes, per_rank, per_node, per_expert, is_in_rank, distinct)
    if largest is None:
        require(False, f"topk_idx is on device {topk_idx.device}, allowed: cpu, cuda")
    assert largest is not None
    _expect_below(largest, num_experts)
    return Counts(per_rank, per_node, per_expert, is_in_rank)
