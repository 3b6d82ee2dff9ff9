# SPDX-License-Identifier: Apache-2.0
"""The groups of a buffer, and the library's elastic operations on them (crossdock.h).

Small batches (LARGEST_BATCH, MOST_SLOTS) run on low-latency groups, which have memory for all that may come; all others
on high-throughput groups, through whose rings rows of any number pass. Results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from crossdock._core import (
    Algorithm,
    ElasticLease,
    ElasticPlan,
    Forms,
    Layout,
    elastic_combine,
    elastic_dispatch,
    elastic_dispatch_again,
)
from crossdock.deep_ep.checks import check_beside, check_combine, check_x, refuse, refuse_state
from crossdock.deep_ep.config import align
from crossdock.deep_ep.groups import PooledGroup
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.rows import UNIT, carried_bytes, explained, row_bytes_of, tag_of_combine, tag_of_dispatch
from crossdock.errors import Error

LARGEST_BATCH = 512  # tokens of a rank
MOST_SLOTS = 8192  # rows of all ranks, for which a low-latency group has memory three times
# What the library's elastic operations of low latency can do.
MOST_RANKS = 64
MOST_EXPERTS = 32767
MOST_TOKENS = 2**24 - 1  # of a rank, in any group
# The least that groups are made for.
SMALLEST_TOKENS = {Algorithm.LOW_LATENCY: 32, Algorithm.HIGH_THROUGHPUT: 128}
SMALLEST_TOPK = 8


class Kind(NamedTuple):
    """Of a dispatch: what its group and its handles are made for, the same on all ranks."""

    device: torch.device
    num_experts: int
    topk: int
    most_tokens: int  # of a rank
    row_bytes: int  # with scales, either way
    by_expert: bool
    budget: int  # rows of the outputs where nobody waits for their number; 0: as many as come
    alignment: int
    origin_stride: int
    own_weights: bool = False  # received weights of other ranks' experts are 0


Biases = tuple[torch.Tensor | None, torch.Tensor | None]


class ElasticGroups:
    """Of one buffer. adds_choices: rows by expert return one by one, and are added up in the order of choices."""

    budget_is = ""  # the argument that sets how many rows there is room for, if callers have one
    sums_of: Sequence[torch.dtype] = (torch.bfloat16,)  # types of rows that combines take

    def __init__(self, ranks: Ranks, adds_choices: bool = False) -> None:
        self.ranks = ranks
        self.adds_choices = adds_choices
        self._pools: dict[tuple[Any, ...], PooledGroup] = {}
        self._plans: dict[Kind, ElasticPlan] = {}
        self._made: list[PooledGroup] = []
        self._is_one_team: dict[str, bool] = {}  # whether all ranks are one LSA team, by type of device
        self.forms = Forms()  # of dispatches, with what follows from each while these groups serve

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """What the operation returns, or its error as callers of this package know it."""
        try:
            return operation(*arguments)
        except Error as error:
            raise explained(error, self.budget_is) from error

    def plan(self, kind: Kind) -> ElasticPlan:
        """Collective where a group must be made."""
        return self._plans.get(kind) or self._make_plan(kind)

    def _make_plan(self, kind: Kind) -> ElasticPlan:
        low_latency = self._pool(kind, Algorithm.LOW_LATENCY) if self._is_small(kind) else None
        pool = low_latency or self._pool(kind, Algorithm.HIGH_THROUGHPUT)
        made_for = kind.device, self.ranks.size, kind.num_experts, kind.topk, kind.alignment, kind.origin_stride
        plan = ElasticPlan(pool, low_latency is not None, *made_for, kind.by_expert, kind.own_weights)
        return self._plans.setdefault(kind, plan)

    def _is_small(self, kind: Kind) -> bool:
        return (
            kind.most_tokens <= LARGEST_BATCH
            and self.ranks.size * kind.most_tokens <= MOST_SLOTS
            and self.ranks.size <= MOST_RANKS
            and kind.num_experts <= MOST_EXPERTS
            and self._is_one_team.get(kind.device.type, True)
        )

    def _pool(self, kind: Kind, algorithm: Algorithm) -> PooledGroup | None:
        """None: low latency, and the ranks are not one LSA team."""
        is_low_latency = algorithm == Algorithm.LOW_LATENCY
        budget = 0 if is_low_latency else kind.budget
        key = algorithm, kind.device.type, kind.device.index or 0, kind.num_experts, kind.by_expert, budget
        found = self._pools.get(key)
        had_tokens, had_bytes, had_topk = 0, 0, min(SMALLEST_TOPK, kind.num_experts)
        if found is not None:
            had_tokens, had_bytes, had_topk = found.max_tokens, found.row_bytes, found.topk
            if kind.most_tokens <= had_tokens and kind.row_bytes <= had_bytes and kind.topk <= had_topk:
                return found
        tokens = had_tokens or SMALLEST_TOKENS[algorithm]
        while tokens < kind.most_tokens:
            tokens = min(2 * tokens, max(kind.most_tokens, MOST_TOKENS))
        if budget:
            # A group's budget is at least its tokens. More than this call's budget would hide that too many rows come.
            tokens = min(tokens, max(kind.most_tokens, budget))
        row_bytes, topk = max(kind.row_bytes, had_bytes), max(kind.topk, had_topk)
        by_rank = Layout.RANK_MAJOR if is_low_latency else Layout.FLAT
        # What a group of low latency is for would be memory for both layouts: its first handle says how much it needs.
        fields = {}
        if not is_low_latency:
            fields = {"num_topk": topk, "max_recv_tokens_per_rank": max(budget, tokens) if budget else 0}
        pool = PooledGroup(
            self.ranks,
            kind.device,
            Layout.EXPERT_MAJOR if kind.by_expert else by_rank,
            f"{kind.most_tokens} tokens, {kind.row_bytes} bytes per row, {kind.num_experts} experts and {budget} rows",
            algorithm=algorithm,
            num_experts=kind.num_experts,
            max_dispatch_tokens_per_rank=tokens,
            max_token_bytes=row_bytes,
            invariant=kind.by_expert and self.adds_choices,
            **fields,
        )
        pool.topk = topk
        self._made.append(pool)
        if is_low_latency:
            if pool.group.traffic().lsa_team_size != self.ranks.size:
                self._is_one_team[kind.device.type] = False
                return None
            # Handles of fewer choices share the memory of this first one, and so are compared with each other.
            handle, free = pool.take(topk)
            free.append(handle)
        self._pools[key] = pool
        self._plans.clear()  # of the group before
        self.forms.clear()
        return pool

    def expect_own(self, lease: object, handle: object, kind: str) -> ElasticLease:
        """The lease of a handle; kind: what that should be."""
        if not isinstance(lease, ElasticLease):
            refuse(f"handle is of type {type(handle).__name__}, expected {kind}")
        if lease.plan.pool not in self._made:
            refuse_state("handle is of another buffer: pass it to the buffer whose dispatch returned it")
        return lease

    def send(self, *arguments: Any) -> Any:
        """elastic_dispatch."""
        return self._call(elastic_dispatch, *arguments)

    def send_again(
        self,
        lease: ElasticLease,
        x: Any,
        scales: Any,
        weights: Any,
        statistics: Any,
        num_sms: int,
        zero_padding: bool = False,
        column_major: bool = False,
    ) -> Any:
        """x of any type and length along the routing of the lease: (recv_x, ids, weights)."""
        given, settings = (x, scales, weights, statistics), (num_sms, zero_padding, column_major)
        made = self._call(elastic_dispatch_again, lease, *given, *settings)
        if made is not None:
            return made
        form, forms = (*given, lease.num_tokens), lease.plan.repetitions
        found = forms.find(*form)
        if found is None:
            found = self._check_again(lease, *given)
            forms.keep(found, *form)
        if isinstance(found, int):
            return self._call(elastic_dispatch_again, lease, *given, *settings, found)
        # In pieces, scales too; what goes along goes with the first.
        came: list[torch.Tensor] = []
        beside: list[Any] = []
        [tag] = found
        for part in (x,) if scales is None else (x, scales):
            pieces = []
            for piece in part.split(lease.plan.pool.row_bytes // UNIT * UNIT // part.element_size(), dim=1):
                along = (None, None) if beside else (weights, statistics)
                arguments = piece.contiguous(), None, *along, num_sms, zero_padding, False, tag
                rows, *others = self._call(elastic_dispatch_again, lease, *arguments)
                pieces.append(rows)
                beside = beside or others
            came.append(torch.cat(pieces, dim=1))
        if scales is None:
            return came[0], *beside
        return (came[0], _in_order(came[1], column_major)), *beside

    def _check_again(self, lease: ElasticLease, x: Any, scales: Any, weights: Any, statistics: Any) -> int | tuple[int]:
        """The tag of what goes along a lease; in a tuple if rows do not fit the group."""
        check_x(x, scales)
        expected, device = lease.num_tokens, lease.topk_idx.device
        if len(x) != expected:
            refuse(f"x has {len(x)} rows, expected those of the dispatch that made the handle: {expected}")
        if x.device != device:
            refuse(f"x is on device {x.device}, expected {device}, as the handle")
        check_beside(lease.topk_idx, weights, statistics, lease.plan.num_experts // self.ranks.size)
        tag, fits = tag_of_dispatch(x, scales), carried_bytes(x, row_bytes_of(scales)) <= lease.plan.pool.row_bytes
        return tag if fits else (tag,)

    def add_up(
        self, lease: ElasticLease, x: Any, weights: Any, biases: Biases, num_sms: int, weights_follow: bool = False
    ) -> Any:
        """x [rows, H] of any H: the sums [T, H], and the weights that returned.

        weights_follow: topk_weights return in a combine of their own, on all ranks.
        """
        bias, bias2 = biases
        sums = self._call(elastic_combine, lease, x, weights, bias, bias2, num_sms, weights_follow)
        if sums is not None:
            return sums
        plan, form = lease.plan, (x, weights, bias, bias2, weights_follow, lease.num_rows, lease.num_tokens)
        found = plan.combines.find(*form)
        if found is None:
            check_combine(lease, x, weights, biases, self.sums_of)
            tag, step = tag_of_combine(x, weights_follow), plan.pool.row_bytes // UNIT * UNIT // x.element_size()
            found = tag if x.shape[1] <= step else (tag, step)
            plan.combines.keep(found, *form)
        if isinstance(found, int):
            return self._call(elastic_combine, lease, x, weights, *biases, num_sms, weights_follow, found)
        # Rows that are longer than the group's return in pieces; weights with the first.
        (tag, step), pieces, returned = found, [], None
        for begin in range(0, x.shape[1], step):
            part = slice(begin, begin + step)
            rows, *added = (None if whole is None else whole[:, part].contiguous() for whole in (x, *biases))
            piece, back = self._call(elastic_combine, lease, rows, weights, *added, num_sms, weights_follow, tag)
            returned, weights = back if begin == 0 else returned, None
            pieces.append(piece)
        return torch.cat(pieces, dim=1), returned

    def close(self) -> None:
        """Collective."""
        for pool in self._made:
            pool.close()
        self._pools, self._plans, self._made = {}, {}, []


def _in_order(scales: torch.Tensor, column_major: bool) -> torch.Tensor:
    """column_major: with strides (1, rows rounded up to 4)."""
    if not column_major:
        return scales
    num_rows, columns = scales.shape
    whole = scales.new_empty(columns, align(num_rows, 4))
    return whole[:, :num_rows].t().copy_(scales)
