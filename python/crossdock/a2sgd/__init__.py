# SPDX-License-Identifier: Apache-2.0
"""A2SGD for PyTorch: data-parallel training with 64 bits per rank and step.

    model = DistributedDataParallel(model)
    model.register_comm_hook(crossdock.a2sgd.HookState(), crossdock.a2sgd.hook)

    # or without DDP, over any crossdock.Communicator:
    optimizer = crossdock.a2sgd.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, average_every=100)

Replicas drift apart, since each keeps its own gradient's deviations: average_parameters brings them together, drift
measures how far they are. docs/a2sgd.md has what that means for training.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    message = f"crossdock.a2sgd needs PyTorch: pip install 'crossdock[torch]' ({error}); crossdock.A2sgd does not"
    raise ModuleNotFoundError(message, name=error.name) from error

from crossdock.a2sgd.hook import HookState, hook
from crossdock.a2sgd.optimizer import Optimizer
from crossdock.a2sgd.replicas import Drift, average_parameters, drift

__all__ = ["Drift", "HookState", "Optimizer", "average_parameters", "drift", "hook"]
