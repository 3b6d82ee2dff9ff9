# SPDX-License-Identifier: Apache-2.0
"""The operators crossdock::dispatch and crossdock::combine, with fake kernels and gradients.

An operator's arguments are tensors and numbers, so an Exchange is named by a key, and what a dispatch left in it by the
number in its ticket, a CPU tensor: torch.compile sees operators that depend on each other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossdock.errors import InvalidUsage

if TYPE_CHECKING:
    from crossdock.torch.exchange import Exchange

_exchanges: weakref.WeakValueDictionary[str, Exchange] = weakref.WeakValueDictionary()
_keys = itertools.count()


def register(exchange: Exchange) -> str:
    """A key for the exchange, which does not keep it alive. A string: compiled programs take integers for sizes."""
    key = f"exchange {next(_keys)}"
    _exchanges[key] = exchange
    return key


def forget(key: str) -> None:
    _exchanges.pop(key, None)


def _of(key: str) -> Exchange:
    exchange = _exchanges.get(key)
    if exchange is None:
        raise InvalidUsage(f"{key} is closed")
    return exchange


@torch.library.custom_op("crossdock::dispatch", mutates_args=())
def dispatch(
    tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _of(exchange).forward_dispatch(tokens, topk_idx, topk_weights)


@torch.library.custom_op("crossdock::combine", mutates_args=())
def combine(rows: Tensor, ticket: Tensor, num_tokens: int, exchange: str) -> Tensor:
    return _of(exchange).forward_combine(rows, ticket, num_tokens)


@torch.library.custom_op("crossdock::dispatch_backward", mutates_args=())
def dispatch_backward(
    rows: Tensor, weights: Tensor, ticket: Tensor, num_tokens: int, exchange: str
) -> tuple[Tensor, Tensor]:
    return _of(exchange).backward_dispatch(rows, weights, ticket, num_tokens)


@torch.library.custom_op("crossdock::combine_backward", mutates_args=())
def combine_backward(gradient: Tensor, ticket: Tensor, exchange: str) -> Tensor:
    return _of(exchange).backward_combine(gradient, ticket)


@dispatch.register_fake
def _(tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, topk = _of(exchange).num_rows, topk_idx.shape[1]
    return (
        tokens.new_empty((num_rows, tokens.shape[1])),
        tokens.new_empty((num_rows, topk), dtype=torch.float32),
        tokens.new_empty((num_rows, topk), dtype=torch.int64),
        torch.empty(1, dtype=torch.int64),
    )


@combine.register_fake
def _(rows: Tensor, ticket: Tensor, num_tokens: int, exchange: str) -> Tensor:
    return rows.new_empty((num_tokens, rows.shape[1]))


@dispatch_backward.register_fake
def _(rows: Tensor, weights: Tensor, ticket: Tensor, num_tokens: int, exchange: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty((num_tokens, rows.shape[1])), weights.new_empty((num_tokens, weights.shape[1]))


@combine_backward.register_fake
def _(gradient: Tensor, ticket: Tensor, exchange: str) -> Tensor:
    return gradient.new_empty((_of(exchange).num_rows, gradient.shape[1]))


def _keep_of_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tokens, _, _, ctx.exchange = inputs
    _, _, experts, ticket = output
    ctx.num_tokens = tokens.shape[0]
    ctx.mark_non_differentiable(experts, ticket)
    ctx.save_for_backward(experts, ticket)


def _backward_of_dispatch(ctx: Any, rows: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, None, Tensor, None]:
    experts, ticket = ctx.saved_tensors
    # A weight counts in the row of its expert alone; in low latency all weights of a token are in all of its rows.
    weights = weights.masked_fill(experts < 0, 0)
    dispatch_backward = torch.ops.crossdock.dispatch_backward
    tokens, weight_gradients = dispatch_backward(rows, weights, ticket, ctx.num_tokens, ctx.exchange)
    return tokens, None, weight_gradients, None


def _keep_of_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ticket, _, ctx.exchange = inputs
    ctx.save_for_backward(ticket)


def _backward_of_combine(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (ticket,) = ctx.saved_tensors
    return torch.ops.crossdock.combine_backward(gradient, ticket, ctx.exchange), None, None, None


class _Receive(torch.autograd.Function):
    """The receive half of a dispatch whose send half is done; finish() gives what crossdock::dispatch returns."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tokens: Tensor, weights: Tensor, finish: Callable[[], tuple[Tensor, ...]], exchange: str
    ) -> tuple[Tensor, ...]:
        received = finish()
        _keep_of_dispatch(ctx, (tokens, None, None, exchange), received)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None]:
        tokens, _, weight_gradients, _ = _backward_of_dispatch(ctx, *gradients)
        return tokens, weight_gradients, None, None


def receive(
    tokens: Tensor, weights: Tensor, finish: Callable[[], tuple[Tensor, ...]], exchange: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """finish(), with gradients for the tokens and weights that were sent."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _Receive.apply(tokens, weights, finish, exchange)
    return result


dispatch.register_autograd(_backward_of_dispatch, setup_context=_keep_of_dispatch)
combine.register_autograd(_backward_of_combine, setup_context=_keep_of_combine)
