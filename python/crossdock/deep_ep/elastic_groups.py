# SPDX-License-Identifier: Apache-2.0
"""The groups of a buffer, and the library's elastic operations on them (crossdock.h).

Small batches (LARGEST_BATCH, MOST_SLOTS) run on low-latency groups, which have memory for all that may come; all others
on high-throughput groups, through whose rings rows of any number pass. Results are the same to the bit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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
from crossdock.deep_ep import rows as carried
from crossdock.deep_ep import tags
from crossdock.deep_ep.config import align
from crossdock.deep_ep.errors import require_state, translated
from crossdock.deep_ep.groups import PooledGroup, is_capturing
from crossdock.deep_ep.makers import makers_of, piece_maker
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.scales import empty_scales
from crossdock.errors import Error

LARGEST_BATCH = 512  # tokens of a rank
MOST_SLOTS = 8192  # rows of all ranks, for which a low-latency group has memory three times
# What the library's elastic operations of low latency can do.
MOST_RANKS = 64
MOST_EXPERTS = 32767
# The least that groups are made for.
SMALLEST_TOKENS = {Algorithm.LOW_LATENCY: 32, Algorithm.HIGH_THROUGHPUT: 128}
SMALLEST_TOPK = 8

_DIFFERENT_WEIGHTS = re.compile(r"whether topk_weights travel is (no|yes) on rank (\d+), (no|yes) on rank (\d+)")


@dataclass(frozen=True)
class Kind:
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


@dataclass
class _Pool:
    """A pool, and the sizes that it was made for."""

    pool: PooledGroup
    tokens: int
    row_bytes: int
    topk: int


class ElasticGroups:
    """Of one buffer."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._pools: dict[tuple[Any, ...], _Pool] = {}
        self._plans: dict[Kind, ElasticPlan] = {}
        self._made: list[PooledGroup] = []
        self._is_one_team: dict[str, bool] = {}  # whether all ranks are one LSA team, by type of device
        self.dispatches = Forms()  # that need nothing but the call: what Elastic knows of them
        self._sums = Forms()  # rows that return as they are, with what a group carries: their tags

    def plan(self, kind: Kind) -> ElasticPlan:
        """Collective where a group must be made."""
        return self._plans.get(kind) or self._make_plan(kind)

    def _make_plan(self, kind: Kind) -> ElasticPlan:
        pool = self._pool(kind, Algorithm.LOW_LATENCY) if self._is_small(kind) else None
        is_low_latency = pool is not None
        if pool is None:
            pool = self._pool(kind, Algorithm.HIGH_THROUGHPUT)
        assert pool is not None
        device, ranks = kind.device, self.ranks.size
        of_ranks, of_experts = piece_maker(device, ranks), piece_maker(device, kind.num_experts // ranks)
        plan = ElasticPlan(
            pool,
            pool.free(kind.topk),
            is_low_latency,
            kind.topk,
            kind.alignment,
            kind.origin_stride,
            kind.by_expert,
            kind.own_weights,
            makers_of(device).int32(1),
            of_ranks,
            of_experts,
        )
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
        if found is not None:
            if kind.most_tokens <= found.tokens and kind.row_bytes <= found.row_bytes and kind.topk <= found.topk:
                return found.pool
        is_captured = is_capturing()
        require_state(
            not is_captured,
            lambda: (
                f"the first call with {kind.most_tokens} tokens, {kind.row_bytes} bytes per row, {kind.num_experts} "
                f"experts and {budget} rows grows the buffer, which cannot be captured: make one such call before"
            ),
        )
        tokens = found.tokens if found else SMALLEST_TOKENS[algorithm]
        while tokens < kind.most_tokens:
            tokens *= 2
        if budget:
            # A group's budget is at least its tokens. More than this call's budget would hide that too many rows come.
            tokens = min(tokens, max(kind.most_tokens, budget))
        row_bytes = max(kind.row_bytes, found.row_bytes if found else 0)
        topk = max(kind.topk, found.topk if found else min(SMALLEST_TOPK, kind.num_experts))
        by_rank = Layout.RANK_MAJOR if is_low_latency else Layout.FLAT
        # What a group of low latency is for would be memory for both layouts: its first handle says how much it needs.
        fields = {}
        if not is_low_latency:
            fields = {"num_topk": topk, "max_recv_tokens_per_rank": max(budget, tokens) if budget else 0}
        pool = PooledGroup(
            self.ranks,
            kind.device,
            Layout.EXPERT_MAJOR if kind.by_expert else by_rank,
            algorithm=algorithm,
            num_experts=kind.num_experts,
            max_dispatch_tokens_per_rank=tokens,
            max_token_bytes=row_bytes,
            **fields,
        )
        pool.owner = self
        self._made.append(pool)
        if is_low_latency:
            if pool.group.traffic().lsa_team_size != self.ranks.size:
                self._is_one_team[kind.device.type] = False
                return None
            # Handles of fewer choices share the memory of this first one, and so are compared with each other.
            handle, free = pool.take(topk)
            free.append(handle)
        self._pools[key] = _Pool(pool, tokens, row_bytes, topk)
        self._plans.clear()  # of the group before
        self.dispatches.clear()
        return pool

    def owns(self, lease: ElasticLease) -> bool:
        return lease.plan.pool.owner is self

    def dispatch_known(self, plan: ElasticPlan, *arguments: Any) -> tuple[Any, ...]:
        """elastic_dispatch of rows as they are."""
        try:
            return elastic_dispatch(plan, *arguments)
        except Error as error:
            raise explained(error) from error

    def dispatch(
        self,
        plan: ElasticPlan,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        statistics: torch.Tensor | None,
        num_rows: int,
        num_sources: int,
        num_sms: int,
        *settings: bool,
    ) -> tuple[Any, ...]:
        """elastic_dispatch of rows of any type."""
        rows = carried.as_carried(x)
        tag = tags.of_dispatch(x, scales, rows is x)
        weights = None if weights is None else weights.contiguous()
        arguments = weights, statistics, num_rows, num_sources, num_sms, tag, *settings
        try:
            came, *rest = elastic_dispatch(plan, rows, scales, topk_idx.contiguous(), *arguments)
        except Error as error:
            raise explained(error) from error
        return carried.from_carried(came, x.shape[1], x.dtype), *rest

    def send_again(
        self,
        lease: ElasticLease,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor | None,
        statistics: torch.Tensor | None,
        num_sms: int,
        zero_padding: bool,
        column_major: bool,
    ) -> tuple[Any, ...]:
        """x of any type and length along the routing of the lease: (rows, scales, ids, weights)."""
        capacity = lease.plan.pool.row_bytes
        weights = None if weights is None else weights.contiguous()
        rows = carried.as_carried(x)
        tag = tags.of_dispatch(x, scales, rows is x)
        row_bytes = carried.padded_bytes(x.shape[1] * x.element_size())
        beside = 0 if scales is None else align(scales.shape[1] * scales.element_size(), carried.UNIT)
        try:
            if row_bytes + beside <= capacity:
                settings = num_sms, tag, zero_padding, column_major
                came, *rest = elastic_dispatch_again(lease, rows, scales, weights, statistics, *settings)
                return carried.from_carried(came, x.shape[1], x.dtype), *rest
            # In pieces; what goes along goes with the first.
            found: list[list[torch.Tensor]] = [[], []]  # pieces of rows, and of scales
            ids = returned = None
            along: tuple[Any, Any] = weights, statistics
            settings = num_sms, tag, zero_padding, False
            beside_rows = None if scales is None else carried.as_carried(scales.contiguous())
            for part, pieces in zip((rows, beside_rows), found, strict=True):
                if part is None:
                    continue
                for piece in part.split(capacity // carried.UNIT * carried.UNIT // part.element_size(), dim=1):
                    sent = elastic_dispatch_again(lease, piece.contiguous(), None, *along, *settings)
                    if not found[0]:
                        ids, returned = sent[2:]
                    pieces.append(sent[0])
                    along = None, None
        except Error as error:
            raise explained(error) from error
        received = carried.from_carried(torch.cat(found[0], dim=1), x.shape[1], x.dtype)
        sf = None
        if scales is not None:
            sf = carried.from_carried(torch.cat(found[1], dim=1), scales.shape[1], scales.dtype)
            if column_major:
                sf = empty_scales(sf, sf.shape[0], True).copy_(sf)
        return received, sf, ids, returned

    def add_up_known(
        self, lease: ElasticLease, x: Any, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The sums of rows alone, as they are; None: take add_up, which notes such rows."""
        tag: int | None = self._sums.find(x, lease.num_rows, lease.plan.pool.row_bytes)
        if tag is None:
            return None
        try:
            sums: tuple[torch.Tensor, torch.Tensor | None] = elastic_combine(lease, x, None, None, None, num_sms, tag)
        except Error as error:
            raise explained(error) from error
        return sums

    def add_up(
        self,
        lease: ElasticLease,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        biases: list[torch.Tensor],
        num_sms: int,
        has_others: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [rows, H] of any H: the sums [T, H], and the weights that returned.

        has_others: topk_weights return in a combine of their own, on all ranks.
        """
        tag = tags.of_combine(x, has_others)
        weights = None if weights is None else weights.contiguous()
        biases = [bias.contiguous() for bias in biases]
        hidden, unit = x.shape[1], carried.UNIT // x.element_size()
        step = lease.plan.pool.row_bytes // carried.UNIT * unit
        try:
            if hidden % unit == 0 and hidden <= step:
                sums: tuple[torch.Tensor, torch.Tensor | None]
                sums = elastic_combine(lease, x, weights, *_two(biases), num_sms, tag)
                if not has_others:
                    self._sums.keep(tag, x, lease.num_rows, lease.plan.pool.row_bytes)
                return sums
            # Rows that are longer than the group's, or not of whole units, return in pieces; weights with the first.
            pieces, returned, going = [], None, weights
            for begin in range(0, hidden, step):
                parts = [_piece(rows, begin, min(begin + step, hidden), unit) for rows in (x, *biases)]
                piece, back = elastic_combine(lease, parts[0], going, *_two(parts[1:]), num_sms, tag)
                returned, going = returned if back is None else back, None
                pieces.append(piece[:, : hidden - begin])
        except Error as error:
            raise explained(error) from error
        return torch.cat(pieces, dim=1), returned

    def close(self) -> None:
        """Collective."""
        for pool in self._made:
            pool.close()
        self._pools, self._plans, self._made = {}, {}, []


def explained(error: Error) -> Error:
    """As DeepEP's callers expect it."""
    error = tags.explained(error)
    found = _DIFFERENT_WEIGHTS.search(str(error))
    if found is None:
        return translated(error)
    given = ["None" if says == "no" else "given" for says in found.group(1, 3)]
    words = f"topk_weights is {given[0]} on rank {found[2]}, {given[1]} on rank {found[4]}"
    return translated(type(error)(str(error).replace(found[0], words)))


def _two(biases: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    first, second, *_ = (*biases, None, None)
    return first, second


def _piece(rows: torch.Tensor, begin: int, end: int, unit: int) -> torch.Tensor:
    """These columns, padded to whole units."""
    wide = rows.new_zeros(rows.shape[0], align(end - begin, unit))
    wide[:, : end - begin] = rows[:, begin:end]
    return wide
