# SPDX-License-Identifier: Apache-2.0
"""The ranks' replicas of a model: how far they have diverged, and averaging them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from crossdock._core import Communicator
from crossdock.errors import InvalidUsage


def average_parameters(parameters: Iterable[Tensor], communicator: Communicator | None = None) -> None:
    """Replaces parameters by their means over the ranks. Collective.

    Over the communicator where it is of CPUs, else over torch.distributed's default process group. It sends the whole
    model, once per call, so it belongs to the end of training, or to every some hundredth step.
    """
    own = list(parameters)
    with torch.no_grad():
        for parameter, mean in zip(own, _means(own, communicator), strict=True):
            parameter.copy_(mean)


@dataclass(frozen=True)
class Drift:
    distance: float  # root mean square, over ranks, of a replica's distance from the replicas' mean
    relative: float  # the same as a part of the mean's norm


def drift(parameters: Iterable[Tensor], communicator: Communicator | None = None) -> Drift:
    """How far the ranks' replicas have diverged. Collective; sends the whole model once."""
    own = list(parameters)
    with torch.no_grad():
        means = _means(own, communicator)
        apart = sum(float((p.double() - m.double()).square().sum()) for p, m in zip(own, means, strict=True))
        norm = sum(float(mean.double().square().sum()) for mean in means) ** 0.5
        squares = _means([torch.tensor([apart], dtype=torch.float64, device=own[0].device)], communicator)
    distance = float(squares[0]) ** 0.5
    return Drift(distance, distance / norm if norm > 0 else 0.0)


def _means(tensors: list[Tensor], communicator: Communicator | None) -> list[Tensor]:
    if communicator is not None and communicator.is_cpu:
        return _means_over(tensors, communicator)
    if not dist.is_initialized():
        raise InvalidUsage("no communicator of CPUs was given, and torch.distributed is not initialised")
    means = [tensor.detach().clone() for tensor in tensors]
    for mean in means:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return means


def _means_over(tensors: list[Tensor], communicator: Communicator) -> list[Tensor]:
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu().numpy()
    gathered = [np.frombuffer(other) for other in communicator.all_gather(flat.tobytes())]
    total: np.ndarray[Any, Any] = np.add.reduce(gathered)
    parts = torch.from_numpy(total / communicator.num_ranks).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor) for part, tensor in zip(parts, tensors, strict=True)]
