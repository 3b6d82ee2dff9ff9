# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, and the exceptions of wrong calls: also AssertionErrors, as DeepEP's callers expect.

Each error names the argument, what it is and what is allowed.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch

from crossdock._core import ElasticLease, Forms, fault_of_memory, largest_id
from crossdock.errors import Error, InvalidArgument, InvalidUsage

topk_idx_t = torch.int64
INT32_MAX = 2**31 - 1
MOST_COLUMNS = 64  # of topk_idx, in a group of any mode
MOST_EXPERTS = 32768  # of a rank
ID_TYPES = (torch.int64, torch.int32)


class WrongArgument(InvalidArgument, AssertionError):
    """An argument is malformed or out of range; a ValueError and an AssertionError."""


class WrongCall(InvalidUsage, AssertionError):
    """The arguments are valid, but not in this state; a RuntimeError and an AssertionError."""


def refuse(message: str) -> NoReturn:
    raise WrongArgument(message)


def refuse_state(message: str) -> NoReturn:
    raise WrongCall(message)


def require(holds: bool, message: str) -> None:
    """For messages without values; with values: if not ...: refuse(f"...")."""
    if not holds:
        refuse(message)


def require_state(holds: bool, message: str) -> None:
    if not holds:
        refuse_state(message)


def translated(error: Error) -> Error:
    """The library's error as the exception that DeepEP's callers expect, or else the error itself."""
    if isinstance(error, InvalidArgument):
        return WrongArgument(str(error))
    return WrongCall(str(error)) if isinstance(error, InvalidUsage) else error


def once_per_form(check: Callable[..., None]) -> Callable[..., None]:
    """The check, left out for arguments of forms that it has found right: it must not look at tensors' values.

    Arguments other than tensors, numbers and None are checked each time.
    """
    right = Forms()

    @wraps(check)
    def check_once(*arguments: Any) -> None:
        if right.find(*arguments) is None:
            check(*arguments)
            right.keep(True, *arguments)

    return check_once


def is_whole(value: object, least: int, most: int | None = None) -> bool:
    if not isinstance(value, (int, numbers.Integral)):
        return False
    return least <= int(value) and (most is None or int(value) <= most)


def check_count(name: str, value: object, least: int, allowed: str = "", most: int | None = None) -> None:
    """A whole number in least..most; allowed: what is, where that is less."""
    if not is_whole(value, least):
        kind = "" if isinstance(value, (int, numbers.Integral)) else "whole numbers, "
        refuse(f"{name} is {value!r}, allowed: {kind}{allowed or f'{least} and more'}")
    if not is_whole(value, least, most):
        refuse(f"{name} is {value!r}, allowed: at most {most}")


def check_counts(least: int, **values: object) -> None:
    """Whole numbers, by their names."""
    for name, value in values.items():
        check_count(name, value, least)


def describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    return f"{list(value.shape)} of {value.dtype}"


def is_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        refuse(f"{name} is {describe(value)}, expected a torch.Tensor")


def check_tensor(
    name: str,
    value: Any,
    sizes: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    dense: bool = False,
    note: str = "",
) -> None:
    """A tensor [*sizes] of one of dtypes, whose memory holds its elements; a word stands for a size of any number.

    device: that of the other tensors; None: any that there is. note: what else to say of the one expected.
    """
    is_tensor(name, value)
    fits = value.device.type in ("cpu", "cuda") if device is None else value.device == device
    if not fits:
        allowed = "allowed: cpu, cuda" if device is None else f"expected {device}, as the other tensors"
        refuse(f"{name} is on device {value.device}, {allowed}")
    fits = value.dim() == len(sizes) and (not dtypes or value.dtype in dtypes) and (not dense or value.is_contiguous())
    if not fits or any(isinstance(size, int) and size != own for size, own in zip(sizes, value.shape, strict=True)):
        kind = f"{'a contiguous ' if dense else ''}[{', '.join(map(str, sizes))}]"
        types = f" of {' or '.join(map(str, dtypes))}" if dtypes else ""
        refuse(f"{name} is {describe(value)}, expected {kind}{types}{note}")
    fault = fault_of_memory(value)
    if fault is not None:
        refuse(f"{name} {fault}")


@once_per_form
def check_topk_idx(topk_idx: Any, num_experts: int, num_ranks: int, device: torch.device | None = None) -> None:
    """All but the values."""
    check_count("num_experts", num_experts, 1)
    if num_experts % num_ranks != 0:
        refuse(f"num_experts is {num_experts}, allowed: positive multiples of the {num_ranks} ranks")
    most = MOST_EXPERTS * num_ranks
    if num_experts > most:
        refuse(f"num_experts is {num_experts}, allowed: at most {most} for {num_ranks} ranks")
    check_tensor("topk_idx", topk_idx, ("tokens", "top-k"), ID_TYPES, device)
    widest = min(MOST_COLUMNS, num_experts)
    if not 1 <= topk_idx.shape[1] <= widest:
        refuse(f"topk_idx is {describe(topk_idx)}, allowed: 1..{widest} columns (num_experts {num_experts})")


