# SPDX-License-Identifier: Apache-2.0
"""What ElasticBuffer does: rows by rank or by expert, exact or worst-case shapes, on the exchange of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from crossdock.deep_ep import layout
from crossdock.deep_ep.agreement import Agreement
from crossdock.deep_ep.config import align
from crossdock.deep_ep.errors import require, require_state
from crossdock.deep_ep.expand import Expansion, align_counts
from crossdock.deep_ep.layout import MOST_COMPARISONS, describe
from crossdock.deep_ep.normal import Tokens, add_up_with
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.row_exchange import MOST_COLUMNS, Route, RowExchange


@dataclass
class EPHandle:
    """What a dispatch of ElasticBuffer leaves for combines and repeated dispatches; plain values and tensors."""

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
    dst_buffer_slot_idx: torch.Tensor | None = None
    token_metadata_at_forward: torch.Tensor | None = None
    channel_linked_list: torch.Tensor | None = None
    _state: Any = field(default=None, repr=False)


@dataclass(slots=True)
class State:
    """What the library itself goes by, whatever happens to the handle's tensors."""

    route: Route
    local_ids: torch.Tensor  # [N, K], -1 where the expert is elsewhere
    expansion: Expansion | None
    num_scales: int


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
    """Of one ElasticBuffer."""

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
        """A fresh one. is_exact: as many rows as come; else as many as could."""
        x, ranks, topk = call.tokens.values, self.ranks, topk_idx.shape[1]
        num_scales = call.tokens.scales.shape[1] if call.tokens.scales is not None else 0
        row_bytes, num_words = x.shape[1] * x.element_size(), 1 + 3 * topk + num_scales
        local = num_experts // ranks.size
        aligned: list[int] = []
        is_in_rank = None
        if is_exact:
            per_rank, _, per_expert, is_in_rank = layout.counts_of(topk_idx, num_experts, ranks.size)
            same = (2, num_experts, topk, row_bytes, num_scales, int(x.device.type == "cuda"))
            agreed = Agreement(ranks, same, x.shape[0], max_tokens, torch.cat([per_rank, per_expert]))
            max_tokens, most_tokens = max(agreed.most_rows, agreed.most_tokens), agreed.most_tokens
            budget, expected = 0, agreed.rows_here()
            aligned = agreed.expert_counts_here(alignment)
        else:
            budget, expected, most_tokens = ranks.size * max_tokens, None, max_tokens
        if topk <= min(ranks.size, MOST_COLUMNS):
            routing = layout.routing_of_ids(topk_idx, num_experts, ranks.size)
        else:
            if is_in_rank is None:
                is_in_rank = layout.counts_of(topk_idx, num_experts, ranks.size).is_in_rank
            routing = layout.routing_of_mask(is_in_rank, MOST_COLUMNS)
        route = self.exchange.route(routing, most_tokens, row_bytes, num_words, budget, expected)

        first = ranks.rank * max_tokens
        numbers = torch.arange(first, first + x.shape[0], dtype=torch.int32, device=x.device)
        beside = {"ids": topk_idx.long(), "number": numbers.unsqueeze(1)}
        values, came = self._send(route, call, beside)
        ids, is_here = self.exchange.local_ids(route, came["ids"], local)
        local_ids = torch.where(is_here, ids, -1)
        counts = _count(local_ids, local)
        zones = align_counts(counts, alignment)
        ends = zones.cumsum(0)
        expansion, num_expanded = None, 0
        if call.do_expand:
            most = budget * min(topk, local) + (alignment - 1) * local
            num_expanded = sum(aligned) if is_exact else align(most, alignment)
            expansion = Expansion.of(local_ids, counts, alignment, num_expanded)
        state = State(route, local_ids, expansion, num_scales)
        handle = EPHandle(
            do_expand=call.do_expand,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=max_tokens,
            num_sms=num_sms,
            topk_idx=kept_topk_idx,
            num_recv_tokens_per_expert_list=aligned,
            psum_num_recv_tokens_per_scaleup_rank=self._rows_up_to_each_rank(route, came["number"], max_tokens),
            psum_num_recv_tokens_per_expert=(ends - zones + counts if call.do_expand else ends).int(),
            num_unaligned_recv_tokens_per_expert=counts,
            recv_src_metadata=_metadata(came["number"], expansion, topk),
            num_recv_tokens=route.num_rows,
            num_expanded_tokens=num_expanded,
            _state=state,
        )
        return self._outputs(call, handle, state, values, came, counts, topk_idx.dtype)

    def _rows_up_to_each_rank(self, route: Route, numbers: torch.Tensor, max_tokens: int) -> torch.Tensor:
        """[R] int32: rows from sources 0 .. r, which lie in the order of their numbers [N, 1]."""
        size = self.ranks.size
        ordered = numbers.flatten().contiguous()
        exists = self.exchange.is_received(route, numbers)
        if exists is not None:
            ordered = torch.where(exists, ordered, size * max_tokens)
        step = max(1, max_tokens)
        ends = torch.arange(step, (size + 1) * step, step, dtype=torch.int32, device=numbers.device)
        return torch.searchsorted(ordered, ends, out_int32=True)

    def dispatch_again(
        self, call: Call, handle: EPHandle
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        state = state_of(handle, self.exchange)
        num_tokens, expected = call.tokens.values.shape[0], state.route.num_tokens
        if num_tokens != expected:
            sentence = f"x has {num_tokens} rows, expected those of the dispatch that made the handle: {expected}"
            require(False, sentence)
        values, came = self._send(state.route, call, {})
        counts = handle.num_unaligned_recv_tokens_per_expert
        return self._outputs(call, handle, state, values, came, counts, handle.topk_idx.dtype)

    def _send(
        self, route: Route, call: Call, beside: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if call.topk_weights is not None:
            beside["weights"] = call.topk_weights
        if call.tokens.scales is not None:
            beside["scales"] = call.tokens.scales
        return self.exchange.send(route, call.tokens.values, beside)

    def _outputs(
        self,
        call: Call,
        handle: EPHandle,
        state: State,
        values: torch.Tensor,
        came: dict[str, torch.Tensor],
        counts: torch.Tensor,
        id_type: torch.dtype,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        if call.statistics is not None:
            call.statistics.add_(counts.to(call.statistics.dtype))
        scales, weights = came.get("scales"), came.get("weights")
        weights = None if weights is None else weights.contiguous()
        ids: torch.Tensor | None = None
        if state.expansion is not None:
            values = state.expansion.spread(values, call.do_zero_padding)
            scales = state.expansion.spread(scales, call.do_zero_padding) if scales is not None else None
            weights = state.expansion.spread_columns(weights, call.do_zero_padding) if weights is not None else None
        else:
            ids = state.local_ids  # callers overwrite theirs
            ids = ids.clone() if ids.dtype == id_type else ids.to(id_type)
        scales = None if scales is None else _column_major(scales) if call.column_major_scales else scales.contiguous()
        received = values if scales is None else (values, scales)
        return received, ids, weights, handle

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        biases: list[torch.Tensor],
        rounds_between: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """rounds_between: sums over a rank's experts may be rounded before they travel."""
        state = state_of(handle, self.exchange)
        route, expansion = state.route, state.expansion
        num_rows = handle.num_expanded_tokens if expansion is not None else route.num_rows
        fits = isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] == num_rows and x.shape[1] >= 1
        require(
            fits and x.dtype == torch.bfloat16 and x.is_contiguous(),
            lambda: (
                f"x is {describe(x)}, expected a contiguous [{num_rows}, ..] of torch.bfloat16, the rows of dispatch"
            ),
        )
        for bias in biases:
            require(
                tuple(bias.shape) == (route.num_tokens, x.shape[1]) and bias.dtype == x.dtype,
                lambda: f"bias is {describe(bias)}, expected {[route.num_tokens, x.shape[1]]} of {x.dtype}",
            )
        weights = self._weights_home(state, topk_weights, num_rows) if topk_weights is not None else None
        rows = x
        if expansion is not None:
            rows = expansion.add_up(x)
            if rounds_between:
                rows = rows.to(torch.bfloat16)
        if rows.dtype != torch.bfloat16 and not biases:
            return self.exchange.add_up(route, rows).to(torch.bfloat16), weights
        return add_up_with(self.exchange, route, rows, biases).to(torch.bfloat16), weights

    def _weights_home(self, state: State, topk_weights: torch.Tensor, num_rows: int) -> torch.Tensor:
        topk = state.local_ids.shape[1]
        shape = (num_rows, topk) if state.expansion is None else (num_rows,)
        require(
            tuple(topk_weights.shape) == shape and topk_weights.dtype == torch.float32,
            lambda: f"topk_weights is {describe(topk_weights)}, expected {list(shape)} of torch.float32",
        )
        if state.expansion is not None:
            return self.exchange.add_up(state.route, state.expansion.gather_columns(topk_weights))
        return self.exchange.add_up(state.route, torch.where(state.local_ids >= 0, topk_weights, 0.0))


def _count(ids: torch.Tensor, num: int) -> torch.Tensor:
    """[num] int32, how often each of 0 .. num - 1 occurs in ids, which may also be -1."""
    if ids.numel() * num <= MOST_COMPARISONS:
        numbers = torch.arange(num, dtype=ids.dtype, device=ids.device)
        return (ids.view(-1, 1) == numbers).sum(dim=0, dtype=torch.int32)
    counts = torch.zeros(num + 1, dtype=torch.int32, device=ids.device)
    flat = torch.where(ids >= 0, ids, num).flatten().long()
    counts.scatter_add_(0, flat, torch.ones(1, dtype=torch.int32, device=ids.device).expand(len(flat)))
    return counts[:num].contiguous()


def _metadata(numbers: torch.Tensor, expansion: Expansion | None, topk: int) -> torch.Tensor:
    """[N, K + 2]: the token's number among all, one column for nobody, the expanded rows of its columns."""
    rows = numbers.new_full((numbers.shape[0], topk), -1) if expansion is None else expansion.places
    return torch.cat([numbers, torch.zeros_like(numbers), rows], dim=1)


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same with strides (1, rows rounded up to 4)."""
    num_rows, columns = scales.shape
    stored = scales.new_empty(columns, align(num_rows, 4))
    stored[:, :num_rows] = scales.t()
    return stored[:, :num_rows].t()
