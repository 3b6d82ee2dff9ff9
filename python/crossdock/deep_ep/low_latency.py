# SPDX-License-Identifier: Apache-2.0
"""The low-latency mode of Buffer, on groups and handles of that mode in expert-major layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from crossdock._core import (
    Algorithm,
    Forms,
    Handle,
    Layout,
    LowLatencyForm,
    LowLatencyLease,
    OverflowPolicy,
    PairMaker,
    combine_weighted,
    forget_arrays,
    most_rows_of_expert,
)
from crossdock.copies import Uncopied
from crossdock.deep_ep.errors import WrongCall, require, require_state, translated
from crossdock.deep_ep.events import EventOverlap
from crossdock.deep_ep.groups import PooledGroup, is_capturing
from crossdock.deep_ep.layout import (
    ID_TYPES,
    INT32_MAX,
    check_count,
    check_memory,
    check_tensor,
    check_topk_idx,
    check_values,
    describe,
    is_same_memory,
)
from crossdock.deep_ep.makers import Extents, pair_maker, piece_maker, shaped_maker
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.scales import Packed
from crossdock.deep_ep.streams import on_this_stream
from crossdock.errors import Error, InvalidUsage, RemoteError

BLOCK = 128  # elements of a scale
MOST_TOPK = 11  # of DeepEP's callers: a group has memory for this many choices
MOST_PAIRS = 8  # kinds of tensors, [L, R*M, H] or scales, whose memories a Buffer keeps

# The receive half of an operation whose send half has been called.
Finish = Callable[[], None]
Shape = tuple[int, int, int]


def explained(error: Error) -> Error:
    """As DeepEP's callers expect it, of a dispatch or a combine."""
    if isinstance(error, InvalidUsage) and "send_only operations of this group are pending" in str(error):
        pending = str(error).split(maxsplit=1)[0]
        return WrongCall(
            f"return_recv_hook is True while {pending} earlier calls wait for their hooks, allowed: at most {pending}: "
            "call one of these hooks, or drop the hook and the handle of a call that was given up"
        )
    if isinstance(error, RemoteError) and "in LL dispatch" in str(error):
        shapes = "num_max_dispatch_tokens_per_rank or num_experts"
        return RemoteError(f"{error}; ranks that pass different {shapes} wait for each other, too")
    return translated(error)


class Form(LowLatencyForm):
    """What follows from the form of a dispatch's arguments, which are found right."""

    __slots__ = ("device", "hidden", "num_tokens", "packed_scales", "shape")

    def __init__(
        self,
        x: torch.Tensor,
        topk: int,
        pool: PooledGroup,
        shape: Shape,
        numbers: Shape,
        scales: str | None,
        rounds: bool,
        pair: Callable[..., PairMaker],
    ) -> None:
        """shape: of the rows; numbers: (M, H, E); scales: one of "fp32" and "packed", or None for bf16; pair: as
        LowLatency's."""
        (num_tokens, hidden), device, (local, slots, _) = x.shape, x.device, shape
        num_scales = hidden // BLOCK
        of_scales = (local, slots, num_scales)
        by_column = (slots * num_scales, 1, slots) if scales == "fp32" else None
        super().__init__(
            pool,
            topk,
            pool.free(topk),
            numbers,
            piece_maker(device, local),
            pair(torch.float8_e4m3fn if scales else torch.bfloat16, device, shape),
            pair(torch.float32, device, of_scales, by_column) if scales else None,
            shaped_maker(torch.bfloat16, device, (num_tokens, hidden)),
            scales == "fp32",
            rounds,
            pool.is_cpu,
        )
        self.device, self.hidden, self.num_tokens, self.shape = device, hidden, num_tokens, shape
        self.packed_scales = of_scales if scales == "packed" else None