def check_values(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Only on CPUs, where reading them needs no synchronization."""
    largest = largest_id(topk_idx)
    if largest is not None and largest >= num_experts:
        refuse(f"topk_idx has the value {largest}, allowed: below num_experts ({num_experts})")


def check_x(values: Any, scales: Any) -> None:
    """x of a dispatch, with its scales or None."""
    check_tensor("x", values, ("tokens", "hidden"), (), dense=True)
    if values.is_quantized:
        refuse(f"x is {describe(values)}, a quantised type of torch: pass its int_repr()")
    if values.element_size() > 4 or values.shape[1] < 1:
        refuse(f"x is {describe(values)}, allowed: elements of 1, 2 or 4 bytes, at least one in a row")
    if scales is not None:
        sizes = (values.shape[0], "scales per token")
        check_tensor("the tensor of scales", scales, sizes, (), values.device)
        if scales.element_size() != 4 or scales.shape[1] < 1:
            kind = f"[{sizes[0]}, scales per token] of 4-byte elements"
            refuse(f"the scales of x are {describe(scales)}, expected {kind}")


def check_routing(
    topk_idx: Any, topk_weights: Any, statistics: Any, values: torch.Tensor, num_experts: int, num_ranks: int
) -> None:
    """What goes with the rows of x, all but the values; weights and statistics may be None."""
    check_topk_idx(topk_idx, num_experts, num_ranks, values.device)
    if topk_idx.shape[0] != values.shape[0]:
        refuse(f"x has {values.shape[0]} rows, expected those of topk_idx: {topk_idx.shape[0]}")
    check_beside(topk_idx, topk_weights, statistics, num_experts // num_ranks)


def check_beside(topk_idx: torch.Tensor, topk_weights: Any, statistics: Any, num_local: int) -> None:
    """Weights and statistics, which may be None; num_local: experts of a rank."""
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, topk_idx.shape, (torch.float32,), topk_idx.device)
    if statistics is not None:
        name = "cumulative_local_expert_recv_stats"
        check_tensor(name, statistics, (num_local,), (torch.int32,), topk_idx.device)


@once_per_form
def check_normal(
    values: Any,
    scales: Any,
    per_rank: Any,
    is_in_rank: Any,
    per_expert: Any,
    topk_idx: Any,
    topk_weights: Any,
    alignment: int,
    num_worst_tokens: int,
    num_ranks: int,
) -> None:
    """A fresh dispatch in normal mode, all but the values; per_rank .. per_expert: of get_dispatch_layout."""
    check_x(values, scales)
    for name, tensor, sizes, dtype in (
        ("num_tokens_per_rank", per_rank, (num_ranks,), torch.int32),
        ("is_token_in_rank", is_in_rank, (values.shape[0], num_ranks), torch.bool),
        ("num_tokens_per_expert", per_expert, ("num_experts",), torch.int32),
    ):
        if tensor is None:
            refuse(f"{name} is None, expected what get_dispatch_layout returned (or a handle)")
        check_tensor(name, tensor, sizes, (dtype,), values.device)
    num = len(per_expert)
    if num == 0 or num % num_ranks != 0:
        refuse(f"num_tokens_per_expert has {num} numbers, expected a positive multiple of {num_ranks}")
    both = (topk_idx is None) == (topk_weights is None)
    require(both, "one of topk_idx and topk_weights is None, allowed: both or none")
    if topk_idx is not None:
        check_routing(topk_idx, topk_weights, None, values, num, num_ranks)
    check_count("expert_alignment", alignment, 1, most=INT32_MAX)
    check_count("num_worst_tokens", num_worst_tokens, 0, most=INT32_MAX)
    require(num_worst_tokens == 0 or topk_idx is not None, "topk_idx is None, expected with num_worst_tokens")


def check_combine(
    lease: ElasticLease, x: Any, topk_weights: Any, biases: tuple[Any, Any], types: Sequence[torch.dtype]
) -> None:
    """Rows that return along a lease; types: of x."""
    device = lease.topk_idx.device
    check_tensor("x", x, (lease.num_rows, ".."), types, device, True, ", the rows that dispatch returned")
    if x.shape[1] < 1:
        refuse(f"x is {describe(x)}, expected at least one column")
    for bias in biases:
        if bias is not None:
            check_tensor("bias", bias, (lease.num_tokens, x.shape[1]), (x.dtype,), device)
    if topk_weights is not None:
        columns = () if lease.plan.by_expert else lease.topk_idx.shape[1:]
        check_tensor("topk_weights", topk_weights, (lease.num_rows, *columns), (torch.float32,), device)


@once_per_form
def check_weights(topk_weights: Any, num_rows: int, like: torch.Tensor) -> None:
    """Of a combine in normal mode, where they may have any number of columns."""
    check_tensor("topk_weights", topk_weights, (num_rows, "columns"), (torch.float32,), like.device, True)
    require(topk_weights.shape[1] >= 1, "topk_weights has no columns, expected at least one")


def biases_of(bias: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """None, a tensor, or up to two of them."""
    if bias is None:
        return None, None
    given = tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
    if len(given) > 2 or not all(isinstance(one, torch.Tensor) for one in given):
        kinds = ", ".join(type(one).__name__ for one in given)
        refuse(f"bias is of type {kinds}, allowed: None, a tensor, or two of them")
    first, second, *_ = (*given, None, None)
    return first, second
