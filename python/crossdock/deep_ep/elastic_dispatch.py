# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer's dispatch and combine: rows by rank or by expert, exact or worst-case shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from crossdock._core import ElasticLease, ElasticPlan, count_routing
from crossdock.deep_ep.agreement import Agreement, call_form
from crossdock.deep_ep.checks import (
    INT32_MAX,
    check_count,
    check_routing,
    check_values,
    check_x,
    is_whole,
    refuse,
    require,
)
from crossdock.deep_ep.config import align
from crossdock.deep_ep.elastic_groups import ElasticGroups, Kind
from crossdock.deep_ep.handles import EPHandle
from crossdock.deep_ep.ranks import Ranks, Settings
from crossdock.deep_ep.rows import bytes_either_way, row_bytes_of, tag_of_dispatch
from crossdock.deep_ep.streams import CommStream
from crossdock.errors import RemoteError


class Sizes(NamedTuple):
    """What a fresh dispatch makes its outputs for."""

    plan: ElasticPlan
    max_tokens: int  # of a rank
    num_tokens: int  # that come, or could
    num_expanded: int  # rows by expert; 0: rows are by rank
    expert_counts: list[int]  # rounded up to the alignment; empty: unknown


@dataclass(slots=True)
class DispatchForm:
    """What follows from the form of a fresh dispatch's arguments."""

    do_expand: bool
    num_experts: int
    alignment: int
    max_tokens: int
    num_sms: int
    is_exact: bool  # as many output rows as arrive; else as many as could
    agreed: Settings
    row_bytes: int  # that groups must carry
    tag: int
    sizes: Sizes | None = None  # of calls that are not exact, once ranks have agreed on them


