# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer's dispatch and combine: rows by rank or by expert, exact or worst-case shapes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from crossdock._core import ElasticLease
from crossdock.copies import Uncopied
from crossdock.deep_ep import layout, tags
from crossdock.deep_ep.agreement import WITH_SYNC, WITHOUT_SYNC, Agreement, number_of_type
from crossdock.deep_ep.config import align
from crossdock.deep_ep.elastic_groups import ElasticGroups, Kind
from crossdock.deep_ep.errors import require, require_state
from crossdock.deep_ep.layout import INT32_MAX, check_memory, check_tensor, describe
from crossdock.deep_ep.normal import Tokens, check_bias
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.rows import CARRIED_TYPES, UNIT, padded_bytes
from crossdock.errors import RemoteError

Received = tuple[Any, torch.Tensor | None, torch.Tensor | None]  # recv_x, recv_topk_idx, recv_topk_weights


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
    _lease: Any = field(default=None, repr=False)  # the library's own state, independent of the handle's tensors

    def __copy__(self) -> EPHandle:
        return replace(self)

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """Opaque: the routing, which decides the slots."""
        return self.topk_idx

    def read_again(self) -> list[torch.Tensor]:
        """Tensors that combines and cached dispatches read."""
        return [self._lease.topk_idx]

    def tensors(self) -> list[torch.Tensor]:
        return [
            *self.read_again(),
            self.topk_idx,
            self.psum_num_recv_tokens_per_scaleup_rank,
            self.psum_num_recv_tokens_per_expert,
            self.num_unaligned_recv_tokens_per_expert,
            self.recv_src_metadata,
        ]


@dataclass(slots=True)
class Call:
    """Arguments of a dispatch, checked."""

    tokens: Tokens
    topk_weights: torch.Tensor | None
    statistics: torch.Tensor | None
    do_expand: bool
    do_zero_padding: bool
    column_major_scales: bool


class Fresh(NamedTuple):
    """What follows from the form of a dispatch without CPU sync."""

    plan: Any
    do_expand: bool
    num_experts: int
    alignment: int
    max_tokens: int
    num_sms: int
    num_tokens: int  # that may come
    num_expanded: int
    tag: int

    def outputs(self, sent: tuple[Any, ...], aligned: list[int]) -> tuple[Any, ...]:
        """What dispatch returns of what the library has made."""
        rows, sf, ids, weights, lease, kept, sources, rank_ends, counts, ends = sent
        handle = EPHandle(
            self.do_expand,
            self.num_experts,
            self.alignment,
            self.max_tokens,
            self.num_sms,
            kept,
            aligned,
            rank_ends,
            ends,
            counts,
            sources,
            self.num_tokens,
            self.num_expanded,
            None,
            None,
            lease,
        )
        return rows if sf is None else (rows, sf), ids, weights, handle

    @property
    def num_rows(self) -> int:
        return self.num_expanded if self.do_expand else self.num_tokens


