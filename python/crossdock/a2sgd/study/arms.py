# SPDX-License-Identifier: Apache-2.0
"""Ways to average the workers' gradients [workers, entries], in place. A2SGD's is the library's; the others are
plain."""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from crossdock._core import A2sgd, Communicator

TOP_K_PART = 0.001
QSGD_LEVELS, QSGD_BUCKET = 7, 512  # three bits of magnitude and one of sign; a float per bucket


class Arm(Protocol):
    def average(self, gradients: Tensor) -> None: ...
    def message_bits(self) -> int: ...  # of one worker and step
    def close(self) -> None: ...


class NoCommunication:
    def average(self, gradients: Tensor) -> None:
        pass

    def message_bits(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Dense(NoCommunication):
    def __init__(self, entries: int) -> None:
        self.entries = entries

    def average(self, gradients: Tensor) -> None:
        gradients.copy_(gradients.mean(dim=0).expand_as(gradients))

    def message_bits(self) -> int:
        return 32 * self.entries


class TopK(NoCommunication):
    """Each worker's largest entries; what it keeps back is added to its next gradient."""

    def __init__(self, workers: int, entries: int) -> None:
        self.count = max(1, round(TOP_K_PART * entries))
        self.kept = torch.zeros(workers, entries, dtype=torch.float32, device="cpu")

    def average(self, gradients: Tensor) -> None:
        self.kept += gradients
        places = self.kept.abs().topk(self.count, dim=1).indices
        sent = torch.zeros_like(self.kept).scatter_(1, places, self.kept.gather(1, places))
        self.kept -= sent
        gradients.copy_(sent.mean(dim=0).expand_as(gradients))

    def message_bits(self) -> int:
        return 64 * self.count


class Qsgd(NoCommunication):
    """Multiples of a seventh of the bucket's largest magnitude, rounded at random so that the mean is right."""

    def __init__(self, entries: int, seed: int) -> None:
        self.buckets = -(-entries // QSGD_BUCKET)
        self.random = torch.Generator().manual_seed(seed)

    def average(self, gradients: Tensor) -> None:
        workers, entries = gradients.shape
        padded = gradients.new_zeros(workers, self.buckets * QSGD_BUCKET)
        padded[:, :entries] = gradients
        cut = padded.view(workers, self.buckets, QSGD_BUCKET)
        unit = cut.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / QSGD_LEVELS
        random = torch.rand(cut.shape, generator=self.random, dtype=torch.float32, device="cpu")
        levels = (cut.abs() / unit + random).floor()
        decoded = (levels * unit * cut.sign()).view(workers, -1)[:, :entries]
        gradients.copy_(decoded.mean(dim=0).expand_as(gradients))

    def message_bits(self) -> int:
        return self.buckets * (32 + 4 * QSGD_BUCKET)


class TwoMeans(NoCommunication):
    """One rank per worker, all driven by one thread: begin never waits, and every end finds all means."""

    def __init__(self, gradients: Tensor) -> None:
        self.communicators = Communicator.create_threads(len(gradients))
        self.averagers: list[A2sgd] = [None] * len(gradients)  # type: ignore[list-item]

        def make(worker: int) -> None:
            self.averagers[worker] = A2sgd(self.communicators[worker], [gradients[worker]])

        self._in_threads(make)

    def average(self, gradients: Tensor) -> None:
        for averager in self.averagers:
            averager.begin()
        for averager in self.averagers:
            averager.end()

    def message_bits(self) -> int:
        return 64

    def close(self) -> None:
        self._in_threads(lambda worker: self.averagers[worker].close())
        for communicator in self.communicators:
            communicator.close()

    def _in_threads(self, program: object) -> None:
        """What is collective takes a thread per rank."""
        threads = [threading.Thread(target=program, args=(worker,)) for worker in range(len(self.averagers))]  # type: ignore[arg-type]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


ARMS = ("dense", "a2sgd", "top-k", "qsgd", "none")


def make_arm(name: str, gradients: Tensor, seed: int) -> Arm:
    """gradients: the memory that average will get in every step."""
    workers, entries = gradients.shape
    if name == "dense":
        return Dense(entries)
    if name == "a2sgd":
        return TwoMeans(gradients)
    if name == "top-k":
        return TopK(workers, entries)
    if name == "qsgd":
        return Qsgd(entries, seed)
    return NoCommunication()
