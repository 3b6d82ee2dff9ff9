# SPDX-License-Identifier: Apache-2.0
"""The low-latency mode of Buffer, on groups and handles of that mode in expert-major layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from crossdock._core import Algorithm, CombineOutputs, DispatchQuantizationRecipe, Layout, LayoutInfo
from crossdock.deep_ep import scales as scale_forms
from crossdock.deep_ep.errors import require, require_state
from crossdock.deep_ep.groups import Lease, PooledGroup, is_capturing
from crossdock.deep_ep.layout import check_topk_idx, check_values, describe
from crossdock.deep_ep.lazy import Later, LazyTuple
from crossdock.deep_ep.ranks import Ranks

BLOCK = 128  # elements of a scale
MOST_FORMS = 1024


def form_of(tensor: Any) -> Any:
    """All that a tensor is, but for its elements."""
    if not isinstance(tensor, torch.Tensor):
        return type(tensor)
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


@dataclass(slots=True)
class Trip:
    """One dispatch and the combines that follow it."""

    owner: LowLatency
    lease: Lease
    num_tokens: int
    topk: int
    max_tokens: int
    hidden: int
    num_experts: int
    topk_idx: torch.Tensor  # read until the last combine
    combine_buffer: torch.Tensor | None = None


@dataclass
class _Size:
    pool: PooledGroup
    hidden: int


class LowLatencyHandle(LazyTuple):
    """What a low-latency dispatch returns: (src_info, layout_range, M, H, E)."""

    trip: Trip

    def __new__(cls, items: tuple[Any, ...], trip: Trip) -> LowLatencyHandle:
        self = super().__new__(cls, items)
        self.trip = trip
        return self


@dataclass(slots=True)
class Started:
    """The send half of an operation; finish is the receive half."""

    outputs: Any
    finish: Callable[[], None]
    tensors: list[torch.Tensor] = field(default_factory=list)


class LowLatency:
    """Of one Buffer."""

    def __init__(self, ranks: Ranks, enable_masks: bool) -> None:
        self.ranks = ranks
        self.enable_masks = enable_masks
        self._sizes: dict[tuple[str, int, int], _Size] = {}
        self._pools: list[PooledGroup] = []
        self._masked = [False] * ranks.size
        self._checked: set[tuple[Any, ...]] = set()  # forms of arguments that have been found right

    def pool(self, device: torch.device, max_tokens: int, hidden: int, num_experts: int) -> PooledGroup:
        """The group for operations of this shape; collective where it has to be made."""
        key = (device.type, max_tokens, num_experts)
        size = self._sizes.get(key)
        if size is not None and hidden <= size.hidden:
            return size.pool
        is_captured = is_capturing()
        require_state(
            not is_captured,
            lambda: (
                f"the first call with num_max_dispatch_tokens_per_rank {max_tokens}, hidden {hidden} and num_experts "
                f"{num_experts} makes memory, which cannot be captured: make one such call before"
            ),
        )
        pool = PooledGroup(
            self.ranks.communicator(device),
            Layout.EXPERT_MAJOR,
            algorithm=Algorithm.LOW_LATENCY,
            num_experts=num_experts,
            max_dispatch_tokens_per_rank=max_tokens,
            max_token_bytes=2 * hidden,
            enable_mask=self.enable_masks,
        )
        self._pools.append(pool)
        if any(self._masked):
            pool.group.mask_update([not masked for masked in self._masked])
        self._sizes[key] = _Size(pool, hidden)
        return pool

    def _remember(self, form: tuple[Any, ...]) -> None:
        if len(self._checked) >= MOST_FORMS:
            self._checked.clear()
        self._checked.add(form)

    # ---- masks ----

    def set_mask(self, rank: int, masked: bool) -> None:
        """Local."""
        self._masked[rank] = masked
        for pool in self._pools:
            active = self._active(pool)
            active[rank] = not masked
            pool.group.mask_update(active)

    def query_masks(self, status: torch.Tensor) -> None:
        """1 for a masked rank, in groups of any shape."""
        if not self._pools:
            status.copy_(torch.tensor(self._masked))
            return
        status.zero_()
        for pool in self._pools:
            active = torch.empty_like(status)
            pool.group.mask_query(active)
            status |= (active == 0).to(status.dtype)

    def clean_masks(self) -> None:
        """Collective over the ranks that are to take part."""
        self._masked = [False] * self.ranks.size
        for pool in self._pools:
            pool.group.mask_clean()

    def _active(self, pool: PooledGroup) -> list[bool]:
        if pool.group.is_cpu:
            return list(pool.group.mask_query())
        status = torch.empty(self.ranks.size, dtype=torch.int32, device="cuda")
        pool.group.mask_query(status)
        return [value != 0 for value in status.tolist()]

    # ---- operations ----

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        statistics: torch.Tensor | None,
        waiting: torch.Tensor | None,
        is_split: bool,
    ) -> Started:
        """outputs: (recv_x, recv_count, handle)."""
        ranks = self.ranks
        form = (
            form_of(x),
            form_of(topk_idx),
            statistics is None or form_of(statistics),
            waiting is None or form_of(waiting),
            max_tokens,
            num_experts,
            use_fp8,
            round_scale,
            use_ue8m0,
        )
        if form not in self._checked:
            _check_dispatch(x, topk_idx, max_tokens, num_experts, use_fp8, round_scale, use_ue8m0, ranks.size)
            shapes: list[tuple[int, ...]] = [(num_experts // ranks.size,)]
            _check_statistics(statistics, "cumulative_local_expert_recv_stats", shapes, torch.int32)
            check_waiting(waiting, "dispatch_wait_recv_cost_stats", ranks.size)
            self._remember(form)
        check_values(topk_idx, num_experts)
        local, slots, hidden = num_experts // ranks.size, ranks.size * max_tokens, x.shape[1]
        pool = self.pool(x.device, max_tokens, hidden, num_experts)
        lease = pool.lease(topk_idx.shape[1])
        handle = lease.handle
        handle.update(topk_idx)
        counts = torch.empty(local, dtype=torch.int32, device=x.device)
        info = LayoutInfo(expert_counters=counts)
        recv_x: Any
        if use_fp8:
            values = torch.empty(local, slots, hidden, dtype=torch.float8_e4m3fn, device=x.device)
            scale_form = scale_forms.PACKED if use_ue8m0 else scale_forms.TRANSPOSED
            scales = scale_forms.Scales(scale_form, local, slots, hidden // BLOCK, x.device)
            recv_x = (values, scales.tensor)
            scales.dispatch(handle, x, values, info, round_scale, is_split)
        else:
            recv_x = torch.empty(local, slots, hidden, dtype=torch.bfloat16, device=x.device)
            scales = None
            handle.dispatch(x, recv_x, layout_info=info, send_only=is_split)
        lease.is_pending = is_split
        trip = Trip(self, lease, x.shape[0], topk_idx.shape[1], max_tokens, hidden, num_experts, topk_idx)

        def finish() -> None:
            self._receive(lease, is_split, waiting)
            if scales is not None:
                scales.finish()
            if statistics is not None:
                statistics.add_(counts)

        sources = Sources(trip)
        items = (Later(sources.tokens), Later(sources.ranges), max_tokens, hidden, num_experts)
        tensors = [x, topk_idx, counts, *(recv_x if use_fp8 else [recv_x])]
        return Started((recv_x, counts, LowLatencyHandle(items, trip)), finish, tensors)

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        zero_copy: bool,
        out: torch.Tensor | None,
        waiting: torch.Tensor | None,
        is_split: bool,
    ) -> Started:
        """outputs: combined_x."""
        trip = self.trip_of(handle)
        if zero_copy:
            require_state(
                trip.combine_buffer is not None,
                "zero_copy is True, but get_next_low_latency_combine_buffer was not called for this handle",
            )
            assert trip.combine_buffer is not None
            require(x.shape == trip.combine_buffer.shape, lambda: f"x is {describe(x)}, expected as the combine buffer")
            x = trip.combine_buffer
        form = (
            form_of(x),
            form_of(topk_idx),
            form_of(topk_weights),
            out is None or form_of(out),
            waiting is None or form_of(waiting),
            trip.num_tokens,
            trip.topk,
            trip.max_tokens,
            trip.hidden,
            trip.num_experts,
        )
        if form not in self._checked:
            _check_combine(trip, x, topk_idx, topk_weights, out, waiting, self.ranks.size)
            self._remember(form)
        if out is None:
            out = torch.empty(trip.num_tokens, trip.hidden, dtype=torch.bfloat16, device=x.device)
        topk_weights = topk_weights.contiguous()
        outputs = CombineOutputs(tokens=out, topk_weights=topk_weights)
        trip.lease.handle.combine(x, outputs, send_only=is_split)
        trip.lease.is_pending = is_split

        def finish() -> None:
            self._receive(trip.lease, is_split, waiting)

        return Started(out, finish, [x, topk_idx, topk_weights, out])

    def _receive(self, lease: Lease, is_split: bool, waiting: torch.Tensor | None) -> None:
        """The receive half. On CPUs its time, in nanoseconds, is added to waiting for all other ranks."""
        begin = time.perf_counter_ns()
        if is_split:
            lease.handle.complete()
            lease.is_pending = False
        lease.forget()
        if waiting is not None and waiting.is_cpu:
            elapsed, rank = time.perf_counter_ns() - begin, self.ranks.rank
            own = waiting if waiting.dim() == 1 else waiting[rank]
            own[:rank] += elapsed
            own[rank + 1 :] += elapsed

    def combine_buffer(self, handle: Any) -> torch.Tensor:
        trip = self.trip_of(handle)
        local, slots = trip.num_experts // self.ranks.size, self.ranks.size * trip.max_tokens
        trip.combine_buffer = torch.empty(local, slots, trip.hidden, dtype=torch.bfloat16, device=trip.topk_idx.device)
        return trip.combine_buffer

    def trip_of(self, handle: Any) -> Trip:
        require(
            isinstance(handle, LowLatencyHandle),
            lambda: f"handle is of type {type(handle).__name__}, expected one that low_latency_dispatch returned",
        )
        trip: Trip = handle.trip
        require_state(trip.owner is self, "handle is of another buffer: pass it to the buffer that dispatched")
        return trip

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        self._pools, self._sizes = [], {}


class Sources:
    """Where the rows of a dispatch came from; asked of the handle when somebody looks."""

    def __init__(self, trip: Trip) -> None:
        self._trip = trip
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None

    def _look(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._found is None:
            trip, size = self._trip, self._trip.owner.ranks.size
            local, device = trip.num_experts // size, trip.topk_idx.device
            tokens = torch.empty(local, size * trip.max_tokens, dtype=torch.int32, device=device)
            ranges = torch.empty(local, size, dtype=torch.int64, device=device)
            trip.lease.handle.sources(tokens, ranges)
            self._found = tokens, ranges
        return self._found

    def tokens(self) -> torch.Tensor:
        return self._look()[0]

    def ranges(self) -> torch.Tensor:
        return self._look()[1]


def _check_dispatch(
    x: Any,
    topk_idx: torch.Tensor,
    max_tokens: int,
    num_experts: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    num_ranks: int,
) -> None:
    check_topk_idx(topk_idx, num_experts, num_ranks)
    require(max_tokens >= 1, lambda: f"num_max_dispatch_tokens_per_rank is {max_tokens}, allowed: 1 and more")
    fits = isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous()
    require(fits, lambda: f"x is {describe(x)}, expected a contiguous [tokens, hidden] of torch.bfloat16")
    require(
        x.shape[0] == topk_idx.shape[0] and x.device == topk_idx.device,
        lambda: (
            f"x has {x.shape[0]} rows on {x.device}, topk_idx {topk_idx.shape[0]} on {topk_idx.device}: expected the"
            " same"
        ),
    )
    require(
        x.shape[0] <= max_tokens,
        lambda: f"x has {x.shape[0]} rows, allowed: at most num_max_dispatch_tokens_per_rank ({max_tokens})",
    )
    unit = 4 * BLOCK if use_ue8m0 else BLOCK if use_fp8 else 8
    require(
        x.shape[1] >= unit and x.shape[1] % unit == 0,
        lambda: f"x has {x.shape[1]} columns, allowed here: multiples of {unit}",
    )
    require(not use_ue8m0 or round_scale, "use_ue8m0 is True and round_scale False, allowed: both True")
    require(not use_ue8m0 or use_fp8, "use_ue8m0 is True and use_fp8 False, allowed: both True")
    require(topk_idx.is_contiguous(), "topk_idx is not contiguous")


def _check_combine(
    trip: Trip, x: Any, topk_idx: Any, topk_weights: Any, out: Any, waiting: Any, num_ranks: int
) -> None:
    shape = (trip.num_experts // num_ranks, num_ranks * trip.max_tokens, trip.hidden)
    require(
        tuple(x.shape) == shape and x.dtype == torch.bfloat16 and x.is_contiguous(),
        lambda: f"x is {describe(x)}, expected a contiguous {list(shape)} of torch.bfloat16, as dispatch returned it",
    )
    own = (trip.num_tokens, trip.topk)
    require(
        tuple(topk_idx.shape) == own, lambda: f"topk_idx is {describe(topk_idx)}, expected {list(own)} as in dispatch"
    )
    require(
        tuple(topk_weights.shape) == own and topk_weights.dtype == torch.float32,
        lambda: f"topk_weights is {describe(topk_weights)}, expected {list(own)} of torch.float32",
    )
    result = (trip.num_tokens, trip.hidden)
    require(
        out is None or (tuple(out.shape) == result and out.dtype == torch.bfloat16 and out.is_contiguous()),
        lambda: f"out is {describe(out)}, expected a contiguous {list(result)} of torch.bfloat16",
    )
    check_waiting(waiting, "combine_wait_recv_cost_stats", num_ranks)


def _check_statistics(
    tensor: torch.Tensor | None, name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    if tensor is None:
        return
    require(
        isinstance(tensor, torch.Tensor) and tuple(tensor.shape) in shapes and tensor.dtype == dtype,
        lambda: (
            f"{name} is {describe(tensor)}, expected {' or '.join(str(list(shape)) for shape in shapes)} of {dtype}"
        ),
    )


def check_waiting(tensor: torch.Tensor | None, name: str, num_ranks: int) -> None:
    _check_statistics(tensor, name, [(num_ranks,), (num_ranks, num_ranks)], torch.int64)
