# SPDX-License-Identifier: Apache-2.0
"""One rank's training: its share of every batch, its experts, and what ranks must tell each other besides tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import crossdock
import crossdock.torch
from model import Model, PlainMoe, Shape, make_expert
from text import Text


@dataclass
class Settings:
    """What a run does; shape and optimizer are the same for all numbers of ranks."""

    steps: int = 200
    learning_rate: float = 0.2
    momentum: float = 0.9
    mode: str = "ht"
    device: str = "cpu"
    checkpoint: str = ""
    shape: Shape = field(default_factory=Shape)


@dataclass
class Run:
    """losses: nats a token, a step each; seconds: for all steps of this call."""

    losses: list[float]
    seconds: float


def _sum_over_ranks(comm: crossdock.Communicator, own: Tensor) -> Tensor:
    """The sum in order of ranks, so that every rank gets the same bits."""
    parts = comm.all_gather(own.cpu().contiguous().numpy().tobytes())
    total = torch.frombuffer(bytearray(parts[0]), dtype=own.dtype).clone()
    for part in parts[1:]:
        total += torch.frombuffer(bytearray(part), dtype=own.dtype)
    return total.view(own.shape).to(own.device)


def _replicated(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that all ranks have; each expert is on one rank only, and its gradient is complete there."""
    return (parameter for name, parameter in model.named_parameters() if ".experts." not in name)


def _reduce_gradients(comm: crossdock.Communicator, model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in _replicated(model) if parameter.grad is not None]
    total = _sum_over_ranks(comm, torch.cat([gradient.flatten() for gradient in gradients]))
    start = 0
    for gradient in gradients:
        gradient.copy_(total[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def _checkpoint_file(settings: Settings, rank: int, num_ranks: int) -> Path:
    return Path(f"{settings.checkpoint}-{rank}-of-{num_ranks}.pt")


def _loop(settings: Settings, model: Model, comm: crossdock.Communicator | None) -> Run:
    rank, num_ranks = (comm.rank, comm.num_ranks) if comm is not None else (0, 1)
    shape, device = settings.shape, torch.device(settings.device)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    text = Text(shape.length)
    share = shape.num_sequences // num_ranks
    num_tokens = shape.num_sequences * shape.length
    losses: list[float] = []
    file = _checkpoint_file(settings, rank, num_ranks)
    if settings.checkpoint and file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]

    start = time.perf_counter()
    for step in range(len(losses), settings.steps):
        inputs, targets = (part[rank * share : (rank + 1) * share] for part in text.batch(step, shape.num_sequences))
        optimizer.zero_grad(set_to_none=False)
        loss = model.loss_sum(inputs.to(device), targets.to(device)) / num_tokens
        loss.backward()
        total = loss.detach().double().cpu()
        if comm is not None:
            _reduce_gradients(comm, model)
            total = _sum_over_ranks(comm, total)
        optimizer.step()
        losses.append(float(total))
    seconds = time.perf_counter() - start
    if settings.checkpoint:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, file)
    return Run(losses, seconds)


def train_alone(settings: Settings) -> Run:
    """The same model in one process, without Crossdock."""
    torch.set_num_threads(1)
    return _loop(settings, Model(settings.shape, PlainMoe), None)


def train_rank(comm: crossdock.Communicator, settings: Settings) -> Run:
    """One rank of the expert-parallel model; comm connects the processes, which are on one host."""
    torch.set_num_threads(1)
    shape, rank, num_ranks = settings.shape, comm.rank, comm.num_ranks
    ranks_of_experts = comm
    if settings.device != "cpu":
        from crossdock import nccl

        torch.cuda.set_device(rank % torch.cuda.device_count())
        first_id = comm.all_gather(nccl.unique_id() if rank == 0 else bytes(nccl.ID_BYTES))[0]
        ranks_of_experts = nccl.join(num_ranks, rank, first_id)
    algorithms = {"ht": crossdock.Algorithm.HIGH_THROUGHPUT, "ll": crossdock.Algorithm.LOW_LATENCY}
    with crossdock.torch.Exchange(
        ranks_of_experts,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        max_tokens=shape.num_sequences * shape.length // num_ranks,
        hidden=shape.hidden,
        algorithm=algorithms[settings.mode],
        max_in_flight=shape.num_layers,
    ) as exchange:
        first = rank * exchange.num_local_experts

        def make_moe(shape: Shape, gate: nn.Module, layer: int) -> nn.Module:
            own = [make_expert(shape, layer, first + number) for number in range(exchange.num_local_experts)]
            return crossdock.torch.ExpertParallel(exchange, gate, own)

        return _loop(settings, Model(shape, make_moe), comm)
