# SPDX-License-Identifier: Apache-2.0
"""The normal mode of Buffer: dispatch of any number of tokens, fresh or along an earlier handle, and combine."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from crossdock._core import ElasticLease, Forms
from crossdock.copies import Uncopied
from crossdock.deep_ep.agreement import WITH_TOPK_IDX, WITH_WORST_TOKENS, WITHOUT_TOPK_IDX, Agreement
from crossdock.deep_ep.config import align
from crossdock.deep_ep.elastic_groups import ElasticGroups, Kind
from crossdock.deep_ep.errors import require, require_state
from crossdock.deep_ep.layout import check_elements, check_memory, describe
from crossdock.deep_ep.lazy import Computed, LazyTuple
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.rows import UNIT, padded_bytes

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

    agreed: Agreement | None  # None: the device alone knows the counts
    of_device: list[torch.Tensor]  # what the dispatch has written
    _prefix: torch.Tensor | None = None

    def __copy__(self) -> DispatchHandle:
        return self

    def prefix(self) -> torch.Tensor | None:
        if self._prefix is None and self.agreed is not None:
            sums = np.cumsum(self.agreed.rank_counts(), axis=0, dtype=np.int32)
            self._prefix = torch.tensor(sums, dtype=torch.int32, device=self[3].device)
        return self._prefix


_PREFIX = Computed(lambda handle: handle.prefix())
MOST_TARGETS = 64  # columns of a group's routing
FEWEST_SCALES = 96  # that have room beside a row at least


def targets_of(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """The ranks of each token, [T, R] or [T, 64] with more ranks, in any columns; -1 where there is none."""
    size = is_token_in_rank.shape[1]
    if size <= MOST_TARGETS:
        return torch.where(is_token_in_rank, torch.arange(size, dtype=torch.int64, device=is_token_in_rank.device), -1)
    ranks = (~is_token_in_rank).byte().argsort(dim=1, stable=True)[:, :MOST_TARGETS]
    return torch.where(is_token_in_rank.gather(1, ranks), ranks, -1)


class Normal:
    """Of one Buffer."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.groups = ElasticGroups(ranks)

    def lease_of(self, handle: Any) -> ElasticLease:
        """What a handle of this buffer, or a plain tuple with its items, stands for."""
        items = tuple.__iter__(handle) if isinstance(handle, tuple) else ()
        lease = next((item for item in items if isinstance(item, ElasticLease)), None)
        kind = type(handle).__name__
        require(lease is not None, lambda: f"handle is of type {kind}, expected one that a fresh dispatch returned")
        assert lease is not None
        is_own = self.groups.owns(lease)
        require_state(is_own, "handle is of another buffer: pass it to the buffer whose dispatch returned it")
        return lease

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
        num_rows = num_worst_tokens or agreed.rows_here()

        # Without topk_idx, ranks play the experts.
        ids = targets_of(is_token_in_rank) if topk_idx is None else topk_idx
        experts = ranks.size if topk_idx is None else num_experts
        # Rows and scales that go, those of later calls, too, and bf16 rows that return.
        beside = align(4 * max(num_scales, FEWEST_SCALES), UNIT)
        longest = max(padded_bytes(row_bytes) + beside, padded_bytes(2 * x.shape[1]))
        form = device, experts, ids.shape[1], agreed.most_tokens, longest, False, worst, 1, 0, topk_idx is not None
        plan = self.groups.plan(Kind(*form))
        is_kept = topk_idx is not None and plan.is_low_latency  # high throughput keeps what it reads itself
        settings = num_rows, num_rows, sms, is_kept, False, False
        rows, sf, own_ids, weights, lease, kept, sources, rank_ends, _, _ = self.groups.dispatch(
            plan, x, scales, ids, topk_weights, None, *settings
        )
        expert_counts = agreed.expert_counts_here(alignment) if num_worst_tokens == 0 else []
        items: tuple[Any, ...] = (_PREFIX, lease, None, sources[:, 0], is_token_in_rank, None)
        if has_nodes:
            items = (is_token_in_rank, lease, None, sources[:, 0], None, None, rank_ends, None, None, None)
        handle = DispatchHandle(items)
        handle.agreed = agreed if counts is not None else None
        handle.of_device = [kept, sources, rank_ends]
        received = rows if sf is None else (rows, sf)
        return received, own_ids if topk_idx is not None else None, weights, expert_counts, handle

    def dispatch_again(self, tokens: Tokens, lease: ElasticLease, sms: int) -> Any:
        """Along the route of a handle: rows at the same places."""
        x, scales = tokens
        num_tokens = lease.num_tokens
        require(
            x.shape[0] == num_tokens,
            lambda: f"x has {x.shape[0]} rows, expected those of the dispatch that made the handle: {num_tokens}",
        )
        check_memory("x", x, lease.topk_idx.device)
        rows, sf, _, _ = self.groups.send_again(lease, x, scales, None, None, sms, False, False)
        return rows if sf is None else (rows, sf)

    def combine(
        self,
        x: torch.Tensor,
        lease: ElasticLease,
        topk_weights: torch.Tensor | None,
        biases: list[torch.Tensor],
        sms: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights return as rows of their own: their sums are over all ranks, whatever the choices are."""
        check_rows(x, lease, "x", SUM_TYPES)
        for bias in biases:
            check_bias(bias, lease.num_tokens, x)
        if topk_weights is None:
            return self.groups.add_up(lease, x, None, biases, sms)[0], None
        check_rows(topk_weights, lease, "topk_weights", (torch.float32,))
        sums = self.groups.add_up(lease, x, None, biases, sms, True)[0]
        return sums, self.groups.add_up(lease, topk_weights, None, [], sms, True)[0]

    def close(self) -> None:
        """Collective."""
        self.groups.close()


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


def check_rows(tensor: Any, lease: ElasticLease, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    fits = isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[0] == lease.num_rows
    if not (fits and tensor.dtype in dtypes and tensor.shape[1] >= 1 and tensor.is_contiguous()):
        kinds = " or ".join(map(str, dtypes))
        rows = f"[{lease.num_rows}, ..], the rows that dispatch returned, of {kinds}"
        require(False, f"{name} is {describe(tensor)}, expected a contiguous {rows}")
    check_memory(name, tensor, lease.topk_idx.device)
