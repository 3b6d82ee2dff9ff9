# SPDX-License-Identifier: Apache-2.0
"""Communicators from process groups of torch.distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crossdock import nccl
from crossdock._core import Communicator
from crossdock.errors import InvalidUsage


def communicator_of(group: Any = None) -> Communicator:
    """Returns the Communicator of a process group (None: the default one). Collective over its ranks.

    - A group of NCCL lends its own communicator. Destroy the process group after the Groups.
    - A group of CPUs (gloo) is used once, to introduce its processes to each other. On several hosts its ranks must be
      numbered host by host.

    It raises InvalidUsage if torch.distributed is not initialised, if this process is not in the group, or if a group
    of NCCL has no communicator, one of another size, or one of an NCCL that is too old.
    """
    if not dist.is_initialized():
        raise InvalidUsage("torch.distributed is not initialised: call init_process_group first")
    group = group if group is not None else dist.group.WORLD
    if dist.get_rank(group) < 0:
        raise InvalidUsage(f"rank {dist.get_rank()} is not in the process group: only its members call communicator_of")
    if dist.get_backend(group) == "nccl":
        return _borrowed(group)
    return introduce(dist.get_rank(group), dist.get_world_size(group), gather_of(group))


def gather_of(group: Any) -> Callable[[Any], list[Any]]:
    """A function that gathers an object of each rank of a process group; collective."""

    def gather(own: Any) -> list[Any]:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, own, group=group)
        return gathered

    return gather


def introduce(rank: int, num_ranks: int, gather: Callable[[Any], list[Any]]) -> Communicator:
    """A Communicator of CPU processes, which exchange addresses with gather: it returns all ranks' objects."""
    own = (name_of_host(), Communicator.unique_id() if rank == 0 else b"", _address() if rank == 0 else "")
    gathered: list[tuple[str, bytes, str]] = gather(own)
    _, unique_id, address = gathered[0]
    if all(host == gathered[0][0] for host, _, _ in gathered):
        return Communicator.join(num_ranks, rank, unique_id)
    return Communicator.join_hosts(num_ranks, rank, address)


def name_of_host() -> str:
    return os.environ.get("CROSSDOCK_HOST") or socket.gethostname()


def _address() -> str:
    """CROSSDOCK_ADDRESS, or a port of this host that is free now."""
    if given := os.environ.get("CROSSDOCK_ADDRESS"):
        return given
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def _borrowed(group: Any) -> Communicator:
    nccl.check_version()
    device = torch.device("cuda", torch.cuda.current_device())
    nccl.offer_plugin()  # has no effect if torch has made a communicator before
    # torch makes the communicator with the first operation.
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
    torch.cuda.synchronize(device)
    backend = group._get_backend(device)
    pointer = int(backend._comm_ptr()) if hasattr(backend, "_comm_ptr") else 0
    if pointer == 0:
        raise InvalidUsage(
            f"torch {torch.__version__} does not give its NCCL communicator: make one with NCCL and pass its address "
            "to Communicator.adopt"
        )
    communicator = Communicator.adopt(pointer)
    if communicator.num_ranks != dist.get_world_size(group):
        raise InvalidUsage(
            f"the process group has {dist.get_world_size(group)} ranks, its NCCL communicator {communicator.num_ranks}"
        )
    return communicator
