# SPDX-License-Identifier: Apache-2.0
"""A2SGD on GPUs, as test_gpu.py runs it in every rank: the optimizer, the hook of DistributedDataParallel, graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import crossdock as ep
import crossdock.a2sgd as a2
from test_a2sgd import gradient_of, moved
from test_a2sgd_torch import backward, flat_gradient, model_of

Comm = ep.Communicator


def everybodys(comm: Comm, own: Any) -> list[Any]:
    """Each rank's values, by way of the CPUs."""
    values = own.detach().float().cpu().numpy()
    return [np.frombuffer(part, np.float32) for part in comm.all_gather(values.tobytes())]


@contextmanager
def process_group(comm: Comm) -> Iterator[None]:
    """torch.distributed over NCCL, with the communicator's ranks."""
    path = comm.all_gather(tempfile.mktemp(prefix="store").ljust(200).encode())[0].decode().strip()
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=comm.rank, world_size=comm.num_ranks)
    yield
    dist.destroy_process_group()


def expect_near(found: Any, expected: Any, bound: float) -> None:
    assert np.abs(found.detach().float().cpu().numpy() - expected).max() < bound


def averaged_tensors(comm: Comm, gpu: Comm) -> None:
    """Every type, on a stream of its own, and captured: replays count steps, too."""
    for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        source = torch.from_numpy(gradient_of(comm.rank)).to("cuda", dtype)
        expected = moved(everybodys(comm, source), comm.rank)
        gradient = source.clone()
        with ep.A2sgd(gpu, [gradient[:192], gradient[192:]]) as averager:
            stream: Any = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                averager.begin()
                averager.end()
            torch.cuda.synchronize()
            expect_near(gradient, expected, bound)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gradient.copy_(source)
                averager.begin()
                averager.end()
            for replay in range(2):
                graph.replay()
                torch.cuda.synchronize()
                expect_near(gradient, expected, bound)
                assert averager.report().step == 2 + replay


def averaging_optimizer(comm: Comm, gpu: Comm) -> None:
    """Steps with moved gradients; drift; averaged parameters; a NaN makes all ranks skip."""
    with process_group(comm):
        for scope in ("model", "group"):
            optimize(comm, gpu, scope)


def optimize(comm: Comm, gpu: Comm, scope: Any) -> None:
    model, plain = model_of().cuda(), model_of()
    groups: Any = [{"params": [p]} for p in model.parameters()] if scope == "group" else model.parameters()
    inner = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    with a2.Optimizer(inner, gpu, scope=scope, skip_nonfinite=True) as optimizer:
        for step in range(3):
            plain.zero_grad()
            backward(plain, comm.rank, step)
            for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
                parameter.grad = other.grad.cuda()
            parts = [p.grad.flatten() for p in plain.parameters()] if scope == "group" else [flat_gradient(plain)]
            expected = [moved(everybodys(comm, part), comm.rank) for part in parts]
            optimizer.step()
            expect_near(flat_gradient(model), np.concatenate(expected), 2e-6)
        assert a2.drift(model.parameters()).relative > 1e-4
        before = [p.detach().clone() for p in model.parameters()]
        if comm.rank == 1:
            model[2].weight.grad[0, 0] = float("nan")
        optimizer.step()
        assert optimizer.num_skipped == 1
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        optimizer.average_parameters()
        assert a2.drift(model.parameters()).relative < 1e-6


def averaging_hook(comm: Comm, gpu: Comm) -> None:
    """DDP over NCCL: a rank's gradients are those of the definition."""
    del gpu
    with process_group(comm):
        for scope in ("model", "bucket"):
            train(comm, scope)


def train(comm: Comm, scope: Any) -> None:
    model, plain = model_of().cuda(), model_of()
    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.0003)
    state = a2.HookState(scope=scope)
    wrapped.register_comm_hook(state, a2.hook)
    for step in range(3):
        wrapped.zero_grad()
        plain.zero_grad()
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        wrapped(batch.cuda()).square().mean().backward()
        plain(batch).square().mean().backward()
        if scope == "model":
            expect_near(flat_gradient(model), moved(everybodys(comm, flat_gradient(plain)), comm.rank), 1e-5)
            assert state.report().step >= 1
    assert not torch.equal(flat_gradient(model).cpu(), flat_gradient(plain))
    assert a2.drift(model.parameters()).distance == 0  # nobody has stepped
    state.close()
