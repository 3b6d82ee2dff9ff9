# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer's dispatch and combine: rows by rank or by expert, exact or worst-case shapes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from crossdock._core import CopyMaker, unpack_routing
from crossdock.copies import Uncopied
from crossdock.deep_ep import layout, tags
from crossdock.deep_ep.agreement import WITH_SYNC, WITHOUT_SYNC, Agreement, number_of_type
from crossdock.deep_ep.config import align
from crossdock.deep_ep.errors import require, require_state
from crossdock.deep_ep.expand import Expansion
from crossdock.deep_ep.packed_routing import MOST_TARGETS, PackedRouting, num_words
from crossdock.deep_ep.layout import INT32_MAX, check_memory, check_tensor, describe
from crossdock.deep_ep.makers import maker_of, makers_of
from crossdock.deep_ep.normal import Tokens, add_up_with, check_bias
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.row_exchange import Route, RowExchange
from crossdock.deep_ep.scales import empty_scales
from crossdock.errors import RemoteError


@dataclass
class EPHandle(Uncopied):
    """The handle of a dispatch, for combines and cached dispatches; plain values and tensors."""

    _remedy = "dispatch again, which returns another one"

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    token_metadata_at_forward: torch.Tensor | None = None
    channel_linked_list: torch.Tensor | None = None
    _state: Any = field(default=None, repr=False)

    def __copy__(self) -> EPHandle:
        return replace(self)

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """Opaque: the routing, which decides the slots."""
        return self.topk_idx

    def read_again(self) -> list[torch.Tensor]:
        """Tensors that combines and cached dispatches read."""
        state: State = self._state
        expansion = state.expansion
        placed = [] if expansion is None else [expansion.places, expansion.sources]
        return [state.local_ids, self.num_unaligned_recv_tokens_per_expert, *placed]

    def tensors(self) -> list[torch.Tensor]:
        return [
            *self.read_again(),
            self.topk_idx,
            self.psum_num_recv_tokens_per_scaleup_rank,
            self.psum_num_recv_tokens_per_expert,
            self.recv_src_metadata,
        ]


@dataclass(slots=True)
class State:
    """The library's own state, independent of the handle's tensors."""

    route: Route
    local_ids: torch.Tensor  # [N, K], -1 for experts of other ranks; int32 with an expansion
    expansion: Expansion | None
    copy_of_local_ids: CopyMaker  # callers overwrite theirs


def state_of(handle: Any, owner: RowExchange) -> State:
    state = getattr(handle, "_state", None)
    if not (isinstance(handle, EPHandle) and isinstance(state, State)):
        kind = type(handle).__name__
        require(False, f"handle is of type {kind}, expected one that a dispatch returned")
    assert isinstance(state, State)
    require_state(state.route.owner is owner, "handle is of another buffer: pass it to the buffer that dispatched")
    return state


@dataclass(slots=True)
class Call:
    """Arguments of a dispatch, checked."""

    tokens: Tokens
    topk_weights: torch.Tensor | None
    statistics: torch.Tensor | None
    do_expand: bool
    do_zero_padding: bool
    column_major_scales: bool


