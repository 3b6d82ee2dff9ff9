# SPDX-License-Identifier: Apache-2.0
"""The ranks' replicas of a model: how far they have diverged, and averaging them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from crossdock._core import Communicator
from crossdock.errors import InvalidArgument, InvalidUsage


def average_parameters(parameters: Iterable[Tensor], communicator: Communicator | None = None) -> None:
    """Replaces parameters by their means over the ranks. Collective.

    Over the communicator where it is of CPUs, else over torch.distributed's default process group. It sends the whole
    model, once per call, so it belongs to the end of training, or to every some hundredth step.
    Parameters are of floating point, with the same shapes and dtypes on all ranks.
    """
    own = _replica(parameters, communicator)
    with torch.no_grad():
        for parameter, mean in zip(own, _means(own, communicator), strict=True):
            parameter.copy_(mean)


@dataclass(frozen=True)
class Drift:
    distance: float  # root mean square, over ranks, of a replica's distance from the replicas' mean
    relative: float  # the same as a part of the mean's norm; inf where only that is 0


def drift(parameters: Iterable[Tensor], communicator: Communicator | None = None) -> Drift:
    """How far the ranks' replicas have diverged. Collective; sends the whole model once."""
    own = _replica(parameters, communicator)
    with torch.no_grad():
        means = _means(own, communicator)
        apart = sum(float((p.double() - m.double()).square().sum()) for p, m in zip(own, means, strict=True))
        norm = sum(float(mean.double().square().sum()) for mean in means) ** 0.5
        squares = _means([torch.tensor([apart], dtype=torch.float64, device=own[0].device)], communicator)
    distance = float(squares[0]) ** 0.5
    if norm == 0:
        return Drift(distance, math.inf if distance > 0 else 0.0)
    return Drift(distance, distance / norm)


def _replica(parameters: Iterable[Tensor], communicator: Communicator | None) -> list[Tensor]:
    """As a list; refuses what has no mean over the ranks. Collective."""
    own = list(parameters)
    if not own:
        raise InvalidArgument("parameters is empty, allowed: one tensor or more")
    for i, tensor in enumerate(own):
        if not tensor.is_floating_point():
            raise InvalidArgument(f"parameters[{i}] is of {tensor.dtype}, allowed: dtypes of floating point")
    form = repr([(tuple(tensor.shape), tensor.dtype) for tensor in own])
    first, *others = _gather(hashlib.sha256(form.encode()).digest(), communicator, own[0].device)
    if ranks := [rank for rank, other in enumerate(others, 1) if other != first]:
        raise InvalidUsage(
            f"parameters differ between ranks in number, shapes or dtypes: ranks {ranks} have others than rank 0"
        )
    return own


def _gather(own: bytes, communicator: Communicator | None, device: torch.device) -> list[bytes]:
    """Of all ranks; as many bytes on each."""
    if communicator is not None and communicator.is_cpu:
        return communicator.all_gather(own)
    if not dist.is_initialized():
        raise InvalidUsage("no communicator of CPUs was given, and torch.distributed is not initialised")
    sent = torch.tensor(list(own), dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [bytes(part.tolist()) for part in received]


def _means(tensors: list[Tensor], communicator: Communicator | None) -> list[Tensor]:
    if communicator is not None and communicator.is_cpu:
        return _means_over(tensors, communicator)
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