class RoundTrip(LowLatencyLease):
    """One dispatch and the combines that follow it."""

    __slots__ = ()

    form: Form

    @property
    def handle(self) -> Handle:
        require_state(not self.form.pool.is_closed, "the buffer of this handle is destroyed")
        return self.taken

    def look(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows came from; the library is asked once."""
        if self.sources is None:
            (local, slots, _), device = self.form.shape, self.topk_idx.device
            tokens = torch.empty(local, slots, dtype=torch.int32, device=device)
            ranges = torch.empty(local, slots // self.form.max_tokens, dtype=torch.int64, device=device)
            self.handle.sources(tokens, ranges)
            self.sources = tokens, ranges
        found: tuple[torch.Tensor, torch.Tensor] = self.sources
        return found

    def dispatched(self) -> torch.Tensor:
        """The choices [T, K] that were dispatched; the caller's tensor may hold others by now."""
        ids = torch.empty(self.topk_idx.shape, dtype=torch.int32, device=self.topk_idx.device)
        self.handle.routing(ids)
        return ids

    def bind(self, topk_idx: torch.Tensor) -> None:
        """Combines go by topk_idx from now on: as dispatched, or -1 where a choice is left out."""
        if topk_idx is not self.bound:
            self.handle.rebind(topk_idx)
            self.bound = topk_idx

    def forget(self) -> None:
        """Lets go of tensors that finished calls have used; torch knows by streams when their memory is free."""
        if not self.form.is_cpu:  # CPUs keep none
            forget_arrays(self.handle)


class LowLatencyHandle(Uncopied, tuple[Any, ...]):
    """What a low-latency dispatch returns: (src_info, layout_range, M, H, E).

    The first two are read from the library on access; until then the RoundTrip takes their places.
    """

    __slots__ = ()

    _remedy = "dispatch again, which returns another one"

    def __copy__(self) -> LowLatencyHandle:
        return self

    @property
    def round_trip(self) -> RoundTrip:
        found: RoundTrip = super().__getitem__(0)
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return (*self.round_trip.look(), *super().__getitem__(slice(2, None)))[index]
        found = super().__getitem__(index)
        return self.round_trip.look()[index % len(self)] if found is self.round_trip else found


class LowLatency:
    """Of one Buffer."""

    def __init__(self, ranks: Ranks, enable_masks: bool) -> None:
        self.ranks = ranks
        self.enable_masks = enable_masks
        self._sizes: dict[tuple[str, int, int, int], tuple[PooledGroup, int]] = {}  # and the elements of its rows
        self.pools: list[PooledGroup] = []
        self._masked = [False] * ranks.size
        self.forms = Forms()  # of dispatches
        self._pairs: dict[tuple[Any, ...], PairMaker] = {}  # the last looked up is last

    def pool(self, device: torch.device, max_tokens: int, hidden: int, num_experts: int) -> PooledGroup:
        """The group for operations of this shape; collective where it has to be made."""
        key = (device.type, device.index or 0, max_tokens, num_experts)
        size = self._sizes.get(key)
        if size is not None and hidden <= size[1]:
            return size[0]
        is_captured = is_capturing()
        require_state(
            not is_captured,
            lambda: (
                f"the first call with num_max_dispatch_tokens_per_rank {max_tokens}, hidden {hidden} and num_experts "
                f"{num_experts} makes memory, which cannot be captured: make one such call before"
            ),
        )
        try:
            pool = PooledGroup(
                self.ranks,
                device,
                Layout.EXPERT_MAJOR,
                algorithm=Algorithm.LOW_LATENCY,
                num_experts=num_experts,
                max_dispatch_tokens_per_rank=max_tokens,
                max_token_bytes=2 * hidden,
                enable_mask=self.enable_masks,
                api_version=1,  # whose scales lie as DeepEP's do
                num_topk=min(MOST_TOPK, num_experts),
                overflow_policy=OverflowPolicy.TRAP,
            )
        except RemoteError as error:
            message = (
                f"{error}; the first call with num_max_dispatch_tokens_per_rank {max_tokens}, hidden {hidden} and "
                f"num_experts {num_experts} makes memory together with all ranks: with num_rdma_bytes as "
                "get_low_latency_rdma_size_hint says for it, the constructor does"
            )
            raise RemoteError(message) from error
        self.pools.append(pool)
        if any(self._masked):
            pool.group.mask_update([not masked for masked in self._masked])
        self._sizes[key] = pool, hidden
        self.forms.clear()  # shorter rows are for this group, too, on all ranks
        return pool

    # ---- masks ----

    def set_mask(self, rank: int, masked: bool) -> None:
        """Local: this rank neither sends to that rank nor waits for it."""
        self._masked[rank] = masked
        for pool in self.pools:
            active = self._active(pool)
            active[rank] = not masked
            pool.group.mask_update(active)

    def query_masks(self, status: torch.Tensor) -> None:
        """1 for a masked rank, in groups of any shape."""
        if not self.pools:
            status.copy_(torch.tensor(self._masked, dtype=torch.int32, device="cpu"))
            return
        status.zero_()
        for pool in self.pools:
            active = torch.empty_like(status)
            pool.group.mask_query(active)
            status |= (active == 0).to(status.dtype)

    def clean_masks(self) -> None:
        """Local: no rank is masked here any more. One that still does not answer is masked again by the next call."""
        self._masked = [False] * self.ranks.size
        for pool in self.pools:
            pool.group.mask_update([True] * self.ranks.size)

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
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Finish | None]:
        """(recv_x, recv_count, handle, an empty event, the receive half if is_split)."""
        key = x, topk_idx, statistics, waiting, max_tokens, num_experts, use_fp8, round_scale, use_ue8m0
        form: Form | None = self.forms.find(*key)
        if form is None:
            arguments = x, topk_idx, max_tokens, num_experts, use_fp8, round_scale, use_ue8m0
            _check_dispatch(*arguments, self.ranks.size)
            shapes: list[tuple[int, ...]] = [(num_experts // self.ranks.size,)]
            _check_statistics(statistics, "cumulative_local_expert_recv_stats", shapes, torch.int32, x.device)
            check_waiting(waiting, "dispatch_wait_recv_cost_stats", self.ranks.size, x.device)
            form = self._form_of(*arguments)
            self.forms.keep(form, *key)
        if form.is_cpu:
            check_values(topk_idx, num_experts)
            most = most_rows_of_expert(topk_idx, num_experts)
            if most > max_tokens:
                message = (
                    f"topk_idx has an expert {most} times, since rows repeat it, allowed: at most "
                    f"num_max_dispatch_tokens_per_rank ({max_tokens}) times, for which recv_x has room"
                )
                require(False, message)
        try:
            recv_x, counts, handle, event, hook = form.dispatch(x, topk_idx, is_split)
        except Error as error:
            raise explained(error) from error
        finish: Finish | None = hook
        packed = None
        if form.packed_scales is not None:
            packed = Packed(recv_x[1], form.packed_scales)
            recv_x = recv_x[0], packed.tensor
        if packed is not None or statistics is not None or waiting is not None:
            finish = partial(self._finish, handle.round_trip, counts, packed, statistics, waiting, is_split)
            if not is_split:
                finish()
                finish = None
            elif not form.is_cpu:
                finish = on_this_stream(form.device, finish)
        return recv_x, counts, handle, event, finish

    def _finish(
        self,
        round_trip: RoundTrip,
        counts: torch.Tensor,
        packed: Packed | None,
        statistics: torch.Tensor | None,
        waiting: torch.Tensor | None,
        is_split: bool,
    ) -> None:
        """What is left of a dispatch once it has sent."""
        self._receive(round_trip, is_split, waiting)
        if packed is not None:
            packed.finish()
        if statistics is not None:
            statistics.add_(counts)

    def _form_of(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> Form:
        hidden, size = x.shape[1], self.ranks.size
        pool = self.pool(x.device, max_tokens, hidden, num_experts)
        scales = None if not use_fp8 else "packed" if use_ue8m0 else "fp32"
        shape, numbers = (num_experts // size, size * max_tokens, hidden), (max_tokens, hidden, num_experts)
        return Form(x, topk_idx.shape[1], pool, shape, numbers, scales, bool(round_scale), self._pair)

    def _pair(
        self,
        dtype: torch.dtype,
        device: torch.device,
        sizes: Extents,
        strides: Extents | None = None,
        of_combine: bool = False,
    ) -> PairMaker:
        """Of a kind of tensors, shared by all forms that have it; of_combine: of a combine's own buffers."""
        key = dtype, device, sizes, strides, of_combine
        pair = self._pairs.pop(key, None)
        if pair is None:
            if len(self._pairs) == MOST_PAIRS:
                self._pairs.pop(next(iter(self._pairs))).clear()
                self.forms.clear()  # some have it
            pair = pair_maker(dtype, device, sizes, strides)
        self._pairs[key] = pair
        return pair

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
    ) -> tuple[torch.Tensor, EventOverlap, Finish | None]:
        """(combined_x, an empty event, the receive half if is_split)."""
        round_trip = self.round_trip_of(handle)
        if round_trip.is_pending:
            require_state(False, "handle: its earlier call has not received yet: call the hook that it returned first")
        if zero_copy:
            require_state(
                round_trip.combine_buffer is not None,
                "zero_copy is True, but get_next_low_latency_combine_buffer was not called for this handle",
            )
            assert round_trip.combine_buffer is not None
            require(
                x.shape == round_trip.combine_buffer.shape,
                lambda: f"x is {describe(x)}, expected as the combine buffer",
            )
            x = round_trip.combine_buffer
        form = round_trip.form
        if form.combines.find(x, topk_idx, topk_weights, out, waiting) is None:
            _check_combine(form, x, topk_idx, topk_weights, out, waiting, self.ranks.size)
            form.combines.keep(True, x, topk_idx, topk_weights, out, waiting)
        if out is None:
            out = form.make_sums()
        if not is_same_memory(topk_idx, round_trip.topk_idx):
            ids, topk_weights = as_dispatched(round_trip.dispatched(), topk_idx, topk_weights)
            round_trip.bind(ids)
        else:
            round_trip.bind(round_trip.topk_idx)
        try:
            combine_weighted(round_trip.handle, x, topk_weights.contiguous(), out, is_split)
        except Error as error:
            raise explained(error) from error
        round_trip.is_pending = is_split
        if is_split:
            finish: Finish = partial(self._receive, round_trip, True, waiting)
            return out, EventOverlap(), finish if form.is_cpu else on_this_stream(form.device, finish)
        if waiting is not None:
            self._receive(round_trip, False, waiting)
        else:
            round_trip.forget()
        return out, EventOverlap(), None

    def _receive(self, round_trip: RoundTrip, is_split: bool, waiting: torch.Tensor | None) -> None:
        """The receive half. On CPUs its time, in nanoseconds, is added to waiting for all other ranks."""
        begin = 0 if waiting is None else time.perf_counter_ns()
        if is_split:
            round_trip.handle.complete()
            round_trip.is_pending = False
        round_trip.forget()
        if waiting is not None and waiting.is_cpu:
            elapsed, rank = time.perf_counter_ns() - begin, self.ranks.rank
            own = waiting if waiting.dim() == 1 else waiting[rank]
            own[:rank] += elapsed
            own[rank + 1 :] += elapsed

    def combine_buffer(self, handle: Any) -> torch.Tensor:
        round_trip = self.round_trip_of(handle)
        form = round_trip.form
        made: torch.Tensor = self._pair(torch.bfloat16, form.device, form.shape, of_combine=True)(is_capturing())
        round_trip.combine_buffer = made
        return made

    def round_trip_of(self, handle: Any) -> RoundTrip:
        if not isinstance(handle, LowLatencyHandle):
            kind = type(handle).__name__
            require(False, f"handle is of type {kind}, expected one that low_latency_dispatch returned")
        round_trip: RoundTrip = handle.round_trip
        require_state(
            round_trip.form.pool in self.pools, "handle is of another buffer: pass it to the buffer that dispatched"
        )
        return round_trip

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.pools, self._sizes = [], {}
        self.forms.clear()
        for pair in self._pairs.values():
            pair.clear()  # handles that are left have them
        self._pairs.clear()


def as_dispatched(
    dispatched: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A combine's own choices [T, K] and weights in the columns of the dispatch: -1 for those that it leaves out.

    An expert that the dispatch did not choose has no row: an error on CPUs, nothing on GPUs, which do not check.
    """
    is_moved = topk_idx != dispatched
    if topk_idx.is_cpu and not is_moved.any():
        return dispatched, topk_weights
    # [T, K, K]: column k of the combine is column j of the dispatch, one that has moved, too, where there is one.
    same = (topk_idx.unsqueeze(2) == dispatched.unsqueeze(1)) & (is_moved & (topk_idx >= 0)).unsqueeze(2)
    both = same & is_moved.unsqueeze(1)
    pairs = torch.where(both.any(dim=2, keepdim=True), both, same)
    is_missing = is_moved & (topk_idx >= 0) & ~pairs.any(dim=2)
    if topk_idx.is_cpu and is_missing.any():
        token, column = is_missing.nonzero()[0].tolist()
        message = (
            f"topk_idx has expert {int(topk_idx[token, column])} for token {token}, expected experts to which "
            "low_latency_dispatch sent it, in any order, or -1"
        )
        require(False, message)
    # Of columns that repeat an expert each has its share of a weight: their rows are the same.
    shares = topk_weights / pairs.sum(dim=2).clamp_min(1)
    moved = torch.where(pairs, shares.unsqueeze(2), 0.0).sum(dim=1)
    weights = torch.where(is_moved, moved, topk_weights + moved)
    is_kept = ~is_moved | pairs.any(dim=1)
    return torch.where(is_kept, dispatched, -1), weights


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
    check_count("num_experts", num_experts, 1, most=INT32_MAX)
    check_count("num_max_dispatch_tokens_per_rank", max_tokens, 1, most=INT32_MAX)
    check_topk_idx(topk_idx, num_experts, num_ranks)
    fits = isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous()
    require(fits, lambda: f"x is {describe(x)}, expected a contiguous [tokens, hidden] of torch.bfloat16")
    check_memory("x", x, None)
    check_memory("topk_idx", topk_idx, x.device)
    require(
        x.shape[0] == topk_idx.shape[0],
        lambda: f"x has {x.shape[0]} rows, topk_idx {topk_idx.shape[0]}: expected the same",
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
    form: Form, x: Any, topk_idx: Any, topk_weights: Any, out: Any, waiting: Any, num_ranks: int
) -> None:
    shape, device = form.shape, form.device
    for name, tensor in {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights, "out": out}.items():
        if tensor is not None or name != "out":
            check_tensor(name, tensor)
            check_memory(name, tensor, device)
    require(
        tuple(x.shape) == shape and x.dtype == torch.bfloat16 and x.is_contiguous(),
        lambda: f"x is {describe(x)}, expected a contiguous {list(shape)} of torch.bfloat16, as dispatch returned it",
    )
    own = (form.num_tokens, form.num_topk)
    require(
        tuple(topk_idx.shape) == own and topk_idx.dtype in ID_TYPES,
        lambda: f"topk_idx is {describe(topk_idx)}, expected {list(own)} of torch.int64, as in dispatch",
    )
    require(
        tuple(topk_weights.shape) == own and topk_weights.dtype == torch.float32,
        lambda: f"topk_weights is {describe(topk_weights)}, expected {list(own)} of torch.float32",
    )
    result = (form.num_tokens, form.hidden)
    require(
        out is None or (tuple(out.shape) == result and out.dtype == torch.bfloat16 and out.is_contiguous()),
        lambda: f"out is {describe(out)}, expected a contiguous {list(result)} of torch.bfloat16",
    )
    check_waiting(waiting, "combine_wait_recv_cost_stats", num_ranks, device)


def _check_statistics(
    tensor: torch.Tensor | None,
    name: str,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor is None:
        return
    require(
        isinstance(tensor, torch.Tensor) and tuple(tensor.shape) in shapes and tensor.dtype == dtype,
        lambda: (
            f"{name} is {describe(tensor)}, expected {' or '.join(str(list(shape)) for shape in shapes)} of {dtype}"
        ),
    )
    check_memory(name, tensor, device)


def check_waiting(tensor: torch.Tensor | None, name: str, num_ranks: int, device: torch.device) -> None:
    _check_statistics(tensor, name, [(num_ranks,), (num_ranks, num_ranks)], torch.int64, device)
