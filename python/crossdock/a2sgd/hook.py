# SPDX-License-Identifier: Apache-2.0
"""A communication hook for DistributedDataParallel."""

# Without `from __future__ import annotations`: DDP looks at the hook's own.
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock._core import A2sgd, A2sgdReport, Communicator
from crossdock.copies import Uncopied
from crossdock.errors import InvalidArgument, InvalidUsage

Scope = Literal["model", "bucket"]


class HookState(Uncopied):
    """What the hook keeps between steps; one per model. Collective: made by all ranks of the process group.

    scope "model" (the paper's): two means for the whole gradient, when its last bucket is ready. "bucket": two means
    for each of DDP's buckets, as soon as it is ready. group None: the default process group. The other arguments are
    those of crossdock.A2sgd. Close it before the process group is destroyed.
    """

    _remedy = "make another HookState for the other model; of a model in DistributedDataParallel, copy its module"

    def __init__(
        self,
        group: Any = None,
        scope: Scope = "model",
        *,
        sums: str = "fp32",
        skip_nonfinite: bool = False,
        timeout_s: float = 0.0,
        lsa_team_size: int = 0,
    ) -> None:
        if scope not in ("model", "bucket"):
            raise InvalidArgument(f"scope is {scope!r}, allowed: 'model', 'bucket'")
        if sums not in ("fp32", "fp64"):
            raise InvalidArgument(f"sums is {sums!r}, allowed: 'fp32', 'fp64'")
        from crossdock.torch import communicator_of

        self.communicator: Communicator = communicator_of(group)
        self.scope = scope
        self._options: dict[str, Any] = {
            "sums": sums,
            "skip_nonfinite": skip_nonfinite,
            "timeout_s": timeout_s,
            "lsa_team_size": lsa_team_size,
        }
        self._averagers: dict[int, tuple[list[int], A2sgd]] = {}  # with the pieces' sizes: DDP cuts new buckets once
        self._ready: list[Tensor] = []

    def average(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        if self.scope == "bucket":
            self._step(bucket.index(), [bucket.buffer()])
            return
        self._ready.append(bucket.buffer())
        if bucket.is_last():
            buffers, self._ready = self._ready, []
            self._step(0, buffers)

    def report(self, bucket: int = 0) -> A2sgdReport:
        """Reports of the latest step."""
        if bucket not in self._averagers:
            raise InvalidUsage(
                f"bucket {bucket} has no report, those with one: {sorted(self._averagers) or 'none yet'}"
            )
        return self._averagers[bucket][1].report()

    def close(self) -> None:
        for _, averager in self._averagers.values():
            averager.close()
        self._averagers = {}

    def _step(self, number: int, buffers: list[Tensor]) -> None:
        sizes = [buffer.numel() for buffer in buffers]
        known = self._averagers.get(number)
        if known is not None and sum(known[0]) != sum(sizes):
            known[1].close()
            known = None
        if known is None:
            names = [f"bucket {number if self.scope == 'bucket' else i}" for i in range(len(buffers))]
            known = (sizes, A2sgd(self.communicator, buffers, names=names, **self._options))
            self._averagers[number] = known
        averager = known[1]
        averager.set_pieces(buffers)
        averager.begin()
        averager.end()


def hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """For DistributedDataParallel.register_comm_hook(HookState(), hook). Gradients are changed in place."""
    buffer = bucket.buffer()
    state.average(bucket)
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future
