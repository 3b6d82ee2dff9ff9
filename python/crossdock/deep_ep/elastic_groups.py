# SPDX-License-Identifier: Apache-2.0
"""The groups of a buffer, and the library's elastic operations on them (crossdock.h).

Small batches (LARGEST_BATCH, MOST_SLOTS) run on low-latency groups, which have memory for all that may come; all others
on high-throughput groups, through whose rings rows of any number pass. Results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from crossdock._core import (
    Algorithm,
    ElasticLease,
    ElasticPlan,
    Forms,
    Layout,
    PieceMaker,
    elastic_combine,
    elastic_dispatch,
    elastic_dispatch_again,
)
from crossdock.deep_ep.config import align
from crossdock.deep_ep.errors import refuse, refuse_state
from crossdock.deep_ep.groups import PooledGroup
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.rows import (
    UNIT,
    as_carried,
    explained,
    from_carried,
    padded_bytes,
    row_bytes_of,
    tag_of_combine,
    tag_of_dispatch,
)
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


class _Pool(NamedTuple):
    """A pool, and the sizes that it was made for."""

    pool: PooledGroup
    tokens: int
    row_bytes: int
    topk: int


class ElasticGroups:
    """Of one buffer. adds_choices: rows by expert return one by one, and are added up in the order of choices."""

    budget_is = ""  # the argument that sets how many rows there is room for, if callers have one

    def __init__(self, ranks: Ranks, adds_choices: bool = False) -> None:
        self.ranks = ranks
        self.adds_choices = adds_choices
        self._pools: dict[tuple[Any, ...], _Pool] = {}
        self._plans: dict[Kind, ElasticPlan] = {}
        self._made: list[PooledGroup] = []
        self._is_one_team: dict[str, bool] = {}  # whether all ranks are one LSA team, by type of device
        self.forms = Forms()  # of dispatches, with what follows from each while these groups serve
        self._sums = Forms()  # rows that return as they are, with what a group carries: their tags

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
        pool = self._pool(kind, Algorithm.LOW_LATENCY) if self._is_small(kind) else None
        is_low_latency = pool is not None
        if pool is None:
            pool = self._pool(kind, Algorithm.HIGH_THROUGHPUT)
        assert pool is not None
        device, ranks = kind.device, self.ranks.size
        plan = ElasticPlan(
            pool,
            pool.free(kind.topk),
            is_low_latency,
            kind.topk,
            kind.alignment,
            kind.origin_stride,
            kind.by_expert,
            kind.own_weights,
            PieceMaker(device, ranks),
            PieceMaker(device, kind.num_experts // ranks),
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
        tokens = found.tokens if found else SMALLEST_TOKENS[algorithm]
        while tokens < kind.most_tokens:
            tokens = min(2 * tokens, max(kind.most_tokens, MOST_TOKENS))
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
            f"{kind.most_tokens} tokens, {kind.row_bytes} bytes per row, {kind.num_experts} experts and {budget} rows",
            algorithm=algorithm,
            num_experts=kind.num_experts,
            max_dispatch_tokens_per_rank=tokens,
            max_token_bytes=row_bytes,
            invariant=kind.by_expert and self.adds_choices,
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
        self.forms.clear()
        return pool

    def expect_own(self, lease: object, handle: object, kind: str) -> ElasticLease:
        """The lease of a handle; kind: what that should be."""
        if not isinstance(lease, ElasticLease):
            refuse(f"handle is of type {type(handle).__name__}, expected {kind}")
        if lease.plan.pool.owner is not self:
            refuse_state("handle is of another buffer: pass it to the buffer whose dispatch returned it")
        return lease

    def send(
        self,
        plan: ElasticPlan,
        is_carried: bool,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        statistics: torch.Tensor | None,
        *numbers: int,
    ) -> Any:
        """elastic_dispatch of rows of any type and length, and of choices and weights of any strides.

        is_carried: all of them are as groups carry them.
        """
        if is_carried:
            return self._call(elastic_dispatch, plan, x, scales, topk_idx, weights, statistics, *numbers)
        routing = topk_idx.contiguous(), _dense(weights), statistics
        came, *others = self._call(elastic_dispatch, plan, as_carried(x), scales, *routing, *numbers)
        return from_carried(came, x), *others

    def send_again(
        self,
        lease: ElasticLease,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor | None,
        statistics: torch.Tensor | None,
        num_sms: int,
        zero_padding: bool = False,
        column_major: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """x of any type and length along the routing of the lease: (recv_x as x is, ids, weights)."""
        expected, given, device = lease.num_tokens, x.shape[0], lease.topk_idx.device
        if given != expected:
            refuse(f"x has {given} rows, expected those of the dispatch that made the handle: {expected}")
        if x.device != device:
            refuse(f"x is on device {x.device}, expected {device}, as the handle")
        tag, weights, rows = tag_of_dispatch(x, scales), _dense(weights), as_carried(x)
        beside = 0 if scales is None else align(row_bytes_of(scales), UNIT)
        capacity = lease.plan.pool.row_bytes
        if padded_bytes(row_bytes_of(x)) + beside <= capacity:
            settings = num_sms, tag, zero_padding, column_major
            arguments = rows, scales, weights, statistics, *settings
            came, sf, ids, returned = self._call(elastic_dispatch_again, lease, *arguments)
        else:
            # In pieces; what goes along goes with the first.
            parts = [rows] if scales is None else [rows, as_carried(scales.contiguous())]
            pieces = [part.split(capacity // UNIT * UNIT // part.element_size(), dim=1) for part in parts]
            sent = []
            for piece in (piece.contiguous() for of_part in pieces for piece in of_part):
                along = (None, None) if sent else (weights, statistics)
                arguments = piece, None, *along, num_sms, tag, zero_padding, False
                sent.append(self._call(elastic_dispatch_again, lease, *arguments))
            _, _, ids, returned = sent[0]
            came = torch.cat([piece for piece, *_ in sent[: len(pieces[0])]], dim=1)
            sf = None
            if scales is not None:
                beside_rows = torch.cat([piece for piece, *_ in sent[len(pieces[0]) :]], dim=1)
                sf = _in_order(from_carried(beside_rows, scales), column_major)
        received = from_carried(came, x)
        return received if sf is None else (received, sf), ids, returned

    def add_up_known(
        self, lease: ElasticLease, x: Any, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The sums of rows alone, as they are; None: take add_up, which notes such rows."""
        tag: int | None = self._sums.find(x, lease.num_rows, lease.plan.pool.row_bytes)
        return None if tag is None else self._call(elastic_combine, lease, x, None, None, None, num_sms, tag)

    def add_up(
        self,
        lease: ElasticLease,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        num_sms: int,
        weights_follow: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [rows, H] of any H: the sums [T, H], and the weights that returned.

        weights_follow: topk_weights return in a combine of their own, on all ranks.
        """
        tag, capacity = tag_of_combine(x, weights_follow), lease.plan.pool.row_bytes
        weights, biases = _dense(weights), (_dense(biases[0]), _dense(biases[1]))
        hidden, unit = x.shape[1], UNIT // x.element_size()
        step = capacity // UNIT * unit
        if hidden % unit == 0 and hidden <= step:
            if not weights_follow:
                self._sums.keep(tag, x, lease.num_rows, capacity)
            sums: tuple[torch.Tensor, torch.Tensor | None]
            sums = self._call(elastic_combine, lease, x, weights, *biases, num_sms, tag)
            return sums
        # Rows that are longer than the group's, or not of whole units, return in pieces; weights with the first.
        pieces, returned = [], None
        for begin in range(0, hidden, step):
            rows, *added = (_columns(part, begin, min(begin + step, hidden), unit) for part in (x, *biases))
            going = weights if begin == 0 else None
            piece, back = self._call(elastic_combine, lease, rows, going, *added, num_sms, tag)
            returned = back if begin == 0 else returned
            pieces.append(piece[:, : hidden - begin])
        return torch.cat(pieces, dim=1), returned

    def close(self) -> None:
        """Collective."""
        for pool in self._made:
            pool.close()
        self._pools, self._plans, self._made = {}, {}, []


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _in_order(scales: torch.Tensor, column_major: bool) -> torch.Tensor:
    """column_major: with strides (1, rows rounded up to 4)."""
    if not column_major:
        return scales
    num_rows, columns = scales.shape
    whole = scales.new_empty(columns, align(num_rows, 4))
    return whole[:, :num_rows].t().copy_(scales)


def _columns(rows: torch.Tensor | None, begin: int, end: int, unit: int) -> torch.Tensor | None:
    """These, padded to whole units."""
    if rows is None:
        return None
    num = end - begin
    return torch.nn.functional.pad(rows[:, begin:end], (0, align(num, unit) - num)).contiguous()
