# SPDX-License-Identifier: Apache-2.0
"""Crossdock for PyTorch: dispatch and combine as operators with gradients, and a module.

    exchange = crossdock.torch.Exchange(comm, num_experts=8, num_topk=2, max_tokens=256, hidden=64)
    received = exchange.dispatch(tokens, topk_idx, topk_weights)     # rows of this rank's experts
    result = exchange.combine(experts(received), received)          # [B, H], summed over ranks

It works in the same way in both modes and on both devices: low latency and high throughput, CPU and CUDA.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    message = f"crossdock.torch needs PyTorch: pip install 'crossdock[torch]' ({error}); crossdock itself does not"
    raise ModuleNotFoundError(message, name=error.name) from error

from crossdock.torch.communicators import communicator_of
from crossdock.torch.exchange import Exchange, Received
from crossdock.torch.expert_parallel import ExpertParallel, apply_experts
from crossdock.torch.symmetric import SymmetricMemory

__all__ = ["Exchange", "ExpertParallel", "Received", "SymmetricMemory", "apply_experts", "communicator_of"]