class Elastic(ElasticGroups):
    """What an ElasticBuffer holds until it is destroyed, and its operations."""

    def __init__(self, ranks: Ranks, adds_choices: bool) -> None:
        super().__init__(ranks, adds_choices)
        self.stream = CommStream()
        self._compared: set[tuple[object, ...]] = set()  # forms of calls without CPU sync

    def lease_of(self, handle: Any) -> ElasticLease:
        lease = handle._lease if isinstance(handle, EPHandle) else None
        return self.expect_own(lease, handle, "an EPHandle that a dispatch returned")

    def form_of(
        self, x: Any, scales: Any, topk_idx: Any, topk_weights: Any, statistics: Any, *numbers: Any
    ) -> DispatchForm:
        """Checks the arguments of a fresh dispatch, all but the values."""
        num_experts, most, expert_alignment, num_sms, do_expand, is_exact, usual_sms = numbers
        check_count("num_sms", num_sms, 0, most=INT32_MAX)
        check_x(x, scales)
        require(topk_idx is not None, "topk_idx is None, expected [tokens, top-k] (or a handle)")
        require(num_experts is not None, "num_experts is None, expected a number (or a handle)")
        check_routing(topk_idx, topk_weights, statistics, x, num_experts, self.ranks.size)
        alignment = 1 if expert_alignment is None else expert_alignment
        if not is_whole(alignment, 1, INT32_MAX):
            refuse(f"expert_alignment is {alignment!r}, allowed: 1..{INT32_MAX}")
        check_count("num_max_tokens_per_rank", most, 0, most=INT32_MAX)
        require(is_exact or most > 0, "num_max_tokens_per_rank is 0, allowed without CPU sync: 1 and more")
        num_tokens = x.shape[0]
        if 0 < most < num_tokens:
            refuse(f"x has {num_tokens} rows, allowed: at most num_max_tokens_per_rank ({most})")

        kind, bound = ("with CPU sync", 0) if is_exact else ("without CPU sync", most)
        form = kind, x, scales, num_experts, topk_idx.shape[1], topk_weights, ("num_max_tokens_per_rank", bound)
        agreed = call_form(*form) | {"do_expand": do_expand}
        if do_expand and not is_exact:
            agreed["expert_alignment"] = alignment  # how many rows there is room for
        return DispatchForm(
            do_expand,
            num_experts,
            alignment,
            most or num_tokens,
            num_sms or usual_sms,
            is_exact,
            agreed,
            bytes_either_way(x, row_bytes_of(scales)),
            tag_of_dispatch(x, scales),
        )

    def dispatch(
        self,
        form: DispatchForm,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        statistics: torch.Tensor | None,
        *settings: bool,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle]:
        """A fresh dispatch. settings: do_handle_copy, do_zero_padding, use_tma_aligned_col_major_sf."""
        sizes = form.sizes
        if sizes is None or x.is_cpu:
            check_values(topk_idx, form.num_experts)
            sizes = self._sizes_of(form, x, topk_idx)
        plan, max_tokens, num_tokens, num_expanded, expert_counts = sizes
        numbers = num_expanded if form.do_expand else num_tokens, num_tokens, form.num_sms, form.tag
        tensors = x, scales, topk_idx, topk_weights, statistics
        sent = self.send(plan, *tensors, *numbers, *settings)
        received, ids, weights, lease, kept, rank_ends, ends, counted, sources = sent
        call = form.do_expand, form.num_experts, form.alignment, max_tokens, form.num_sms
        counts = list(expert_counts), rank_ends, ends, counted, sources, num_tokens, num_expanded
        handle = EPHandle(*call, kept, *counts, None, None, lease)
        return received, ids, weights, handle

    def _sizes_of(self, form: DispatchForm, x: torch.Tensor, topk_idx: torch.Tensor) -> Sizes:
        """Collective: ranks agree on the call."""
        size, alignment, num_experts, topk = self.ranks.size, form.alignment, form.num_experts, topk_idx.shape[1]
        if form.is_exact:
            counts = count_routing(topk_idx, num_experts, size, distinct=True)
            agreed = Agreement(self.ranks, form.agreed, x.shape[0], form.max_tokens, (counts[0], counts[2]))
            most_tokens, max_tokens = agreed.most_tokens, max(agreed.most_rows, agreed.most_tokens)
            num_tokens, expert_counts = agreed.rows_here(), agreed.expert_counts_here(alignment)
        else:
            self._compare(form.agreed, x.is_cpu)
            if form.sizes is not None:
                return form.sizes
            max_tokens = most_tokens = form.max_tokens
            num_tokens, expert_counts = size * max_tokens, []
        num_expanded = 0
        if form.do_expand:
            # What all ranks know, so that all refuse.
            local = num_experts // size
            most = size * most_tokens * min(topk, local) + (alignment - 1) * local
            if most > INT32_MAX:
                refuse(
                    f"expert_alignment is {alignment}: {most} rows by expert could come, allowed: at most {INT32_MAX}"
                )
            num_expanded = sum(expert_counts) if form.is_exact else align(most, alignment)
        budget = 0 if form.is_exact else num_expanded if form.do_expand else num_tokens
        for_all = x.device, num_experts, topk, most_tokens, form.row_bytes, form.do_expand, budget
        plan = self.plan(Kind(*for_all, alignment, max_tokens))
        sizes = Sizes(plan, max_tokens, num_tokens, num_expanded, expert_counts)
        if not form.is_exact:
            form.sizes = sizes
        return sizes

    def _compare(self, agreed: Settings, is_cpu: bool) -> None:
        """Ranks compare their calls without CPU sync: on GPUs, where such calls wait for no rank, only at first."""
        form = tuple(agreed.values())
        if not is_cpu and form in self._compared:
            return
        try:
            Agreement(self.ranks, agreed, 0, 0, None)
        except RemoteError as error:
            message = f"{error}; the first call without CPU sync of a form is compared with those of all ranks"
            raise RemoteError(message) from error
        self._compared.add(form)

    def close(self) -> None:
        """Collective."""
        super().close()
        self.ranks.close()
