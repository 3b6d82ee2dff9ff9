# SPDX-License-Identifier: Apache-2.0
"""ExpertParallel: a Mixture-of-Experts layer whose experts are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from crossdock.errors import InvalidArgument
from crossdock.torch.exchange import Exchange, Received


def _apply(module: nn.Module, expert: int, rows: Tensor, weight: Tensor) -> Tensor:
    """The expert's weighted rows, which may be of another type before they are weighted, as under autocast."""
    result = module(rows)
    if not isinstance(result, Tensor):
        raise InvalidArgument(f"expert {expert} returned an object of type {type(result).__name__}, expected a tensor")
    weight = weight[:, None].to(rows.dtype)
    if not torch.compiler.is_compiling() and (
        result.shape != rows.shape or torch.result_type(result, weight) != rows.dtype
    ):
        raise InvalidArgument(
            f"expert {expert} returned {list(result.shape)} of {result.dtype}, expected: {list(rows.shape)} of "
            f"{rows.dtype}"
        )
    return result * weight


def apply_experts(experts: Iterable[nn.Module], received: Received) -> Tensor:
    """Passes every row through its local experts, and returns their weighted sums [N, H], ready for Exchange.combine.

    experts: one module for each of this rank's experts. On CPUs, too few are an error.
    While a CUDA graph is captured, every expert sees all N rows, because their number must not depend on the routing.
    """
    if not isinstance(experts, Iterable):
        raise InvalidArgument(
            f"experts is of type {type(experts).__name__}, expected one module for each of this rank's experts"
        )
    if not isinstance(received, Received):
        raise InvalidArgument(f"received is of type {type(received).__name__}, expected what dispatch returned")
    is_captured = received.rows.is_cuda and torch.cuda.is_current_stream_capturing()
    modules = list(experts)
    if received.experts.is_cpu and not torch.compiler.is_compiling():
        most = int(received.experts.max()) if received.experts.numel() > 0 else -1
        if most >= len(modules):
            raise InvalidArgument(
                f"experts has {len(modules)} modules, expected one for each of this rank's experts: a row is for "
                f"expert {most}"
            )
    result = torch.zeros_like(received.rows)
    for expert, module in enumerate(modules):
        chosen = received.experts == expert
        weight = (received.weights * chosen).sum(dim=1)
        if is_captured:
            rows = _apply(module, expert, received.rows, weight)
            result = torch.where(chosen.any(dim=1, keepdim=True), result + rows, result)
            continue
        index = chosen.any(dim=1).nonzero(as_tuple=True)[0]
        result = result.index_add(0, index, _apply(module, expert, received.rows[index], weight[index]))
    return result


class ExpertParallel(nn.Module):
    """x [..., H] -> [..., H]: a router chooses K of E experts for each token, and this rank hosts L of them.

    - exchange: its mode and recipes are those of the layer. A step has at most exchange.max_tokens tokens per rank. A
      rank may have none.
    - gate: x [B, H] -> logits [B, E], replicated on all ranks. The weights are the softmax over the K chosen logits.
    - experts: this rank's L modules, each rows [n, H] -> [n, H].
    - shared_expert: sees every token, and its result is added.
    - overlap: in low latency, the shared expert runs between the halves of the dispatch, while rows travel. Under
      torch.compile it does not, because there a dispatch is one operator.
    """

    def __init__(
        self,
        exchange: Exchange,
        gate: nn.Module,
        experts: Iterable[nn.Module],
        shared_expert: nn.Module | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.gate = gate
        self.experts = nn.ModuleList(experts)
        self.shared_expert = shared_expert
        self.overlap = overlap
        if len(self.experts) != exchange.num_local_experts:
            raise InvalidArgument(
                f"experts has {len(self.experts)} modules, expected one for each of this rank's "
                f"{exchange.num_local_experts} experts"
            )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.gate(tokens)
        if not isinstance(logits, Tensor):
            raise InvalidArgument(
                f"gate has returned an object of type {type(logits).__name__}, expected logits [B, E]"
            )
        num_experts = self.exchange.num_local_experts * self.exchange.num_ranks
        if logits.shape[-1] != num_experts:
            raise InvalidArgument(f"gate has returned {logits.shape[-1]} logits per token, expected {num_experts}")
        chosen, topk_idx = logits.float().topk(self.exchange.num_topk, dim=-1)
        weights = chosen.softmax(dim=-1)
        can_overlap = self.overlap and self.exchange.is_low_latency and not torch.compiler.is_compiling()
        if self.shared_expert is not None and can_overlap:
            receive = self.exchange.start_dispatch(tokens, topk_idx, weights)
            try:
                shared = self.shared_expert(tokens)
            finally:  # a dispatch that has begun must end
                received = receive()
        else:
            received = self.exchange.dispatch(tokens, topk_idx, weights)
            shared = self.shared_expert(tokens) if self.shared_expert is not None else None
        result = self.exchange.combine(apply_experts(self.experts, received), received)
        return (result if shared is None else result + shared).view_as(x)
