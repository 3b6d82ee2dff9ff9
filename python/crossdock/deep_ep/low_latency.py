# SPDX-License-Identifier: Apache-2.0
"""The low-latency mode of Buffer, on groups and handles of that mode in expert-major layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from crossdock._core import (
    Algorithm,
    Forms,
    Layout,
    LowLatencyForm,
    LowLatencyLease,
    OverflowPolicy,
    PairMaker,
)
from crossdock.deep_ep.checks import (
    ID_TYPES,
    INT32_MAX,
    WrongCall,
    check_beside,
    check_count,
    check_tensor,
    check_topk_idx,
    describe,
    refuse,
    refuse_state,
    require,
    require_state,
    translated,
)
from crossdock.deep_ep.groups import PooledGroup, is_capturing
from crossdock.deep_ep.handles import LazyTuple
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.streams import on_this_stream
from crossdock.errors import Error, InvalidUsage, RemoteError, renamed

BLOCK = 128  # elements of a scale
MOST_TOPK = 11  # of DeepEP's callers: a group has memory for this many choices
# Arguments of calls for what the library's errors name, in this order.
_NAMES = {
    "num_max_dispatch_tokens_per_rank": "max_dispatch_tokens_per_rank",
    "config.": "",
    "max_dispatch_tokens_per_rank": "num_max_dispatch_tokens_per_rank",
    "max_token_bytes": "twice the hidden size (bytes of a row)",
}
MOST_PAIRS = 8  # kinds of tensors, [L, R*M, H] or scales, whose memories a Buffer keeps

# The receive half of an operation whose send half has been called.
Finish = Callable[[], None]


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


@contextmanager
def overlapped(
    lease: LowLatencyLease, comp_signal: Any, block_m: Any, threshold: Any, src_signals: Any, value: Any, num_sms: Any
) -> Iterator[None]:
    """Combines of the block send rows while the experts' kernel makes others, once it has added to their counters.

    Either set of SGLang's arguments: counters of blocks, with block_m and threshold, or of whole experts, with value.
    """
    given = (comp_signal is not None) + (src_signals is not None)
    if given != 1:
        refuse(f"overlap is True with {given} of comp_signal and src_signals, expected one of them")
    num_sms = 0 if num_sms is None else num_sms
    check_count("num_sms", num_sms, 0, most=INT32_MAX)
    if src_signals is None:
        check_count("block_m", block_m, 1, most=INT32_MAX)
        check_count("threshold", threshold, 1, most=INT32_MAX)
        name, counters, value = "comp_signal", comp_signal, threshold
    else:
        check_count("src_signal_expect_value", value, 1, most=INT32_MAX)
        name, counters, block_m = "src_signals", src_signals, INT32_MAX
    (experts, slots, _), device = lease.form.shape, lease.topk_idx.device
    least = experts * -(-slots // block_m)
    fits = isinstance(counters, torch.Tensor) and counters.dtype in (torch.int32, torch.uint32)
    if not fits or not counters.is_contiguous() or counters.numel() < least or counters.device != device:
        expected = f"a contiguous int32 or uint32 tensor with at least {least} elements on {device}"
        refuse(f"{name} is {describe(counters)}, expected {expected}")
    handle, done = lease.taken, counters.view(torch.int32).view(-1)
    try:
        handle.set_sms(num_sms)
        handle.set_overlap(done=done, block_rows=min(block_m, slots), done_value=value)
        yield
    finally:
        handle.set_sms(0)
        handle.set_overlap()


class LowLatencyHandle(LazyTuple):
    """What a low-latency dispatch returns: (src_info, layout_range, M, H, E).

    The first two are read from the library on access, once; the lease of the dispatch takes their places.
    """

    __slots__ = ()

    _placeholder = LowLatencyLease

    @property
    def lease(self) -> LowLatencyLease:
        found: LowLatencyLease = tuple.__getitem__(self, 0)
        return found

    def _made(self, place: int) -> torch.Tensor:
        lease = self.lease
        if lease.sources is None:
            require_state(not lease.form.pool.is_closed, "the buffer of this handle is destroyed")
            (local, slots, _), device = lease.form.shape, lease.topk_idx.device
            tokens = torch.empty(local, slots, dtype=torch.int32, device=device)
            ranges = torch.empty(local, slots // lease.form.max_tokens, dtype=torch.int64, device=device)
            lease.taken.sources(tokens, ranges)
            lease.sources = tokens, ranges
        found: torch.Tensor = lease.sources[place]
        return found


class LowLatency:
    """Of one Buffer."""

    def __init__(self, ranks: Ranks, enable_masks: bool) -> None:
        self.ranks = ranks
        self.enable_masks = enable_masks
        self._by_size: dict[tuple[str, int, int, int], PooledGroup] = {}
        self.pools: list[PooledGroup] = []
        self._masked = [False] * ranks.size
        self.forms = Forms()  # of dispatches
        self._pairs: dict[tuple[Any, ...], PairMaker] = {}  # the last looked up is last

    def pool(self, device: torch.device, max_tokens: int, hidden: int, num_experts: int) -> PooledGroup:
        """The group for operations of this shape; collective where it has to be made."""
        key = (device.type, device.index or 0, max_tokens, num_experts)
        pool = self._by_size.get(key)
        if pool is not None and 2 * hidden <= pool.row_bytes:
            return pool
        call = f"num_max_dispatch_tokens_per_rank {max_tokens}, hidden {hidden} and num_experts {num_experts}"
        try:
            with renamed(_NAMES):
                pool = PooledGroup(
                    self.ranks,
                    device,
                    Layout.EXPERT_MAJOR,
                    call,
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
                f"{error}; the first call with {call} makes memory together with all ranks: with num_rdma_bytes as "
                "get_low_latency_rdma_size_hint says for it, the constructor does"
            )
            raise RemoteError(message) from error
        self.pools.append(pool)
        if any(self._masked):
            pool.group.mask_update([not masked for masked in self._masked])
        self._by_size[key] = pool
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
        status = torch.empty(self.ranks.size, dtype=torch.int32, device="cpu" if pool.is_cpu else "cuda")
        pool.group.mask_query(status)
        return [value != 0 for value in status.tolist()]

    # ---- operations ----

    def dispatch(
        self, is_split: bool, x: torch.Tensor, topk_idx: torch.Tensor, statistics: Any, waiting: Any, *settings: Any
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, Finish | None]:
        """(recv_x, recv_count, handle, the receive half if is_split). settings: as _form_of has them."""
        given = x, topk_idx, statistics, waiting, *settings
        form: LowLatencyForm | None = self.forms.find(*given)
        if form is None:
            form = self._form_of(*given)
            self.forms.keep(form, *given)
        recv_x, counts, handle, _, receive = form.dispatch(x, topk_idx, is_split)
        exponents, powers = None, None
        if settings[-1]:  # use_ue8m0: exponents, four in an int32, are returned
            local, slots, num_scales = recv_x[1].shape
            sizes, strides = (local, slots, num_scales // 4), (slots * num_scales // 4, 1, slots)
            exponents = torch.empty_strided(sizes, strides, dtype=torch.int32, device=x.device)
            powers, recv_x = recv_x[1], (recv_x[0], exponents)

        def finish() -> None:
            self._receive(receive, waiting)
            if exponents is not None and powers is not None:
                exponents.copy_((powers.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32))
            if statistics is not None:
                statistics.add_(counts)

        has_more = exponents is not None or statistics is not None or waiting is not None
        if has_more and not is_split:
            finish()
        return recv_x, counts, handle, on_this_stream(x.device, finish) if has_more and is_split else receive

    def _form_of(
        self,
        x: Any,
        topk_idx: Any,
        statistics: Any,
        waiting: Any,
        max_tokens: Any,
        num_experts: Any,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
    ) -> LowLatencyForm:
        """Checks the arguments of a dispatch, all but the values."""
        check_count("num_max_dispatch_tokens_per_rank", max_tokens, 1, most=INT32_MAX)
        check_tensor("x", x, ("tokens", "hidden"), (torch.bfloat16,), dense=True)
        check_topk_idx(topk_idx, num_experts, self.ranks.size, x.device)
        require(topk_idx.is_contiguous(), "topk_idx is not contiguous, expected here: pass topk_idx.contiguous()")
        max_tokens, num_experts = int(max_tokens), int(num_experts)  # NumPy's are numbers, too
        (num_tokens, hidden), topk, device, size = x.shape, topk_idx.shape[1], x.device, self.ranks.size
        if num_tokens != topk_idx.shape[0]:
            refuse(f"x has {num_tokens} rows, topk_idx {topk_idx.shape[0]}: expected the same")
        if num_tokens > max_tokens:
            refuse(f"x has {num_tokens} rows, allowed: at most num_max_dispatch_tokens_per_rank ({max_tokens})")
        unit = 4 * BLOCK if use_ue8m0 else BLOCK if use_fp8 else 8
        if hidden == 0 or hidden % unit != 0:
            refuse(f"x has {hidden} columns, allowed here: multiples of {unit}")
        require(not use_ue8m0 or round_scale, "use_ue8m0 is True and round_scale False, allowed: both True")
        require(not use_ue8m0 or use_fp8, "use_ue8m0 is True and use_fp8 False, allowed: both True")
        local, slots = num_experts // size, size * max_tokens
        check_beside(topk_idx, None, statistics, local)
        _check_waiting("dispatch_wait_recv_cost_stats", waiting, size, device)
        pool = self.pool(device, max_tokens, hidden, num_experts)
        by_column, scales = use_fp8 and not use_ue8m0, None
        if use_fp8:
            num_scales = hidden // BLOCK
            strides = (slots * num_scales, 1, slots) if by_column else None
            scales = self._pair(torch.float32, device, (local, slots, num_scales), strides)
        return LowLatencyForm(
            pool,
            topk,
            (max_tokens, hidden, num_experts),
            x,
            self._pair(torch.float8_e4m3fn if use_fp8 else torch.bfloat16, device, (local, slots, hidden)),
            scales,
            bool(by_column),
            bool(round_scale),
        )

    def _pair(
        self,
        dtype: torch.dtype,
        device: torch.device,
        sizes: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        of_combine: bool = False,
    ) -> PairMaker:
        """Of a kind of tensors, shared by all forms that have it; of_combine: of a combine's own buffers."""
        key = dtype, device, sizes, strides, of_combine
        pair = self._pairs.pop(key, None)
        if pair is None:
            if len(self._pairs) == MOST_PAIRS:
                self._pairs.pop(next(iter(self._pairs))).clear()
                self.forms.clear()  # some have it
            pair = PairMaker(dtype, device, sizes, strides)
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
        signals: tuple[Any, ...] | None,
    ) -> tuple[torch.Tensor, Finish | None]:
        """(combined_x, the receive half if is_split). signals: arguments of overlapped."""
        lease = self.lease_of(handle)
        if lease.is_pending:
            refuse_state("handle: its earlier call has not received yet: call the hook that it returned first")
        form, given = lease.form, (topk_idx, topk_weights, out, waiting)
        if zero_copy:
            buffer = lease.combine_buffer
            if buffer is None:
                refuse_state(
                    "zero_copy is True, but get_next_low_latency_combine_buffer was not called for this handle"
                )
            if x.shape != buffer.shape:
                refuse(f"x is {describe(x)}, expected as the combine buffer")
            x = buffer
        if form.combines.find(x, *given) is None:
            _check_combine(lease, x, *given, self.ranks.size)
            form.combines.keep(True, x, *given)
        ids = lease.topk_idx
        if not lease.is_as_dispatched(topk_idx):
            dispatched = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
            lease.taken.routing(dispatched)  # the caller's tensor may hold other choices by now
            ids, topk_weights = as_dispatched(dispatched, topk_idx, topk_weights)
        with nullcontext() if signals is None else overlapped(lease, *signals):
            sums, receive = lease.combine(x, ids, topk_weights.contiguous(), out, is_split)
        if waiting is None:
            return sums, receive
        if is_split:
            return sums, partial(self._receive, receive, waiting)
        self._receive(receive, waiting)
        return sums, None

    def _receive(self, receive: Finish | None, waiting: torch.Tensor | None) -> None:
        """The receive half, if there is one. On CPUs its time, in nanoseconds, is added to waiting for all others."""
        begin = time.perf_counter_ns()
        if receive is not None:
            receive()
        if waiting is not None and waiting.is_cpu:
            elapsed, rank = time.perf_counter_ns() - begin, self.ranks.rank
            own = waiting if waiting.dim() == 1 else waiting[rank]
            own[:rank] += elapsed
            own[rank + 1 :] += elapsed

    def combine_buffer(self, handle: Any) -> torch.Tensor:
        lease = self.lease_of(handle)
        if lease.combine_buffer is None:
            of = torch.bfloat16, lease.topk_idx.device, lease.form.shape
            lease.combine_buffer = self._pair(*of, of_combine=True)(is_capturing())
        buffer: torch.Tensor = lease.combine_buffer
        return buffer

    def lease_of(self, handle: Any) -> LowLatencyLease:
        if not isinstance(handle, LowLatencyHandle):
            refuse(f"handle is of type {type(handle).__name__}, expected one that low_latency_dispatch returned")
        is_own = handle.lease.form.pool in self.pools
        require_state(is_own, "handle is of another buffer: pass it to the buffer that dispatched")
        return handle.lease

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.pools, self._by_size = [], {}
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
        refuse(
            f"topk_idx has expert {int(topk_idx[token, column])} for token {token}, expected experts to which "
            "low_latency_dispatch sent it, in any order, or -1"
        )
    # Of columns that repeat an expert each has its share of a weight: their rows are the same.
    shares = topk_weights / pairs.sum(dim=2).clamp_min(1)
    moved = torch.where(pairs, shares.unsqueeze(2), 0.0).sum(dim=1)
    weights = torch.where(is_moved, moved, topk_weights + moved)
    is_kept = ~is_moved | pairs.any(dim=1)
    return torch.where(is_kept, dispatched, -1), weights


def _check_combine(
    lease: LowLatencyLease, x: Any, topk_idx: Any, topk_weights: Any, out: Any, waiting: Any, num_ranks: int
) -> None:
    own, device, shape, bf16 = lease.topk_idx.shape, lease.topk_idx.device, lease.form.shape, (torch.bfloat16,)
    check_tensor("x", x, shape, bf16, device, True, ", as dispatch returned it")
    check_tensor("topk_idx", topk_idx, own, ID_TYPES, device, note=", as in dispatch")
    check_tensor("topk_weights", topk_weights, own, (torch.float32,), device)
    if out is not None:
        check_tensor("out", out, (own[0], shape[2]), bf16, device, True)
    _check_waiting("combine_wait_recv_cost_stats", waiting, num_ranks, device)


def _check_waiting(name: str, waiting: Any, num_ranks: int, device: torch.device) -> None:
    if waiting is not None:
        is_square = isinstance(waiting, torch.Tensor) and waiting.dim() == 2
        sizes = (num_ranks,) * (2 if is_square else 1)
        check_tensor(name, waiting, sizes, (torch.int64,), device, note=f", or [{num_ranks}, {num_ranks}]")
