# SPDX-License-Identifier: Apache-2.0
"""The ranks of a Buffer: who they are, and their communicators, one of CPUs always, one of GPUs once it is needed."""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from crossdock import nccl
from crossdock._core import Communicator, Group
from crossdock.deep_ep.errors import require, require_state, translated
from crossdock.errors import InvalidUsage
from crossdock.torch.communicators import introduce, name_of_host


def expect_group(group: Any) -> None:
    """A ProcessGroup with this rank."""
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    require(is_member, "group is a ProcessGroup without this rank: only its members make a buffer")
    for name in ("rank", "size"):
        fits = callable(getattr(group, name, None))
        require(fits, lambda: f"group is of type {type(group).__name__}, expected a ProcessGroup or Communicator")
    rank, num_ranks = group.rank(), group.size()
    require(
        0 <= rank < num_ranks,
        lambda: f"group is a ProcessGroup of {num_ranks} ranks without this one: only its members make a buffer",
    )


def hosts_of(comm: Communicator) -> list[str]:
    """The host's name of each rank; collective."""
    return [os.fsdecode(name).rstrip() for name in comm.all_gather(name_of_host().encode().ljust(256))]


def size_of(group: Any) -> int:
    """How many ranks a ProcessGroup or Communicator has."""
    if not isinstance(group, Communicator):
        expect_group(group)
    return group.num_ranks if isinstance(group, Communicator) else int(group.size())


@dataclass
class RankResources:
    """A buffer's communicators and groups, which outlive a buffer that is dropped without destroy.

    Peers may still write into the groups' memory then, and a garbage collector cannot wait for ranks. So the next
    buffer that the same ranks make together closes what all of them have dropped.
    """

    name: bytes  # the same on all ranks, unlike any other's
    rank: int
    size: int
    owned: list[Communicator] = field(default_factory=list)
    of_gpus: Communicator | None = None
    gpu: torch.device | None = None  # that of of_gpus
    groups: list[Group] = field(default_factory=list)

    def close(self) -> None:
        """Collective."""
        while self.groups:
            self.groups.pop(0).close()
        if self.of_gpus is not None:
            nccl.destroy(self.of_gpus)
            self.of_gpus = None
        while self.owned:
            self.owned.pop().close()


NAME_BYTES = 16
# A buffer's class and those of its arguments that must be the same on all ranks.
BUFFER = ("Buffer", "low_latency_mode", "enable_shrink")
ELASTIC_BUFFER = ("ElasticBuffer", "allow_multiple_reduction")
_CLASSES = (BUFFER, ELASTIC_BUFFER)
_SAME = struct.Struct("<3B")
_dropped: list[RankResources] = []


def close_dropped(comm: Communicator) -> None:
    """Closes what all ranks of comm have dropped; collective."""
    own = {
        resources.name: resources
        for resources in list(_dropped)
        if (resources.rank, resources.size) == (comm.rank, comm.num_ranks) and resources.owned
    }
    most = max(int.from_bytes(part, "little") for part in comm.all_gather(len(own).to_bytes(4, "little")))
    if most == 0:
        return
    gathered = comm.all_gather(b"".join(own).ljust(most * NAME_BYTES, b"\0"))
    lists = [{part[i : i + NAME_BYTES] for i in range(0, len(part), NAME_BYTES)} for part in gathered]
    for name in sorted(set.intersection(*lists) & own.keys()):
        _dropped.remove(own[name])
        own[name].close()


def _gather_of(group: Any, comm: Any) -> tuple[int, int, Callable[[Any], list[Any]]]:
    """Rank, number of ranks, and a function that gathers a Python object from all ranks."""
    if group is not None:
        expect_group(group)
        rank, num_ranks = int(group.rank()), int(group.size())

        def gather(own: Any) -> list[Any]:
            gathered: list[Any] = [None] * num_ranks
            dist.all_gather_object(gathered, own, group=group)
            return gathered

        return rank, num_ranks, gather
    for name in ("Get_rank", "Get_size", "allgather"):
        require(
            hasattr(comm, name), lambda: f"comm is of type {type(comm).__name__}, which has no {name}, as mpi4py's have"
        )
    return comm.Get_rank(), comm.Get_size(), comm.allgather


def _expect_same(parts: list[tuple[int, ...]]) -> None:
    own = _CLASSES[parts[0][0]]
    for rank, other in enumerate(parts):
        kind = _CLASSES[other[0]]
        if kind is not own:
            require_state(False, f"rank 0 makes {own[0]}, rank {rank} {kind[0]}: expected the same on all")
        for name, value, theirs in zip(own[1:], parts[0][1:], other[1:], strict=False):
            if value != theirs:
                message = f"{name} is {bool(value)} on rank 0, {bool(theirs)} on rank {rank}: expected the same on all"
                require_state(False, message)


class Ranks:
    """Collective over the ranks of group, a ProcessGroup, or comm, mpi4py's; either may be a Communicator of CPUs.

    names: BUFFER or ELASTIC_BUFFER. flags: the arguments that follow the class in names.
    """

    def __init__(self, group: Any, comm: Any = None, names: tuple[str, ...] = BUFFER, *flags: object) -> None:
        require(group is not None or comm is not None, "group and comm are None, expected one of them")
        if isinstance(group, Communicator):
            group, comm = None, group
        owned: list[Communicator] = []
        if isinstance(comm, Communicator) and group is None:
            require(comm.is_cpu, "comm is a communicator of GPUs, allowed here: one of CPUs")
            self.cpus = comm
            hosts = hosts_of(comm)
        else:
            rank, num_ranks, gather = _gather_of(group, comm)
            hosts = gather(name_of_host())
            self.cpus = introduce(rank, num_ranks, gather)
            owned.append(self.cpus)
            close_dropped(self.cpus)
        self.rank, self.size = self.cpus.rank, self.cpus.num_ranks
        same = _SAME.pack(_CLASSES.index(names), *(bool(flag) for flag in (*flags, False, False)[:2]))
        parts = self.cpus.all_gather(secrets.token_bytes(NAME_BYTES) + same)
        self.resources = RankResources(parts[0][:NAME_BYTES], self.rank, self.size, owned)
        self._drop = weakref.finalize(self, _dropped.append, self.resources)
        self._drop.atexit = False  # type: ignore[attr-defined]
        _expect_same([_SAME.unpack(part[NAME_BYTES:]) for part in parts])
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
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        resources = self.resources
        require(
            resources.gpu in (None, device),
            lambda: (
                f"tensors are on device {device}, the buffer's GPU is {resources.gpu}: call torch.cuda.set_device "
                "before the buffer is made"
            ),
        )
        if resources.of_gpus is None:
            unique = nccl.unique_id() if self.rank == 0 else bytes(nccl.ID_BYTES)
            unique = self.cpus.all_gather(unique)[0]
            with torch.cuda.device(device):
                resources.of_gpus, resources.gpu = nccl.join(self.size, self.rank, unique), device
        return resources.of_gpus

    def gather(self, own: bytes) -> list[bytes]:
        """The bytes of all ranks, the same number from each; takes a few µs between processes of one host."""
        try:
            return self.cpus.all_gather(own)
        except InvalidUsage as error:
            raise translated(error) from error

    def close(self) -> None:
        """Collective, after all groups are closed."""
        self._drop.detach()
        self.resources.close()
