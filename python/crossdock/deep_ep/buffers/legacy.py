# SPDX-License-Identifier: Apache-2.0
"""Buffer, DeepEP's first interface: normal mode for many tokens, low latency for few."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from crossdock._core import (
    SideStream,
    count_routing,
    has_cuda,
    low_latency_combine,
    low_latency_dispatch,
)
from crossdock.copies import Shared
from crossdock.deep_ep import config as sizes
from crossdock.deep_ep.checks import (
    biases_of,
    check_count,
    check_counts,
    check_tensor,
    check_topk_idx,
    check_values,
    is_tensor,
    is_whole,
    refuse,
    refuse_state,
    require,
    require_state,
)
from crossdock.deep_ep.config import Config
from crossdock.deep_ep.handles import DispatchHandle
from crossdock.deep_ep.low_latency import LowLatency, explained
from crossdock.deep_ep.normal import Normal
from crossdock.deep_ep.ranks import Ranks
from crossdock.deep_ep.streams import CommStream, Event
from crossdock.deep_ep.utils.event import EventHandle, EventOverlap
from crossdock.errors import Error

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]


class Runtime:
    """What a Buffer holds until it is destroyed."""

    def __init__(self, ranks: Ranks, enable_masks: bool) -> None:
        self.ranks = ranks
        self.stream = CommStream()
        self.normal = Normal(ranks)
        self.low_latency = LowLatency(ranks, enable_masks)
        self.staging: dict[bool, torch.Tensor] = {}

    def close(self) -> None:
        self.normal.close()
        self.low_latency.close()
        self.ranks.close()


class Buffer(Shared):
    """Dispatch and combine between the ranks of a process group, on CPU and CUDA tensors.

    The constructor and all calls but get_dispatch_layout are collective. Memory grows with what is dispatched, in steps
    that all ranks take together.

    - group: any ProcessGroup. Or None, with an mpi4py communicator as comm. Either may be a crossdock.Communicator of
      CPU ranks, so ranks can be threads.
    - low_latency_mode: the low_latency_ functions may be called. The constructor allocates their memory if
      num_rdma_bytes is at least the last result of get_low_latency_rdma_size_hint. For other shapes, their first call
      allocates, on all ranks together.
    - enable_shrink: in low latency, ranks that do not answer are masked. This does not hold while memory is allocated.
    - explicitly_destroy: destroy() frees everything. Without it, a dropped buffer keeps its memory until the same ranks
      make another buffer, or the process ends.
    - num_nvl_bytes, num_rdma_bytes (but for low_latency_mode), num_qps_per_rank, allow_...: no effect.
    """

    _remedy = "make it anew in each process: Buffer(process_group, ...)"

    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
    ) -> None:
        check_counts(0, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        flags = {"low_latency_mode": bool(low_latency_mode), "enable_shrink": bool(enable_shrink)}
        ranks = Ranks(group, comm, {"class": "Buffer", **flags})
        self.rank, self.group_size = ranks.rank, ranks.size
        self.runtime: Runtime | None = Runtime(ranks, enable_shrink)
        if low_latency_mode:
            self._prepare_low_latency(self.runtime)

    def _prepare_low_latency(self, runtime: Runtime) -> None:
        """Allocates the low-latency memory now, if all ranks asked for the same size hint."""
        max_tokens, hidden, num_experts = sizes.shape_of_hint(self.num_rdma_bytes, self.group_size) or (0, 0, 0)
        has_gpu = has_cuda and torch.cuda.is_initialized()
        own = struct.pack("<4q", max_tokens, hidden, num_experts, has_gpu)
        if any(part != own for part in runtime.ranks.gather(own)) or max_tokens == 0:
            return
        device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        runtime.low_latency.pool(device, max_tokens, hidden, num_experts)

    # ---- functions of the class ----

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the SMs of dispatches and combines in normal mode that have no config. No effect on CPUs."""
        if not is_whole(new_num_sms, 1) or new_num_sms % 2 != 0:
            refuse(f"num_sms is {new_num_sms!r}, allowed: positive even numbers")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether there is a GPU backend; FP8 is always there."""
        return bool(has_cuda)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        check_count("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms, 24, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        check_count("num_ranks", num_ranks, 1)
        return Config(Buffer.num_sms, 8, 256, 6, 128)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """A number of bytes for num_rdma_bytes."""
        return sizes.low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    # ---- the buffer ----

    def _open(self) -> Runtime:
        if self.runtime is None:
            refuse_state("the buffer is destroyed")
        return self.runtime

    def destroy(self) -> None:
        """Frees everything. Collective; only with explicitly_destroy."""
        require_state(self.explicitly_destroy, "explicitly_destroy is False, which leaves it to the process's end")
        runtime = self._open()
        self.runtime = None
        runtime.close()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls; needs CUDA."""
        return self._open().stream.of_current_device()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """A view of memory as large as num_nvl_bytes, or num_rdma_bytes, from element offset on.

        No call uses this memory, so callers may do anything with it. The first call allocates it.
        """
        runtime, num_bytes = self._open(), self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if not isinstance(dtype, torch.dtype):
            refuse(f"dtype is of type {type(dtype).__name__}, expected a torch.dtype")
        check_count("offset", offset, 0)
        if size is not None and not isinstance(size, (tuple, list)):
            refuse(f"size is of type {type(size).__name__}, expected a torch.Size or None")
        if use_rdma_buffer not in runtime.staging:
            device = "cuda" if torch.cuda.is_initialized() else "cpu"
            with torch.inference_mode(False):  # it serves in all modes of autograd
                runtime.staging[use_rdma_buffer] = torch.zeros(num_bytes, dtype=torch.int8, device=device)
        whole = runtime.staging[use_rdma_buffer][: num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)[offset:]
        if size is None:
            return whole
        if any(extent < 0 for extent in size):
            refuse(f"size is {list(size)}, allowed: 0 and more each")
        num = torch.Size(size).numel()
        if num > len(whole):
            refuse(f"size is {list(size)}, {num} elements, but from offset on there are {len(whole)}")
        return whole[:num].view(size)

    # ---- normal mode ----

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts of topk_idx [T, K] per rank, node (None: there is one) and expert; [T, R]: which ranks get a token."""
        runtime = self._open()
        check_topk_idx(topk_idx, num_experts, self.group_size)
        check_values(topk_idx, num_experts)
        arguments = topk_idx, num_experts, self.group_size, runtime.ranks.num_nodes
        counts, event = runtime.stream.run(topk_idx.device, count_routing, arguments, previous_event, async_finish)
        return *counts, event

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Sends each token once to every rank that has experts of it.

        It returns (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event). With a
        handle, only recv_x and event are not None.

        - x: [T, H], or (values, scales [T, S] of 4 bytes each).
        - handle: may be used for any number of later calls.
        - topk_idx: without a handle, rows go to the ranks that it names.
        - is_token_in_rank: rows go to these ranks if there is neither handle nor topk_idx. If it does not match
          topk_idx, or counts do not, CPUs report it, and GPUs do not.

        On GPUs, a call without a handle waits for the device twice.
        """
        runtime, sms = self._open(), sizes.sms_of(config, Buffer.num_sms)
        values, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
        is_tensor("x", values)
        if handle is not None:
            require(topk_idx is None and topk_weights is None, "topk_idx and topk_weights: not allowed with a handle")
            again, send = (runtime.normal.lease_of(handle), values, scales, None, None, sms), runtime.normal.send_again
            (received, _, _), event = runtime.stream.run(values.device, send, again, previous_event, async_finish)
            return received, None, None, None, None, event
        layout = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        routing = topk_idx, topk_weights, expert_alignment, num_worst_tokens
        fresh = values, scales, layout, routing, num_tokens_per_rdma_rank is not None, sms
        made, event = runtime.stream.run(values.device, runtime.normal.dispatch, fresh, previous_event, async_finish)
        return *made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Event = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Returns rows to their source ranks and adds them up, with up to two biases [T, H]; weights alike, by column.

        Returns (combined_x [T, H], combined_topk_weights [T, K] or None, event).
        """
        runtime, sms = self._open(), sizes.sms_of(config, Buffer.num_sms)
        is_tensor("x", x)
        arguments = x, runtime.normal.lease_of(handle), topk_weights, biases_of(bias), sms
        sums, event = runtime.stream.run(x.device, runtime.normal.combine, arguments, previous_event, async_finish)
        return *sums, event

    # ---- low latency ----

    def _low_latency(self, is_async: bool = False, is_split: bool = False) -> LowLatency:
        runtime = self.runtime
        if runtime is None or not self.low_latency_mode:
            self._open()
            refuse_state("low_latency_mode is False: the buffer was made for the normal mode alone")
        if is_async and is_split:
            refuse("async_finish and return_recv_hook are both True, allowed: one")
        return runtime.low_latency

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing needs cleaning here."""
        self._open()

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor, tuple[Any, ...], EventOverlap, Callable[[], None] | None]:
        """Sends a row for each token and choice, and receives rows by expert: [L, R*M, H].

        It returns (recv_x, recv_count, handle, event, hook). With use_fp8, recv_x is (e4m3, scales).

        - The second-next dispatch of the same shape, type and stream writes into the memory of recv_x, unless a tensor
          or view of it is still held. Order reads on other streams before that dispatch.
        - If repeated ids bring an expert more than R*M rows, CPUs refuse the call, and on GPUs the group fails.
        - The statistics of waiting are the nanoseconds of the whole receive half. They are written on CPUs only.
        - use_nvfp4, of some builds of DeepEP, is refused. x_global_scale belongs to it and has no effect.
        """
        if use_nvfp4:
            refuse(
                "use_nvfp4 is True, allowed: False, since rows are sent as bf16 or as 8-bit floats: start SGLang with "
                "--deepep-dispatcher-output-dtype bf16 (or fp8), vLLM with VLLM_DEEPEPLL_NVFP4_DISPATCH=0"
            )
        low_latency, is_split = self._low_latency(async_finish, return_recv_hook), bool(return_recv_hook)
        statistics, waiting = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        max_tokens = num_max_dispatch_tokens_per_rank
        try:
            if statistics is None and waiting is None and not use_ue8m0:
                side = self._side(x) if async_finish else None
                at_once = low_latency_dispatch(
                    low_latency.forms, x, topk_idx, max_tokens, num_experts, use_fp8, round_scale, is_split, side
                )
                if at_once is not None:
                    return at_once  # type: ignore[no-any-return]
            is_tensor("x", x)
            settings = max_tokens, num_experts, use_fp8, round_scale, use_ue8m0
            arguments = is_split, x, topk_idx, statistics, waiting, *settings
            made, event = self._open().stream.run(x.device, low_latency.dispatch, arguments, None, async_finish)
            return *made[:3], event, made[3]
        except AssertionError:  # of this package
            raise
        except Error as error:
            raise explained(error) from error

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        *,
        overlap: bool = False,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int | None = None,
        threshold: int | None = None,
        num_sms: int | None = None,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Sums weight times row over each token's choices, in fp32, rounded once.

        It returns (combined_x [T, H], event, hook).

        - topk_idx: as dispatched. It may leave out choices (-1), and have a token's choices in another order. An expert
          to which the token was not dispatched is an error on CPUs, and adds nothing on GPUs.
        - use_logfmt: has no effect. Rows are sent as they are.
        - overlap: of some builds of DeepEP. Rows of x are sent while a kernel on another stream still makes others:
          those of a block, or of an expert, once its counter has the value. Clear the counters before the call. All
          other arguments after overlap belong to it.
        - comp_signal, block_m, threshold: counters int32 of blocks of block_m rows, [L * (R*M / block_m rounded up)] or
          more, and their value. src_signals, src_signal_expect_value: the same of whole experts, [L].
        - num_sms: what the combine takes of the GPU meanwhile (None: 24 at most); with return_recv_hook the hook takes
          as many as without overlap.
        - packed_recv_count: has no effect. The combine knows the rows of each expert.
        """
        signals = (comp_signal, block_m, threshold, src_signals, src_signal_expect_value, num_sms) if overlap else None
        low_latency, is_split = self._low_latency(async_finish, return_recv_hook), bool(return_recv_hook)
        waiting = combine_wait_recv_cost_stats
        try:
            if waiting is None and not zero_copy and signals is None:
                side = self._side(x) if async_finish else None
                at_once = low_latency_combine(low_latency.pools, x, topk_idx, topk_weights, handle, out, is_split, side)
                if at_once is not None:
                    return at_once  # type: ignore[no-any-return]
            require(not (use_logfmt and zero_copy), "use_logfmt and zero_copy are both True, allowed: one of them")
            is_tensor("x", x)
            arguments = x, topk_idx, topk_weights, handle, zero_copy, out, waiting, is_split, signals
            (sums, hook), event = self._open().stream.run(x.device, low_latency.combine, arguments, None, async_finish)
            return sums, event, hook
        except AssertionError:  # of this package
            raise
        except Error as error:
            raise explained(error) from error

    def _side(self, x: Any) -> SideStream | None:
        """Where an asynchronous call with x works; None: x is no tensor, which the call finds out."""
        return self._open().stream.side(x.device) if isinstance(x, torch.Tensor) else None

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> torch.Tensor:
        """[L, R*M, H] bf16 to be filled for a combine of this handle with zero_copy=True.

        Its memory serves again as that of a dispatch does, once the handle and the tensor are dropped.
        """
        return self._low_latency().combine_buffer(handle)

    # ---- masks ----

    def _masked(self) -> LowLatency:
        low_latency = self._low_latency()
        require_state(self.enable_shrink, "enable_shrink is False: the buffer was made without masks")
        return low_latency

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """mask: this rank neither sends to that rank nor waits for it. Local."""
        low_latency = self._masked()
        if not is_whole(rank_to_mask, 0, self.group_size - 1):
            refuse(f"rank_to_mask is {rank_to_mask!r}, allowed: 0..{self.group_size - 1}")
        low_latency.set_mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Fills mask_status [R] int32: 1 for a masked rank."""
        low_latency = self._masked()
        check_tensor("mask_status", mask_status, (self.group_size,), (torch.int32,))
        low_latency.query_masks(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """No rank is masked any more, in this rank's view. Local.

        A rank takes part again if it has made the same calls and cleans its own masks; a missing one is masked again
        by the next call, after the timeout.
        """
        self._masked().clean_masks()
