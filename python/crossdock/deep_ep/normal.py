# SPDX-License-Identifier: Apache-2.0
"""The normal mode of Buffer: dispatch of any number of tokens, fresh or along an earlier handle, and combine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from crossdock._core import Forms, unpack_routing
from crossdock.copies import Uncopied
from crossdock.deep_ep import tags
from crossdock.deep_ep.agreement import WITH_TOPK_IDX, WITH_WORST_TOKENS, WITHOUT_TOPK_IDX, Agreement
from crossdock.deep_ep.errors import require, require_state
from crossdock.deep_ep.packed_routing import PackedRouting, num_words
from crossdock.deep_ep.layout import check_elements, check_memory, describe
from crossdock.deep_ep.lazy import Computed, LazyTuple
from crossdock.deep_ep.makers import maker_of, makers_of
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.row_exchange import Route, RowExchange

SCALE_TYPES = (torch.float32, torch.int32)
SUM_TYPES = (torch.bfloat16, torch.float16, torch.float32)


_TOKENS = Forms()  # of x that have been found right


def _check_tokens(values: Any, scales: Any) -> None:
    require(
        isinstance(values, torch.Tensor) and values.dim() == 2 and values.is_contiguous(),
        lambda: f"x is {describe(values)}, expected a contiguous [tokens, hidden]",
    )
    require(
        values.element_size() <= 4 and values.shape[1] >= 1,
        lambda: f"x is {describe(values)}, allowed: elements of 1, 2 or 4 bytes, at least one in a row",
    )
    check_memory("x", values, None)
    if scales is not None:
        shapes = isinstance(scales, torch.Tensor) and scales.dim() == 2 and scales.shape[1] >= 1
        require(
            shapes and scales.element_size() == 4 and scales.shape[0] == values.shape[0],
            lambda: (
                f"the scales of x are {describe(scales)}, expected [{values.shape[0]}, scales per token] of 4-byte "
                "elements"
            ),
        )
        require(scales.device == values.device, lambda: f"the scales of x are on {scales.device}, x on {values.device}")
        check_elements("the tensor of scales", scales)


class Tokens(NamedTuple):
    """x of a dispatch: values [T, H], and scales [T, S] where x was a tuple."""

    values: torch.Tensor
    scales: torch.Tensor | None

    @staticmethod
    def of(x: Any) -> Tokens:
        values, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
        if _TOKENS.find(values, scales) is None:
            _check_tokens(values, scales)
            _TOKENS.keep(True, values, scales)
        return Tokens(values, scales)

    @property
    def num_scales(self) -> int:
        return 0 if self.scales is None else self.scales.shape[1]


class DispatchHandle(Uncopied, LazyTuple):
    """What a fresh dispatch returns as its handle: a tuple of 6, or of 10 on several nodes.

    Items: one node: 0 [R, R] int32, column r has the rows of rank r from sources 0 .. s; 3 [N] int32, tokens of the
    sources; 4 [T, R] bool. Several nodes: 0 [T, R] bool; -4 [R] int32, rows of this rank from sources 0 .. s.
    """

    _remedy = "dispatch again, which returns another one"

    route: Route
    agreed: Agreement | None  # None: the device alone knows the counts
    numbers: torch.Tensor  # item 3
    column: int | slice  # of the sums over sources
    device: torch.device
    _prefix: torch.Tensor | None = None

    def __copy__(self) -> DispatchHandle:
        return self

    def prefix(self) -> torch.Tensor | None:
        if self._prefix is None and self.agreed is not None:
            sums = np.cumsum(self.agreed.rank_counts(), axis=0, dtype=np.int32)[:, self.column]
            self._prefix = torch.tensor(sums, dtype=torch.int32, device=self.device)
        return self._prefix


_PREFIX = Computed(lambda handle: handle.prefix())


def route_of(handle: Any, owner: RowExchange) -> Route:
    """The route that a handle of this buffer, or a plain tuple with its items, stands for."""
    route = getattr(handle, "route", None)
    if not isinstance(route, Route):
        items = handle if type(handle) is tuple else ()
        route = next((item for item in items if isinstance(item, Route)), None)
        kind = type(handle).__name__
        require(route is not None, lambda: f"handle is of type {kind}, expected one that a fresh dispatch returned")
        assert route is not None
    require_state(route.owner is owner, "handle is of another buffer: pass it to the buffer whose dispatch returned it")
    return route


class Normal:
    """Of one Buffer."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.exchange = RowExchange(ranks)

    def dispatch(
        self,
        tokens: Tokens,
        num_tokens_per_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        alignment: int,
        num_worst_tokens: int,
        has_nodes: bool,
        types: tuple[int, int],
        sms: int,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int], DispatchHandle]:
        """A fresh one; arguments are checked. types: number_of_type of x and of its scales."""
        x, scales = tokens
        ranks, device, is_cpu = self.ranks, x.device, x.is_cpu
        num_experts, topk = num_tokens_per_expert.shape[0], topk_idx.shape[1] if topk_idx is not None else 0
        num_scales, row_bytes = tokens.num_scales, x.shape[1] * x.element_size()
        kind = WITH_WORST_TOKENS if num_worst_tokens > 0 else WITHOUT_TOPK_IDX if topk_idx is None else WITH_TOPK_IDX
        counts, worst = None, num_worst_tokens
        if worst == 0 or is_cpu:  # else the host would wait for the GPU, so num_worst_tokens is the same on all ranks
            counts, worst = (num_tokens_per_rank, num_tokens_per_expert), 0
        same = kind, num_experts, topk, row_bytes, types[0], num_scales, types[1], int(not is_cpu), 0, worst
        agreed = Agreement(ranks, same, x.shape[0], num_worst_tokens, counts)
        if num_worst_tokens > 0 and is_cpu:
            agreed.expect_room()
        if agreed.most_tokens > worst > 0:
            most = agreed.most_tokens
            require(False, f"num_worst_tokens is {worst}, allowed on GPUs: at least the {most} tokens of a rank")
        expected = agreed.rows_here() if counts is not None else None
        local = num_experts // ranks.size
        routing = PackedRouting.of(x, topk_idx, topk_weights, scales, 0, local, is_token_in_rank)
        words = num_words(topk, num_scales)
        route = self.exchange.route(
            routing.targets, agreed.most_tokens, row_bytes, words, agreed.most_rows, expected, sms
        )
        if num_worst_tokens > 0:
            route.num_rows = num_worst_tokens

        received, came = self.exchange.send(route, x, routing.words)
        num_rows, make = route.num_rows, makers_of(device)
        numbers, ids, weights, own_scales = make.int32(num_rows), None, None, None
        if topk_idx is not None:
            ids, weights = maker_of(topk_idx.dtype, device)(num_rows, topk), make.float32(num_rows, topk)
        if scales is not None:
            own_scales = maker_of(scales.dtype, device)(num_rows, num_scales)
        # Local ids or -1, and weights, 0 where there is no local id; -1 in rows that are not there.
        unpack_routing(
            came,
            num_rows,
            route.received,
            topk,
            topk > 0,
            ranks.rank * local,
            local,
            ids,
            None,
            weights,
            True,
            numbers,
            own_scales,
        )
        expert_counts = agreed.expert_counts_here(alignment) if num_worst_tokens == 0 else []
        handle = _handle_of(route, agreed if counts is not None else None, numbers, is_token_in_rank, has_nodes)
        return received if own_scales is None else (received, own_scales), ids, weights, expert_counts, handle

    def dispatch_again(self, x: Any, handle: Any, sms: int) -> Any:
        """Along the route of a handle: rows at the same places."""
        plain = self.exchange.send_plain(route_of(handle, self.exchange), x, sms)
        if plain is not None:
            return plain
        tokens = Tokens.of(x)
        route = self._expect_tokens(handle, tokens.values.shape[0], "x")
        check_memory("x", tokens.values, route.total.device)
        self.exchange.limit(route.lease, sms)
        received, [scales, _] = self.exchange.send_again(route, *tokens)
        return received if scales is None else (received, scales)

    def _expect_tokens(self, handle: Any, num_tokens: int, name: str) -> Route:
        route = route_of(handle, self.exchange)
        require(
            num_tokens == route.num_tokens,
            lambda: (
                f"{name} has {num_tokens} rows, expected those of the dispatch that made the handle: {route.num_tokens}"
            ),
        )
        return route

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None, biases: list[torch.Tensor], sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        route = route_of(handle, self.exchange)
        if topk_weights is None and not biases:
            plain = self.exchange.add_up_plain(route, x, sms)
            if plain is not None:
                return plain, None
        check_rows(x, route, "x", SUM_TYPES)
        for bias in biases:
            check_bias(bias, route.num_tokens, x)
        if topk_weights is not None:
            check_rows(topk_weights, route, "topk_weights", (torch.float32,))
        self.exchange.limit(route.lease, sms)
        if topk_weights is None:
            return add_up_with(self.exchange, route, x, biases, 0), None
        sums = add_up_with(self.exchange, route, x, biases, tags.WEIGHTS)
        return sums, self.exchange.add_up(route, topk_weights, tags.WEIGHTS)

    def close(self) -> None:
        self.exchange.close()


