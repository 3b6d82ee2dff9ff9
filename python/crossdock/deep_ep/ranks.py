# SPDX-License-Identifier: Apache-2.0
"""The ranks of a Buffer: who they are, and their communicators, one of CPUs always, one of GPUs once it is needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crossdock import nccl
from crossdock._core import Communicator
from crossdock.deep_ep.errors import require
from crossdock.torch.communicators import introduce, name_of_host


def size_of(group: Any) -> int:
    """How many ranks a ProcessGroup or Communicator has."""
    return group.num_ranks if isinstance(group, Communicator) else int(group.size())


def _gather_of(group: Any, comm: Any) -> tuple[int, int, Callable[[Any], list[Any]]]:
    """Rank, number of ranks, and how a Python object is told to all."""
    if group is not None:
        num_ranks: int = group.size()

        def gather(own: Any) -> list[Any]:
            everybody: list[Any] = [None] * num_ranks
            dist.all_gather_object(everybody, own, group=group)
            return everybody

        return group.rank(), num_ranks, gather
    for name in ("Get_rank", "Get_size", "allgather"):
        require(
            hasattr(comm, name), lambda: f"comm is of type {type(comm).__name__}, which has no {name}, as mpi4py's have"
        )
    return comm.Get_rank(), comm.Get_size(), comm.allgather


class Ranks:
    """Collective over the ranks of group, a ProcessGroup, or comm, mpi4py's; either may be a Communicator of CPUs."""

    def __init__(self, group: Any, comm: Any = None) -> None:
        require(group is not None or comm is not None, "group and comm are None, expected one of them")
        if isinstance(group, Communicator):
            group, comm = None, group
        self._owned: list[Communicator] = []
        self._of_gpus: Communicator | None = None
        if isinstance(comm, Communicator) and group is None:
            require(comm.is_cpu, "comm is a communicator of GPUs, allowed here: one of CPUs")
            self.cpus = comm
            hosts = [os.fsdecode(name).rstrip() for name in comm.all_gather(name_of_host().encode().ljust(256))]
        else:
            rank, num_ranks, gather = _gather_of(group, comm)
            hosts = gather(name_of_host())
            self.cpus = introduce(rank, num_ranks, gather)
            self._owned.append(self.cpus)
        self.rank, self.size = self.cpus.rank, self.cpus.num_ranks
        # Ranks of a host; 0 where hosts differ in their number of ranks, so that they are no nodes.
        of_host = [hosts.count(host) for host in hosts]
        self.node_size = of_host[0] if len(set(of_host)) == 1 else self.size

    @property
    def num_nodes(self) -> int:
        return self.size // self.node_size

    def communicator(self, device: torch.device) -> Communicator:
        """The one whose groups take tensors of this device; collective the first time."""
        if device.type == "cpu":
            return self.cpus
        require(device.type == "cuda", lambda: f"tensors are on device {device}, allowed: cpu, cuda")
        if self._of_gpus is None:
            unique = nccl.unique_id() if self.rank == 0 else bytes(nccl.ID_BYTES)
            unique = self.cpus.all_gather(unique)[0]
            with torch.cuda.device(device):
                self._of_gpus = nccl.join(self.size, self.rank, unique)
        return self._of_gpus

    def gather(self, own: bytes) -> list[bytes]:
        """Everybody's bytes, as many from each; a few microseconds between processes of one host."""
        return self.cpus.all_gather(own)

    def close(self) -> None:
        """Collective, after all groups are closed."""
        if self._of_gpus is not None:
            nccl.destroy(self._of_gpus)
            self._of_gpus = None
        for communicator in self._owned:
            communicator.close()
        self._owned = []
