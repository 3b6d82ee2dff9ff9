# SPDX-License-Identifier: Apache-2.0
"""The faults of runs.FAULTS, planted in DeepEP's classes: what a dispatcher might do wrong to one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RANK = 1  # where they are planted: not the first, so that what happens there alone shows


def misrouted(ids: torch.Tensor, fault: str, num_experts: int, num_ranks: int) -> torch.Tensor:
    """ids [T, K] with a fault of routing. It makes no use of the host, so it can be captured."""
    if len(ids) == 0 or fault not in ("rank", "expert"):
        return ids
    experts = torch.arange(num_experts, device=ids.device)
    per_rank = num_experts // num_ranks
    is_near = experts // per_rank == ids[0, 0] // per_rank
    is_taken = (experts.unsqueeze(1) == ids[0].unsqueeze(0)).any(1)
    fits = (is_near if fault == "expert" else ~is_near) & ~is_taken
    changed = ids.clone()
    changed[0, 0] = (fits * (num_experts - experts)).argmax()
    return changed


def misweighted(weights: torch.Tensor, fault: str) -> torch.Tensor:
    """weights [T, K] with a fault of weights."""
    if len(weights) == 0 or fault != "weight":
        return weights
    changed = weights.clone()
    changed[0, 0], changed[0, -1] = weights[0, -1], weights[0, 0]
    return changed


def planted_buffer(buffer: type[Any], current: Callable[[], str]) -> type[Any]:
    """DeepEP's Buffer with the fault that current() names, or none, on rank RANK."""

    class Planted(buffer):  # type: ignore[misc]
        def _fault(self) -> str:
            return current() if self.rank == RANK else ""

        def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, *rest: Any, **named: Any) -> Any:
            wrong = misrouted(topk_idx, self._fault(), num_experts, self.group_size)
            return super().get_dispatch_layout(wrong, num_experts, *rest, **named)

        def dispatch(self, x: Any, **named: Any) -> Any:
            if named.get("topk_idx") is not None:
                num_experts = named["num_tokens_per_expert"].shape[0]
                named["topk_idx"] = misrouted(named["topk_idx"], self._fault(), num_experts, self.group_size)
                named["topk_weights"] = misweighted(named["topk_weights"], self._fault())
            return super().dispatch(x, **named)

        def low_latency_dispatch(
            self, x: Any, topk_idx: torch.Tensor, most: int, num_experts: int, *rest: Any, **named: Any
        ) -> Any:
            wrong = misrouted(topk_idx, self._fault(), num_experts, self.group_size)
            return super().low_latency_dispatch(x, wrong, most, num_experts, *rest, **named)

        def low_latency_combine(
            self, x: Any, topk_idx: torch.Tensor, topk_weights: torch.Tensor, *rest: Any, **named: Any
        ) -> Any:
            return super().low_latency_combine(x, topk_idx, misweighted(topk_weights, self._fault()), *rest, **named)

    return Planted


def planted_elastic_buffer(buffer: type[Any], current: Callable[[], str]) -> type[Any]:
    """The same of DeepEP's ElasticBuffer."""

    class Planted(buffer):  # type: ignore[misc]
        def dispatch(self, x: Any, **named: Any) -> Any:
            fault = current() if self.rank_idx == RANK else ""
            if fault and named.get("topk_idx") is not None:
                wrong = misrouted(named["topk_idx"], fault, named["num_experts"], self.num_ranks)
                named["topk_idx"] = wrong
                if named.get("topk_weights") is not None:
                    named["topk_weights"] = misweighted(named["topk_weights"], fault)
            return super().dispatch(x, **named)

    return Planted
