# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer, DeepEP's second interface."""

from __future__ import annotations

from typing import Any

import torch

from crossdock.copies import Shared
from crossdock.deep_ep.checks import (
    INT32_MAX,
    biases_of,
    check_count,
    check_counts,
    is_tensor,
    refuse,
    refuse_state,
    require,
    require_state,
    translated,
)
from crossdock.deep_ep.config import align
from crossdock.deep_ep.elastic_dispatch import Elastic
from crossdock.deep_ep.handles import EPHandle
from crossdock.deep_ep.ranks import Ranks, hosts_of, node_size_of, size_of
from crossdock.deep_ep.streams import Event
from crossdock.deep_ep.utils.event import EventHandle, EventOverlap
from crossdock.errors import Error

__all__ = [
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
]

SIZE_UNIT = 2 << 20
LARGEST_TOPK = 32  # what sizes are for where num_topk is not said
# By prefer_overlap_with_compute. With fewer, operations are slower; with more, only those of expanded rows are faster
# (docs/performance.md).
NUM_SMS = {True: 24, False: 32}
NUM_SMS_OF_EXPANDED = {True: 24, False: 64}


class ElasticBuffer(Shared):
    """Dispatch and combine between the ranks of a process group, on CPU and CUDA tensors.

    The constructor and all calls are collective. A buffer that is dropped without destroy keeps its memory until the
    same ranks make another buffer, or the process ends.

    - num_max_tokens_per_rank: M, if a dispatch does not pass it.
    - allow_multiple_reduction: a rank may round its sum of a token's expanded rows before it sends the sum. If it is
      False, the row of every choice travels, and the source rank adds them up in the order of choices and rounds once.
    - deterministic: combines of expanded rows go as if allow_multiple_reduction were False. So their bits do not depend
      on the number of ranks, or on which of them has an expert. Without it, too, rows are in the order of source rank
      and token, and sums the same in every run.
    - prefer_overlap_with_compute: operations whose call passes no number take fewer SMs.

    All other arguments are stored and have no effect.
    """

    _remedy = "make it anew in each process: ElasticBuffer(process_group, ...)"

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        require(group is not None, "group is None, expected a ProcessGroup")
        hint = ElasticBuffer.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        if num_bytes is not None:
            check_count("num_bytes", num_bytes, 0, "0 and more, or None")
        self.group = group
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.explicitly_destroy = explicitly_destroy
        self.num_bytes: int = hint if num_bytes is None else num_bytes
        flags = {"allow_multiple_reduction": bool(allow_multiple_reduction), "deterministic": bool(deterministic)}
        ranks = Ranks(group, None, {"class": "ElasticBuffer", **flags})
        self.runtime: Elastic | None = Elastic(ranks, adds_choices=bool(deterministic or not allow_multiple_reduction))
        self.rank_idx, self.num_ranks = ranks.rank, ranks.size
        self.num_scaleout_ranks, self.num_scaleup_ranks = 1, ranks.size
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, ranks.rank
        self.num_rdma_ranks, self.num_nvlink_ranks = ranks.num_nodes, ranks.node_size
        self.num_allocated_qps = num_allocated_qps or self.get_theoretical_num_qps(NUM_SMS[True])

    # ---- sizes and settings ----

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """A number of bytes, a multiple of 2 MiB, that grows with tokens, hidden and top-k."""
        check_counts(0, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk)
        row_bytes = hidden * (1 if use_fp8_dispatch else 2) + hidden // 32 + 8 * (num_topk or LARGEST_TOPK)
        return align(max(1, size_of(group) * num_max_tokens_per_rank * (row_bytes + 2 * hidden)), SIZE_UNIT)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Returns the SMs of operations whose num_sms is 0, except those of expanded rows, which may take more.

        It depends on prefer_overlap_with_compute alone, and is at most the number of SMs of the GPU.
        """
        return usual_sms(self.prefer_overlap_with_compute)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        check_count("num_sms", num_sms, 0)
        return max(1, num_sms // 2)

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def _open(self) -> Elastic:
        if self.runtime is None:
            refuse_state("the buffer is destroyed")
        return self.runtime

    def get_comm_stream(self) -> torch.cuda.Stream:
        return self._open().stream.of_current_device()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks per node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, all ranks): rows are in the order of all ranks, also on several nodes."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Waits on the CPU until all ranks are here and their devices are idle."""
        runtime = self._open()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        try:
            runtime.ranks.cpus.barrier()
        except Error as error:
            raise translated(error) from error

    def destroy(self) -> None:
        """Frees everything. Collective. Needs explicitly_destroy. May be called again."""
        require_state(self.explicitly_destroy, "explicitly_destroy is False, which leaves it to the process's end")
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()

    # ---- dispatch and combine ----

    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to every rank with experts of it.

        There it has one row, or with do_expand one row per expert.
        It returns (recv_x, recv_topk_idx, recv_topk_weights, handle, event).
        """
        runtime = self._open()
        values, scales = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
        do_expand, do_zero_padding = bool(do_expand), bool(do_zero_padding)
        statistics, settings = cumulative_local_expert_recv_stats, (do_zero_padding, bool(use_tma_aligned_col_major_sf))
        if do_zero_padding and not do_expand:
            refuse("do_zero_padding is True and do_expand False, allowed: both True")
        events = previous_event, async_with_compute_stream, previous_event_before_epilogue
        if handle is None:
            is_exact = do_cpu_sync is None or bool(do_cpu_sync)
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            numbers = num_experts, most, expert_alignment, num_sms, do_expand, is_exact
            arguments = values, scales, topk_idx, topk_weights, statistics, *numbers
            form = runtime.forms.find(*arguments)
            if form is None:
                form = runtime.form_of(*arguments, usual_sms(self.prefer_overlap_with_compute, do_expand))
                runtime.forms.keep(form, *arguments)
            given = form, values, scales, topk_idx, topk_weights, statistics, bool(do_handle_copy), *settings
            made, event = runtime.stream.run(values.device, runtime.dispatch, given, *events)
            return *made, event
        lease = runtime.lease_of(handle)
        require(topk_idx is None, "topk_idx is not allowed with a handle, which has the routing")
        require(not do_cpu_sync, "do_cpu_sync is True, allowed with a handle: False")
        again = ("num_experts", num_experts), ("expert_alignment", expert_alignment), ("do_expand", do_expand)
        for name, value in again:
            if value is not None and value != getattr(handle, name):
                refuse(f"{name} is {value}, the handle's is {getattr(handle, name)}")
        if num_sms != 0:
            check_count("num_sms", num_sms, 0, most=INT32_MAX)
        is_tensor("x", values)
        given = lease, values, scales, topk_weights, statistics, num_sms or handle.num_sms, *settings
        made, event = runtime.stream.run(values.device, runtime.send_again, given, *events)
        return *made, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Returns rows to their source ranks and sums them there, with up to two biases [T, H].

        It returns (combined_x [T, H], combined_topk_weights [T, K] or None, event). Weights return by column.
        """
        runtime = self._open()
        if num_sms != 0:
            check_count("num_sms", num_sms, 0, most=INT32_MAX)
        is_tensor("x", x)
        arguments = runtime.lease_of(handle), x, topk_weights, biases_of(bias), num_sms or handle.num_sms
        events = previous_event, async_with_compute_stream, previous_event_before_epilogue
        sums, event = runtime.stream.run(x.device, runtime.add_up, arguments, *events)
        return *sums, event


def usual_sms(prefers_overlap: object, expands: bool = False) -> int:
    usual = (NUM_SMS_OF_EXPANDED if expands else NUM_SMS)[bool(prefers_overlap)]
    if not torch.cuda.is_initialized():
        return usual
    there: int = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return max(4, min(usual, there // 2 * 2))


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(nodes, ranks per node), by host names. Collective."""
    hosts = hosts_of(group)
    node = node_size_of(hosts)
    return len(hosts) // node, node


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(1, all ranks): rows are in the order of all ranks, also on several nodes."""
    return 1, size_of(group)