class Elastic:
    """The operations of one ElasticBuffer. rounds_between: its allow_multiple_reduction."""

    def __init__(self, ranks: Ranks, rounds_between: bool) -> None:
        self.ranks = ranks
        self.groups = ElasticGroups(ranks)
        self.rounds_between = rounds_between
        self._forms: set[tuple[int, ...]] = set()  # of calls without CPU sync that ranks have compared

    def close(self) -> None:
        """Collective."""
        self.groups.close()

    def lease_of(self, handle: Any) -> ElasticLease:
        lease = getattr(handle, "_lease", None)
        if not (isinstance(handle, EPHandle) and isinstance(lease, ElasticLease)):
            kind = type(handle).__name__
            require(False, f"handle is of type {kind}, expected one that a dispatch returned")
        assert isinstance(lease, ElasticLease)
        require_state(self.groups.owns(lease), "handle is of another buffer: pass it to the buffer that dispatched")
        return lease

    def dispatch(
        self,
        call: Call,
        topk_idx: torch.Tensor,
        copies_topk_idx: bool,
        num_experts: int,
        max_tokens: int,
        alignment: int,
        num_sms: int,
        is_exact: bool,
    ) -> tuple[tuple[Any, ...], Fresh | None]:
        """A fresh dispatch. is_exact: as many output rows as arrive; otherwise as many as could.

        Also returns what to keep for dispatch_known.
        """
        x, scales = call.tokens
        ranks, topk = self.ranks, topk_idx.shape[1]
        local, aligned = num_experts // ranks.size, []
        if is_exact:
            counted = layout.counts_of(topk_idx, num_experts, ranks.size, distinct=True)
            same = self._same(WITH_SYNC, call, num_experts, topk, 0)
            agreed = Agreement(ranks, same, x.shape[0], max_tokens, (counted.per_rank, counted.per_expert))
            max_tokens, most_tokens = max(agreed.most_rows, agreed.most_tokens), agreed.most_tokens
            num_tokens, aligned = agreed.rows_here(), agreed.expert_counts_here(alignment)
        else:
            self._agree_once(x.is_cpu, self._same(WITHOUT_SYNC, call, num_experts, topk, max_tokens))
            most_tokens, num_tokens = max_tokens, ranks.size * max_tokens
        num_expanded = 0
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
        kind = Kind(
            x.device,
            num_experts,
            topk,
            most_tokens,
            self._row_bytes(call),
            call.do_expand,
            0 if is_exact else num_expanded if call.do_expand else num_tokens,
            alignment,
            max_tokens,
        )
        fresh = Fresh(
            self.groups.plan(kind),
            call.do_expand,
            num_experts,
            alignment,
            max_tokens,
            num_sms,
            num_tokens,
            num_expanded,
            tags.of_dispatch(x, scales, True),
        )
        sent = self.groups.dispatch(
            fresh.plan,
            x,
            scales,
            topk_idx,
            call.topk_weights,
            call.statistics,
            fresh.num_rows,
            num_tokens,
            num_sms,
            copies_topk_idx,
            call.do_zero_padding,
            call.column_major_scales,
        )
        is_plain = x.dtype in CARRIED_TYPES and x.shape[1] * x.element_size() % UNIT == 0 and topk_idx.is_contiguous()
        has_plain_weights = call.topk_weights is None or call.topk_weights.is_contiguous()
        is_known = not is_exact and not x.is_cpu and is_plain and has_plain_weights
        return fresh.outputs(sent, aligned), fresh if is_known else None

    def dispatch_known(
        self, x: Any, topk_idx: Any, weights: Any, statistics: Any, options: tuple[bool, bool, bool], *key: Any
    ) -> tuple[Any, ...] | None:
        """A fresh dispatch without CPU sync on GPUs whose form is known; None: take the general path.

        options: do_handle_copy, do_zero_padding, use_tma_aligned_col_major_sf; key: what else forms are known by.
        """
        values, scales = x if type(x) is tuple and len(x) == 2 else (x, None)
        known: Fresh | None = self.groups.dispatches.find(values, scales, topk_idx, weights, statistics, *key)
        if known is None:
            return None
        numbers = known.num_rows, known.num_tokens, known.num_sms, known.tag
        arguments = known.plan, values, scales, topk_idx, weights, statistics, *numbers, *options
        return known.outputs(self.groups.dispatch_known(*arguments), [])

    def keep(self, fresh: Fresh, x: Any, *key: Any) -> None:
        """For dispatch_known. key: from topk_idx on, without the options."""
        values, scales = x if type(x) is tuple and len(x) == 2 else (x, None)
        self.groups.dispatches.keep(fresh, values, scales, *key)

    def _row_bytes(self, call: Call) -> int:
        """Of rows and scales that go, and of bf16 rows that return: as fp32 where a rank must not round its sums."""
        x = call.tokens.values
        there = padded_bytes(x.shape[1] * x.element_size()) + align(4 * call.tokens.num_scales, UNIT)
        return max(there, padded_bytes((4 if self._sums_fp32(call.do_expand) else 2) * x.shape[1]))

    def _sums_fp32(self, do_expand: bool) -> bool:
        return do_expand and not self.rounds_between

    @staticmethod
    def _same(kind: int, call: Call, num_experts: int, topk: int, max_tokens: int) -> tuple[int, ...]:
        """Values of agreement.SAME."""
        (x, scales), has_weights = call.tokens, int(call.topk_weights is not None)
        row, types = x.shape[1] * x.element_size(), (number_of_type(x), number_of_type(scales))
        num_scales, is_gpu = call.tokens.num_scales, int(not x.is_cpu)
        return kind, num_experts, topk, row, types[0], num_scales, types[1], is_gpu, has_weights, max_tokens

    def _agree_once(self, is_cpu: bool, same: tuple[int, ...]) -> None:
        """Ranks compare their calls without CPU sync: on GPUs, where such calls wait for no rank, only at first."""
        if not is_cpu and same in self._forms:
            return
        try:
            Agreement(self.ranks, same, 0, 0, None)
        except RemoteError as error:
            message = f"{error}; the first call without CPU sync of a form is compared with those of all ranks"
            raise RemoteError(message) from error
        self._forms.add(same)

    def dispatch_again(
        self, call: Call, handle: EPHandle, num_sms: int
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        lease = self.lease_of(handle)
        (x, scales), expected = call.tokens, lease.num_tokens
        if x.shape[0] != expected:
            message = f"x has {x.shape[0]} rows, expected those of the dispatch that made the handle: {expected}"
            require(False, message)
        rows, sf, ids, weights = self.groups.send_again(
            lease,
            x,
            scales,
            call.topk_weights,
            call.statistics,
            num_sms or handle.num_sms,
            call.do_zero_padding,
            call.column_major_scales,
        )
        return rows if sf is None else (rows, sf), ids, weights, handle

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        biases: list[torch.Tensor],
        num_sms: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """num_sms 0: the handle's."""
        lease = self.lease_of(handle)
        if topk_weights is None and not biases and not self._sums_fp32(handle.do_expand):
            sums = self.groups.add_up_known(lease, x, num_sms or handle.num_sms)
            if sums is not None:
                return sums
        num_rows = lease.num_rows
        fits = isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] == num_rows and x.shape[1] >= 1
        require(
            fits and x.dtype == torch.bfloat16 and x.is_contiguous(),
            lambda: (
                f"x is {describe(x)}, expected a contiguous [{num_rows}, ..] of torch.bfloat16, the rows of dispatch"
            ),
        )
        check_memory("x", x, lease.topk_idx.device)
        for bias in biases:
            check_bias(bias, lease.num_tokens, x)
        if topk_weights is not None:
            check_tensor("topk_weights", topk_weights)
            check_memory("topk_weights", topk_weights, x.device)
            shape = (num_rows,) if handle.do_expand else (num_rows, lease.topk_idx.shape[1])
            require(
                tuple(topk_weights.shape) == shape and topk_weights.dtype == torch.float32,
                lambda: f"topk_weights is {describe(topk_weights)}, expected {list(shape)} of torch.float32",
            )
        sms = num_sms or handle.num_sms
        if not self._sums_fp32(handle.do_expand):
            return self.groups.add_up(lease, x, topk_weights, biases, sms)
        sums, weights = self.groups.add_up(lease, x.float(), topk_weights, [bias.float() for bias in biases], sms)
        return sums.to(x.dtype), weights
