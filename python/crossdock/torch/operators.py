# SPDX-License-Identifier: Apache-2.0
"""The operators crossdock::dispatch and crossdock::combine, with fake kernels and gradients.

An operator's arguments are tensors and numbers, so an Exchange is named by a key, and what a dispatch left in it by its
ticket: int64 tensors on the CPU, [exchange] and [exchange, dispatch]. A program that torch.compile makes depends on
their form alone, so layers with an exchange each share it, and sees which operators depend on each other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from crossdock.errors import InvalidArgument, InvalidUsage

if TYPE_CHECKING:
    from crossdock.torch.exchange import Exchange

_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(exchange: Exchange) -> int:
    """A number for the exchange, which does not keep it alive."""
    number = next(_numbers)
    _exchanges[number] = exchange
    return number


def forget(number: int) -> None:
    _exchanges.pop(number, None)


def tensor_of(*numbers: int) -> Tensor:
    """A key or a ticket; usable in any mode of autograd, whichever it is made in."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _of(number: int) -> Exchange:
    exchange = _exchanges.get(number)
    if exchange is None:
        raise InvalidUsage("the exchange is closed, or nothing refers to it any more: keep it until backward() is done")
    return exchange


def _served(ticket: Tensor) -> tuple[Exchange, int]:
    """The exchange of a ticket, and the number of its dispatch."""
    exchange, number = ticket.tolist()
    return _of(exchange), number


def expect_dense(device_type: str, **tensors: Tensor) -> None:
    """InvalidArgument, with the argument's name, if one is no tensor, is elsewhere, or has its elements elsewhere."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{name} is of type {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
            raise InvalidArgument(f"{name} is {kind}, allowed: dense tensors")
    if all(tensor.is_meta for tensor in tensors.values()):
        return  # only shapes are wanted
    # With one meta tensor, too, torch would run the fake kernel, whose results have no values.
    for name, tensor in tensors.items():
        if tensor.device.type != device_type or tensor.device != first.device:
            expected = device_type if tensor is first else f"{first.device}, as {first_name}"
            raise InvalidArgument(f"{name} is on {tensor.device}, expected: {expected}")


def refuse_forward_mode(*tensors: Tensor) -> None:
    """InvalidUsage if a tensor has a tangent of forward-mode AD, which the results would lack."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise InvalidUsage(
            "a tensor has a tangent: forward-mode AD (torch.autograd.forward_ad, torch.func.jvp) does not go through "
            "dispatch and combine, which have gradients for backward() and torch.autograd.grad"
        )


@torch.library.custom_op("crossdock::dispatch", mutates_args=())
def dispatch(
    tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse_forward_mode(tokens, topk_weights)
    own = _of(int(exchange))
    if num_rows != own.num_rows:
        raise InvalidArgument(f"num_rows is {num_rows}, the exchange's is {own.num_rows}")
    return own.forward_dispatch(tokens, topk_idx, topk_weights)


@torch.library.custom_op("crossdock::combine", mutates_args=())
def combine(rows: Tensor, ticket: Tensor, num_tokens: int, exchange: Tensor) -> Tensor:
    refuse_forward_mode(rows)
    own, number = _served(ticket)
    if own is not _of(int(exchange)):
        raise InvalidArgument("received is of a dispatch of another exchange: pass it to the combine of that one")
    return own.forward_combine(rows, number, num_tokens)


@torch.library.custom_op("crossdock::dispatch_backward", mutates_args=())
def dispatch_backward(rows: Tensor, weights: Tensor, ticket: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    exchange, number = _served(ticket)
    return exchange.backward_dispatch(rows, weights, number, num_tokens)


@torch.library.custom_op("crossdock::combine_backward", mutates_args=())
def combine_backward(gradient: Tensor, ticket: Tensor, num_rows: int) -> Tensor:
    exchange, number = _served(ticket)
    return exchange.backward_combine(gradient, number)


@dispatch.register_fake
def _(
    tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    topk = topk_idx.shape[1]
    return (
        tokens.new_empty((num_rows, tokens.shape[1])),
        tokens.new_empty((num_rows, topk), dtype=torch.float32),
        tokens.new_empty((num_rows, topk), dtype=torch.int64),
        exchange.new_empty(2),
    )


@combine.register_fake
def _(rows: Tensor, ticket: Tensor, num_tokens: int, exchange: Tensor) -> Tensor:
    return rows.new_empty((num_tokens, rows.shape[1]))


@dispatch_backward.register_fake
def _(rows: Tensor, weights: Tensor, ticket: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty((num_tokens, rows.shape[1])), weights.new_empty((num_tokens, weights.shape[1]))


@combine_backward.register_fake
def _(gradient: Tensor, ticket: Tensor, num_rows: int) -> Tensor:
    return gradient.new_empty((num_rows, gradient.shape[1]))


def _keep_of_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, experts, ticket = output
    ctx.num_tokens = inputs[0].shape[0]
    ctx.mark_non_differentiable(experts, ticket)
    ctx.save_for_backward(experts, ticket)


def _backward_of_dispatch(ctx: Any, rows: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, None, Tensor, None, None]:
    experts, ticket = ctx.saved_tensors
    # A weight counts in the row of its expert alone; in low latency all weights of a token are in all of its rows.
    weights = weights.masked_fill(experts < 0, 0)
    tokens, weight_gradients = torch.ops.crossdock.dispatch_backward(rows, weights, ticket, ctx.num_tokens)
    return tokens, None, weight_gradients, None, None


def _keep_of_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ticket, _, _ = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(ticket)


def _backward_of_combine(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (ticket,) = ctx.saved_tensors
    return torch.ops.crossdock.combine_backward(gradient, ticket, ctx.num_rows), None, None, None


class _Receive(torch.autograd.Function):
    """The receive half of a dispatch whose send half is done; finish() gives what crossdock::dispatch returns."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tokens: Tensor, weights: Tensor, finish: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        received = finish()
        _keep_of_dispatch(ctx, (tokens,), received)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        tokens, _, weight_gradients, _, _ = _backward_of_dispatch(ctx, *gradients)
        return tokens, weight_gradients, None


def receive(
    tokens: Tensor, weights: Tensor, finish: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """finish(), with gradients for the tokens and weights that were sent."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _Receive.apply(tokens, weights, finish)
    return result


dispatch.register_autograd(_backward_of_dispatch, setup_context=_keep_of_dispatch)
combine.register_autograd(_backward_of_combine, setup_context=_keep_of_combine)