class Elastic:
    """The operations of one ElasticBuffer."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.exchange = RowExchange(ranks)

    def dispatch(
        self,
        call: Call,
        topk_idx: torch.Tensor,
        kept_topk_idx: torch.Tensor,
        num_experts: int,
        max_tokens: int,
        alignment: int,
        num_sms: int,
        is_exact: bool,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        """A fresh dispatch. is_exact: as many output rows as arrive; otherwise as many as could."""
        x, scales = call.tokens
        ranks, topk, num_scales, weights = self.ranks, topk_idx.shape[1], call.tokens.num_scales, call.topk_weights
        row_bytes, local = x.shape[1] * x.element_size(), num_experts // ranks.size
        aligned: list[int] = []
        is_in_rank, tag = None, 0
        if is_exact:
            counted = layout.counts_of(topk_idx, num_experts, ranks.size)
            is_in_rank = counted.is_in_rank
            same = self._same(WITH_SYNC, call, num_experts, topk, 0)
            agreed = Agreement(ranks, same, x.shape[0], max_tokens, (counted.per_rank, counted.per_expert))
            max_tokens, most_tokens = max(agreed.most_rows, agreed.most_tokens), agreed.most_tokens
            budget, expected = 0, agreed.rows_here()
            aligned = agreed.expert_counts_here(alignment)
        else:
            tag = self._agree_once(x.is_cpu, self._same(WITHOUT_SYNC, call, num_experts, topk, max_tokens))
            budget, expected, most_tokens = ranks.size * max_tokens, None, max_tokens
        if topk <= min(ranks.size, MOST_TARGETS):
            is_in_rank = None
        elif is_in_rank is None:
            is_in_rank = layout.counts_of(topk_idx, num_experts, ranks.size).is_in_rank

        make, num_expanded = makers_of(x.device), 0
        if call.do_expand:
            # What all ranks know, so that all refuse.
            most = ranks.size * most_tokens * min(topk, local) + (alignment - 1) * local
            require(
                most <= INT32_MAX,
                lambda: (
                    f"expert_alignment is {alignment}: {most} rows by expert could come, allowed: at most {INT32_MAX}"
                ),
            )
            num_expanded = sum(aligned) if is_exact else align(most, alignment)
        counting, first = make.int32(local + 1), ranks.rank * max_tokens
        routing = PackedRouting.of(x, topk_idx, weights, scales, first, local, is_in_rank, counting)
        words = num_words(topk, num_scales)
        route = self.exchange.route(routing.targets, most_tokens, row_bytes, words, budget, expected, num_sms, tag)
        values, came = self.exchange.send(route, x, routing.words)

        num_rows = route.num_rows
        make_ids = make.int32 if call.do_expand else maker_of(topk_idx.dtype, x.device)
        local_ids, ids = make_ids(num_rows, topk), None if call.do_expand else make_ids(num_rows, topk)
        sources, ends, rank_ends = make.int32(num_rows, topk + 2), make.int32(local), make.int32(ranks.size)
        came_weights = None if weights is None else make.float32(num_rows, topk)
        came_scales = None if scales is None else maker_of(scales.dtype, x.device)(num_rows, num_scales)
        unpack_routing(
            came,
            num_rows,
            route.received,
            topk,
            weights is not None,
            ranks.rank * local,
            local,
            local_ids,
            ids,
            came_weights,
            False,
            None,
            came_scales,
            sources,
            counting,
            ends,
            call.do_expand,
            alignment,
            rank_ends,
            max(1, max_tokens),
        )
        counts = counting[:local]
        if call.do_expand and x.is_cpu:
            there = int(ends[-1])
            require(
                there <= num_expanded,
                lambda: (
                    f"topk_idx repeats experts in rows: {there} rows by expert come, allowed without CPU sync: "
                    f"{num_expanded}"
                ),
            )
        expansion = None
        if call.do_expand:
            expansion = Expansion.of(local_ids, counts, alignment, num_expanded, sources)
        handle = EPHandle(
            do_expand=call.do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=max_tokens,
            num_sms=num_sms,
            topk_idx=kept_topk_idx,
            num_recv_tokens_per_expert_list=aligned,
            psum_num_recv_tokens_per_scaleup_rank=rank_ends,
            psum_num_recv_tokens_per_expert=ends,
            num_unaligned_recv_tokens_per_expert=counts,
            recv_src_metadata=sources,
            num_recv_tokens=num_rows,
            num_expanded_tokens=num_expanded,
            _state=State(route, local_ids, expansion, CopyMaker(local_ids)),
        )
        return self._outputs(call, handle, values, ids, came_weights, came_scales)

    @staticmethod
    def _same(kind: int, call: Call, num_experts: int, topk: int, max_tokens: int) -> tuple[int, ...]:
        """Values of agreement.SAME."""
        (x, scales), has_weights = call.tokens, int(call.topk_weights is not None)
        row, types = x.shape[1] * x.element_size(), (number_of_type(x), number_of_type(scales))
        num_scales, is_gpu = call.tokens.num_scales, int(not x.is_cpu)
        return kind, num_experts, topk, row, types[0], num_scales, types[1], is_gpu, has_weights, max_tokens

    def _agree_once(self, is_cpu: bool, same: tuple[int, ...]) -> int:
        """Ranks compare their calls without CPU sync: on GPUs, where such calls wait for no rank, only at first.

        Returns the tag of such calls, which kernels compare; it is the same on all ranks, as they compare forms in the
        same order.
        """
        forms = self.exchange.forms
        tag = forms.get(same)
        if is_cpu or tag is None:
            try:
                Agreement(self.ranks, same, 0, 0, None)
            except RemoteError as error:
                message = f"{error}; the first call without CPU sync of a form is compared with those of all ranks"
                raise RemoteError(message) from error
        if tag is None:
            tag = forms[same] = len(forms) % tags.MOST + 1
        return tag

    def _route_by_rank(self, handle: Any) -> Route | None:
        """Of a handle without an expansion; None: take the general path."""
        state = getattr(handle, "_state", None)
        return state.route if type(state) is State and state.expansion is None else None

    def rows_again(self, x: Any, handle: EPHandle, num_sms: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rows of x along a handle by rank, and their local ids. None: x needs a conversion, take the general path."""
        route = self._route_by_rank(handle)
        rows = None if route is None else self.exchange.send_plain(route, x, num_sms or handle.num_sms)
        return None if rows is None else (rows, handle._state.copy_of_local_ids())

    def sums_again(self, x: Any, handle: EPHandle, num_sms: int) -> torch.Tensor | None:
        """The sums of rows along a handle by rank. None: x needs a conversion, take the general path."""
        route = self._route_by_rank(handle)
        if route is None or getattr(x, "dtype", None) is not torch.bfloat16:
            return None
        sums: torch.Tensor | None = self.exchange.add_up_plain(route, x, num_sms or handle.num_sms)
        return sums

    def dispatch_again(
        self, call: Call, handle: EPHandle, num_sms: int
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        state = state_of(handle, self.exchange)
        num_tokens, expected = call.tokens.values.shape[0], state.route.num_tokens
        if num_tokens != expected:
            message = f"x has {num_tokens} rows, expected those of the dispatch that made the handle: {expected}"
            require(False, message)
        x, scales = call.tokens
        self.exchange.limit(state.route.lease, num_sms or handle.num_sms)
        values, (scales, weights) = self.exchange.send_again(state.route, x, scales, call.topk_weights)
        ids = None if state.expansion is not None else state.copy_of_local_ids()
        return self._outputs(call, handle, values, ids, weights, scales)

    def _outputs(
        self,
        call: Call,
        handle: EPHandle,
        values: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        """The received rows in the form that the call asks for."""
        expansion, column_major = handle._state.expansion, call.column_major_scales
        if call.statistics is not None:
            call.statistics.add_(handle.num_unaligned_recv_tokens_per_expert)
        if expansion is not None:
            values, scales, weights = expansion.spread(values, scales, weights, call.do_zero_padding, column_major)
        elif scales is not None and column_major:
            scales = empty_scales(scales, scales.shape[0], True).copy_(scales)
        return values if scales is None else (values, scales), ids, weights, handle

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        biases: list[torch.Tensor],
        rounds_between: bool,
        num_sms: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """rounds_between: sums over a rank's experts may be rounded before they travel. num_sms 0: the handle's."""
        state = state_of(handle, self.exchange)
        route, expansion = state.route, state.expansion
        if topk_weights is None and not biases:
            plain = self.sums_again(x, handle, num_sms)
            if plain is not None:
                return plain, None
        num_rows = handle.num_expanded_tokens if expansion is not None else route.num_rows
        fits = isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] == num_rows and x.shape[1] >= 1
        require(
            fits and x.dtype == torch.bfloat16 and x.is_contiguous(),
            lambda: (
                f"x is {describe(x)}, expected a contiguous [{num_rows}, ..] of torch.bfloat16, the rows of dispatch"
            ),
        )
        check_memory("x", x, route.total.device)
        for bias in biases:
            check_bias(bias, route, x)
        if topk_weights is not None:
            check_tensor("topk_weights", topk_weights)
            check_memory("topk_weights", topk_weights, x.device)
            _check_weights(topk_weights, (num_rows, state.local_ids.shape[1]) if expansion is None else (num_rows,))
        self.exchange.limit(route.lease, num_sms or handle.num_sms)
        rows, weights, tag = x, None, 0 if topk_weights is None else tags.WEIGHTS
        if expansion is not None:
            given = None if topk_weights is None else topk_weights.contiguous()
            rows, weights = expansion.add_up(x, given, torch.bfloat16 if rounds_between else torch.float32)
        elif topk_weights is not None:
            weights = torch.where(state.local_ids >= 0, topk_weights, 0.0)
        if weights is not None:
            weights = self.exchange.add_up(route, weights, tag)
        if rows.dtype != torch.bfloat16 and not biases:
            return self.exchange.add_up(route, rows, tag).to(torch.bfloat16), weights
        return add_up_with(self.exchange, route, rows, biases, tag).to(torch.bfloat16), weights


def _check_weights(topk_weights: torch.Tensor, shape: tuple[int, ...]) -> None:
    require(
        tuple(topk_weights.shape) == shape and topk_weights.dtype == torch.float32,
        lambda: f"topk_weights is {describe(topk_weights)}, expected {list(shape)} of torch.float32",
    )
