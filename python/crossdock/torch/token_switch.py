# SPDX-License-Identifier: Apache-2.0
"""The implementation that torch's wheels lack of torch.distributed's TokenSwitch, on CPUs and GPUs.

    import crossdock.torch.token_switch                              # registers it, once per process
    from torch.distributed._token_switch import TokenSwitchNCCL      # torch 2.15

    switch = TokenSwitchNCCL(process_group, num_experts, max_tokens, max_recv_tokens, hidden * 2)
    routing = switch.create_routing(topk_idx, layout="flat")         # or "expert_major"
    rows, weights, experts = switch.dispatch(routing, tokens, topk_weights, max_recv_tokens)
    result = switch.combine(routing, experts_of(rows), ...)          # both have gradients for rows, none for weights
    crossdock.torch.token_switch.close(switch)

TokenSwitchNCCL asks torch._nccl_ep for groups, handles and operations, which only builds with USE_NCCL_EP have; this
module takes that name. A switch is a high-throughput group, and a routing is a handle with its own metadata, so any
number of them may be open; the operations write into tensors that TokenSwitch allocates, or its caller.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from crossdock._core import (
    Algorithm,
    CombineOutputs,
    DispatchInputs,
    DispatchOutputs,
    Group,
    Layout,
    LayoutInfo,
)
from crossdock.errors import InvalidArgument, InvalidUsage
from crossdock.torch.communicators import communicator_of

NAME = "torch._nccl_ep"


class _NcclEpGroup:
    """One high-throughput group over the ranks of a process group. Making and closing it is collective."""

    def __init__(self, pg: Any, **fields: int) -> None:
        self._communicator = communicator_of(pg)
        try:
            self.group = Group(self._communicator, algorithm=Algorithm.HIGH_THROUGHPUT, **dict[str, Any](fields))
        except BaseException:
            self._communicator.close()
            raise
        self.num_local_experts = fields["num_experts"] // self.group.num_ranks

    @staticmethod
    def create(
        pg: Any,
        num_experts: int,
        max_dispatch_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        max_token_bytes: int,
    ) -> _NcclEpGroup:
        return _NcclEpGroup(
            pg,
            num_experts=num_experts,
            max_dispatch_tokens_per_rank=max_dispatch_tokens_per_rank,
            max_recv_tokens_per_rank=max_recv_tokens_per_rank,
            max_token_bytes=-(-max_token_bytes // 16) * 16,
        )

    def close(self) -> None:
        """Ends its routings, too."""
        self.group.close()
        self._communicator.close()


class _NcclEpHandle:
    """The routing of topk_idx [B, K], which may be overwritten as soon as this exists."""

    def __init__(
        self, group: _NcclEpGroup, topk_idx: torch.Tensor, counts: torch.Tensor | None, layout: Layout
    ) -> None:
        if topk_idx.dim() != 2:
            raise InvalidArgument(f"topk_idx has shape {list(topk_idx.shape)}, expected [B, K]")
        info = LayoutInfo(recv_total_counter=topk_idx.new_zeros(1, dtype=torch.int32))
        if counts is not None:
            if counts.dim() != 1 or counts.dtype != torch.int32 or len(counts) < group.num_local_experts:
                raise InvalidArgument(
                    f"per_expert_token_counts is {list(counts.shape)} of {counts.dtype}, expected one dimension of "
                    f"torch.int32 with at least {group.num_local_experts} elements, one for each local expert"
                )
            info.expert_counters = counts[: group.num_local_experts]
        self._total: Any = info.recv_total_counter
        self.handle = group.group.init_handle(layout, topk_idx.shape[1])
        self.handle.update(topk_idx.clone(memory_format=torch.contiguous_format), layout_info=info)

    @staticmethod
    def create(
        group: _NcclEpGroup, topk_idx: torch.Tensor, recv_expert_counter: torch.Tensor | None, layout: Layout
    ) -> _NcclEpHandle:
        return _NcclEpHandle(group, topk_idx, recv_expert_counter, layout)

    def get_num_recv_tokens(self) -> int:
        return int(self._total.item())


def _nccl_ep_dispatch(
    handle: _NcclEpHandle,
    tokens: torch.Tensor,
    topk_weights: torch.Tensor,
    out_tokens: torch.Tensor,
    out_topk_weights: torch.Tensor | None,
    out_topk_idx: torch.Tensor | None,
) -> None:
    inputs = DispatchInputs(tokens=tokens.contiguous(), topk_weights=topk_weights.contiguous())
    outputs = DispatchOutputs(tokens=out_tokens, topk_weights=out_topk_weights, topk_idx=out_topk_idx)
    handle.handle.dispatch(inputs, outputs)


def _nccl_ep_combine(handle: _NcclEpHandle, expert_tokens: torch.Tensor, out_tokens: torch.Tensor) -> None:
    handle.handle.combine(expert_tokens.contiguous(), CombineOutputs(tokens=out_tokens))


def close(switch: Any) -> None:
    """Closes what a TokenSwitchNCCL holds, collective; repeating it is fine. One that is dropped without this keeps its
    memory until the process ends."""
    if not isinstance(getattr(switch, "_group", None), _NcclEpGroup):
        raise InvalidArgument(f"switch is {switch!r}, expected a TokenSwitchNCCL that was made over {__name__}")
    switch._group.close()


def _register() -> None:
    own = sys.modules[__name__]
    loaded = sys.modules.setdefault(NAME, own)
    if loaded is not own:
        raise InvalidUsage(
            f"{NAME} is imported already, from {getattr(loaded, '__file__', 'elsewhere')}: import {__name__} before "
            "the first TokenSwitchNCCL is made, or start the program with crossdock-run, whose library that module uses"
        )
    torch._nccl_ep = own  # type: ignore[attr-defined]


_register()
