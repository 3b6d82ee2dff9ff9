# SPDX-License-Identifier: Apache-2.0
"""The ranks of a Buffer: who they are, and their communicators, one of CPUs always, one of GPUs once it is needed."""

from __future__ import annotations

import os
import secrets
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from crossdock import nccl
from crossdock._core import Communicator, Group
from crossdock.deep_ep.checks import refuse, refuse_state, require, translated
from crossdock.errors import InvalidUsage
from crossdock.torch.communicators import gather_of, introduce, name_of_host


def expect_group(group: Any) -> None:
    """A ProcessGroup with this rank."""
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    require(is_member, "group is a ProcessGroup without this rank: only its members make a buffer")
    for name in ("rank", "size"):
        if not callable(getattr(group, name, None)):
            refuse(f"group is of type {type(group).__name__}, expected a ProcessGroup or Communicator")
    rank, num_ranks = group.rank(), group.size()
    if not 0 <= rank < num_ranks:
        refuse(f"group is a ProcessGroup of {num_ranks} ranks without this one: only its members make a buffer")


def hosts_of(group: Any) -> list[str]:
    """The host's name of each rank of a ProcessGroup or Communicator; collective."""
    if isinstance(group, Communicator):
        return [os.fsdecode(part).rstrip() for part in group.all_gather(os.fsencode(name_of_host()).ljust(256))]
    expect_group(group)
    return gather_of(group)(name_of_host())


def node_size_of(hosts: list[str]) -> int:
    """Ranks of a host; all ranks where hosts differ in their number of ranks, so that they are no nodes."""
    of_host = {hosts.count(host) for host in hosts}
    return of_host.pop() if len(of_host) == 1 else len(hosts)


def size_of(group: Any) -> int:
    """How many ranks a ProcessGroup or Communicator has."""
    if isinstance(group, Communicator):
        return group.num_ranks
    expect_group(group)
    return int(group.size())


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
    borrowed: Communicator | None = None  # instead of own ones
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
# By their names, values that must be the same on all ranks; only the first may decide which others there are.
Settings = dict[str, object]
SETTINGS_BYTES = 256
_dropped: list[RankResources] = []


def close_dropped(comm: Communicator) -> None:
    """Closes what all ranks of comm have dropped; collective."""
    own = {
        resources.name: resources
        for resources in list(_dropped)
        if (resources.rank, resources.size) == (comm.rank, comm.num_ranks)
        and (resources.owned or resources.borrowed is comm)
    }
    most = max(int.from_bytes(part, "little") for part in comm.all_gather(len(own).to_bytes(4, "little")))
    if most == 0:
        return
    gathered = comm.all_gather(b"".join(own).ljust(most * NAME_BYTES, b"\0"))
    lists = [{part[i : i + NAME_BYTES] for i in range(0, len(part), NAME_BYTES)} for part in gathered]
    for name in sorted(set.intersection(*lists) & own.keys()):
        _dropped.remove(own[name])
        own[name].close()


def _joined(group: Any, comm: Any) -> Communicator:
    """A communicator of the ranks of a ProcessGroup, or of mpi4py's comm."""
    if group is not None:
        expect_group(group)
        return introduce(int(group.rank()), int(group.size()), gather_of(group))
    for name in ("Get_rank", "Get_size", "allgather"):
        if not hasattr(comm, name):
            refuse(f"comm is of type {type(comm).__name__}, which has no {name}, as mpi4py's have")
    return introduce(comm.Get_rank(), comm.Get_size(), comm.allgather)


def said(settings: Settings) -> bytes:
    """As ranks exchange them."""
    return "\n".join(map(str, settings.values())).encode().ljust(SETTINGS_BYTES)


def expect_same(settings: Settings, parts: list[bytes]) -> None:
    """Refuses what the ranks have said, each at the begin of its part, unless it is the same."""
    own = said(settings)
    if not any([not part.startswith(own) for part in parts]):
        return
    by_rank = [part[:SETTINGS_BYTES].decode().strip().split("\n") for part in parts]
    for name, values in zip(settings, zip(*by_rank, strict=True), strict=True):
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), 0)
        if rank > 0:
            refuse_state(
                f"{name}: the ranks' values are [{', '.join(values)}], expected the same on all: rank 0 has "
                f"{values[0]}, rank {rank} has {values[rank]}"
            )


class Ranks:
    """Collective over the ranks of group, a ProcessGroup, or comm, mpi4py's; either may be a Communicator of CPUs.

    settings: of the buffer that is made.
    """

    def __init__(self, group: Any, comm: Any = None, settings: Settings | None = None) -> None:
        require(group is not None or comm is not None, "group and comm are None, expected one of them")
        if isinstance(comm, Communicator) and group is None:
            group = comm
        is_given = isinstance(group, Communicator)
        require(not is_given or group.is_cpu, "comm is a communicator of GPUs, allowed here: one of CPUs")
        self.cpus: Communicator = group if is_given else _joined(group, comm)
        close_dropped(self.cpus)
        self.rank, self.size = self.cpus.rank, self.cpus.num_ranks
        settings = settings or {}
        parts = self.cpus.all_gather(said(settings) + secrets.token_bytes(NAME_BYTES))
        owned, borrowed = ([], self.cpus) if is_given else ([self.cpus], None)
        self.resources = RankResources(parts[0][-NAME_BYTES:], self.rank, self.size, owned, borrowed)
        self._drop = weakref.finalize(self, _dropped.append, self.resources)
        self._drop.atexit = False  # type: ignore[attr-defined]
        expect_same(settings, parts)
        self.node_size = node_size_of(hosts_of(self.cpus))

    @property
    def num_nodes(self) -> int:
        return self.size // self.node_size

    def communicator(self, device: torch.device) -> Communicator:
        """The one whose groups take tensors of this device; collective the first time."""
        if device.type == "cpu":
            return self.cpus
        if device.type != "cuda":
            refuse(f"tensors are on device {device}, allowed: cpu, cuda")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        resources = self.resources
        if resources.gpu not in (None, device):
            refuse(
                f"tensors are on device {device}, the buffer's GPU is {resources.gpu}: call torch.cuda.set_device "
                "before the buffer is made"
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