def _handle_of(
    route: Route, agreed: Agreement | None, tokens: torch.Tensor, is_token_in_rank: torch.Tensor, has_nodes: bool
) -> DispatchHandle:
    items: tuple[Any, ...] = (_PREFIX, route, None, tokens, is_token_in_rank, None)
    if has_nodes:
        items = (is_token_in_rank, route, None, tokens, None, None, _PREFIX, None, None, None)
    handle = DispatchHandle(items)
    handle.route, handle.agreed, handle.numbers = route, agreed, tokens
    handle.device = tokens.device  # type: ignore[misc]
    handle.column = route.owner.ranks.rank if has_nodes else slice(None)
    return handle


def biases_of(bias: Any) -> list[torch.Tensor]:
    """None, a tensor, or up to two of them."""
    several = list(bias) if isinstance(bias, (tuple, list)) else [bias]
    biases = [] if bias is None else several
    tensors = all(isinstance(one, torch.Tensor) for one in biases)
    require(
        tensors and len(biases) <= 2,
        lambda: f"bias is of type {type(bias).__name__}, allowed: None, a tensor, or two of them",
    )
    return biases


def check_bias(bias: torch.Tensor, num_tokens: int, x: torch.Tensor) -> None:
    require(
        tuple(bias.shape) == (num_tokens, x.shape[1]) and bias.dtype == x.dtype,
        lambda: f"bias is {describe(bias)}, expected {[num_tokens, x.shape[1]]} of {x.dtype}",
    )
    check_memory("bias", bias, x.device)


def check_rows(tensor: Any, route: Route, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    fits = isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[0] == route.num_rows
    if not (fits and tensor.dtype in dtypes and tensor.shape[1] >= 1 and tensor.is_contiguous()):
        kinds = " or ".join(map(str, dtypes))
        rows = f"[{route.num_rows}, ..], the rows that dispatch returned, of {kinds}"
        require(False, f"{name} is {describe(tensor)}, expected a contiguous {rows}")
    check_memory(name, tensor, route.total.device)


def add_up_with(
    exchange: RowExchange, route: Route, x: torch.Tensor, biases: list[torch.Tensor], tag: int
) -> torch.Tensor:
    """Sums over ranks, and biases, rounded once: with biases rows travel in fp32."""
    if not biases:
        return exchange.add_up(route, x, tag)
    sums = exchange.add_up(route, x.float(), tag | tags.BIAS)
    added = biases[0].float() if len(biases) == 1 else biases[0].float() + biases[1].float()
    return (added + sums).to(x.dtype)
