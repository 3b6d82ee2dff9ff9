# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's nccl_ep backend on GPUs, a rank per process; gpu.py starts it.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python gpu_flashinfer.py FOLDER [CASE...]

and so for every rank, with Crossdock's libnccl_ep.so.0 and NCCL 2.30.4 or newer loaded first. FOLDER: FlashInfer's
files. `killed expert-major` and `killed rank-major` end a rank, so each is a program of its own. --list prints all.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from flashinfer_cases import (
    CASES,
    KINDS,
    Case,
    Problem,
    Refused,
    World,
    experts,
    forward,
    load_engine,
    named,
    survive,
    uneven,
    wait_for_all,
)


def captured(world: World, fleet: Any, kind: str, problem: Problem) -> tuple[Any, Any, Any]:
    """FlashInfer's recipe: a handle made outside, one update outside, and everything of a step in the graph."""
    engine = world.engine
    handle = fleet.create_handle(engine.HandleParams(problem.ids), [engine.HandleAlgoKnobTopKWeights(problem.weights)])
    output = torch.zeros_like(problem.x)

    def step() -> None:
        handle.update(engine.HandleParams(problem.ids))
        out = handle.dispatch(engine.DispatchInputParams([problem.x]))
        made = experts(world, kind, out)
        handle.combine(engine.CombineInputParams([made], out=output, out_is_stable=True))

    step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, output, handle


def renew(world: World, problem: Problem, step: int) -> None:
    other = Problem(world, step, len(problem.x))
    for own, new in ((problem.x, other.x), (problem.ids, other.ids), (problem.weights, other.weights)):
        own.copy_(new)


def graphs(world: World, kind: str) -> None:
    """Replays with other tokens, routing and weights, eager forwards among them."""
    fleet = world.fleet(kind)
    problem = Problem(world, 0, uneven(world, 2) or 1)
    graph, output, handle = captured(world, fleet, kind, problem)
    for step in range(1, 9):
        renew(world, problem, step)
        graph.replay()
        torch.cuda.synchronize()
        problem.compare(output, f"replay {step}")
        if step == 4:
            other = Problem(world, 40, 7)
            other.compare(forward(world, fleet, kind, other), "eager")
    del graph
    handle.destroy()
    fleet.destroy()


def graphs_with_masks(world: World, kind: str) -> None:
    """A rank is masked between replays, which go on without it, and comes back."""
    engine, lost = world.engine, world.size - 1
    fleet = world.fleet(kind, [engine.FleetAlgoKnobFaultTolerance(timeout_ms=20000)])
    problem = Problem(world, 0, 6)
    graph, output, handle = captured(world, fleet, kind, problem)
    for step in range(1, 7):
        is_without = step in (3, 4)
        if step == 3 and world.rank != lost:
            fleet.set_active_mask([int(rank != lost) for rank in range(world.size)])
        if step == 5:
            torch.cuda.synchronize()
            wait_for_all(world, "back")
            fleet.clear_faults(readmit=True)
        renew(world, problem, step)
        if not is_without or world.rank != lost:
            graph.replay()
            torch.cuda.synchronize()
            problem.compare(output, f"replay {step}", lost if is_without else None)
    del graph
    handle.destroy()
    fleet.destroy()


def own_stream(world: World, kind: str) -> None:
    """A stream of the caller's, as HandleAlgoKnobUserStream hands it over."""
    stream: Any = torch.cuda.Stream()
    fleet = world.fleet(kind)
    knob = world.engine.HandleAlgoKnobUserStream(stream.cuda_stream)
    for step in range(4):
        problem = Problem(world, step, uneven(world, step))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            result = forward(world, fleet, kind, problem, [knob])
        problem.compare(result, f"step {step}")
    fleet.destroy()


def torch_allocator(world: World, kind: str) -> None:
    """The group's memory comes from torch's allocator and goes back to it."""
    before = torch.cuda.memory_allocated()
    fleet = world.fleet(kind, [world.engine.FleetAlgoKnobAllocator(torch_caching=True)])
    problem = Problem(world, 1, 6)
    problem.compare(forward(world, fleet, kind, problem), "forward")
    held = torch.cuda.memory_allocated() - before
    fleet.destroy()
    fleet._hot_cache.clear()
    del fleet
    print(f"rank {world.rank}: {held} bytes of torch's while the fleet lived", flush=True)


def created(world: World, kind: str) -> None:
    """Without nccl_comm the fleet makes a communicator of torch's process group."""
    fleet = world.fleet(kind, nccl_comm=None)
    for step in range(2):
        problem = Problem(world, step, uneven(world, step))
        problem.compare(forward(world, fleet, kind, problem), f"step {step}")
    fleet.destroy()


def adopted_from_torch(world: World, kind: str) -> None:
    """The communicator of torch's own NCCL group, which the fleet must not destroy."""
    group: Any = dist.new_group(backend="nccl")
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones, group=group)
    comm = group._get_backend(torch.device("cuda"))._comm_ptr()
    for step in range(2):
        fleet = world.fleet(kind, comm=comm)
        problem = Problem(world, step, 6)
        problem.compare(forward(world, fleet, kind, problem), f"step {step}")
        fleet.destroy()
    dist.all_reduce(ones, group=group)
    assert int(ones.item()) == world.size**2
    dist.destroy_process_group(group)


def killed(world: World, kind: str) -> None:
    """A rank's process ends between forwards; the others lose its experts and nothing else."""
    lost = world.size - 1
    fleet = world.fleet(kind, [world.engine.FleetAlgoKnobFaultTolerance(timeout_ms=2000, reconcile_timeout_s=3.0)])
    problem = Problem(world, 0, 6)
    problem.compare(forward(world, fleet, kind, problem), "before")
    wait_for_all(world, "killed")
    if world.rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    survive(world, fleet, kind, lost)
    world.store.set(f"survived-{world.rank}", b"1")
    if world.rank == 0:  # whose process has the store
        world.store.wait([f"survived-{rank}" for rank in range(lost)])
        print(f"ok      killed {kind}", flush=True)
    os._exit(0)  # nobody can be waited for any more


GPU_CASES: dict[str, Case] = CASES | dict(
    [named(case, kind) for case in (graphs, own_stream, torch_allocator, created, adopted_from_torch) for kind in KINDS]
    + [named(graphs_with_masks, kind) for kind in KINDS[:2]]
)
KILLED: dict[str, Case] = dict([named(killed, kind) for kind in KINDS[:2]])


class Communicators:
    """NCCL's, of all ranks, by nccl4py."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self._rank, self._size, self._store = rank, size, store
        self._made: list[Any] = []

    def make(self, _: int) -> int:
        import nccl.core as core

        key = f"unique-{len(self._made)}"
        if self._rank == 0:
            self._store.set(key, bytes(core.get_unique_id().as_bytes))
        unique = core.UniqueId.from_bytes(bytes(self._store.get(key)))
        self._made.append(core.Communicator.init(self._size, self._rank, unique))
        return int(self._made[-1].ptr)


def run_case(world: World, name: str, case: Case) -> str:
    """What this rank says of it: nothing, or what went wrong."""
    if any(word in name for word in ("mask", "silent", "killed")):
        os.environ.pop("NCCL_EP_TIMEOUT_MS", None)  # it would count instead of the fleet's own
    else:
        os.environ["NCCL_EP_TIMEOUT_MS"] = "20000"
    try:
        case(world)
        torch.cuda.synchronize()
    except Refused as reason:
        return f"refused: {reason}"
    except BaseException:
        return traceback.format_exc()
    return ""


def main() -> int:
    names = sys.argv[2:] or list(GPU_CASES)
    if names == ["--list"]:
        print("\n".join([*GPU_CASES, *KILLED]))
        return 0
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    dist.init_process_group("gloo")
    engine = load_engine(Path(sys.argv[1]))
    store = c10d._get_default_store()
    communicators = Communicators(rank, size, c10d.PrefixStore("unique", store))
    comm = communicators.make(size)
    for name in names:
        if rank == 0:
            print(f"start   {name}", flush=True)
        own = c10d.PrefixStore(name, store)
        world = World(engine, rank, size, comm, own, "cuda", communicators.make)
        found = run_case(world, name, (GPU_CASES | KILLED)[name])
        if name in KILLED:  # which ends its ranks, unless it failed
            print(f"FAILED  {name}\nrank {rank}: {found}", flush=True)
            os._exit(1)
        every: list[Any] = [None] * size
        dist.all_gather_object(every, found)
        if rank == 0:
            wrong = [text for text in every if text]
            word = "ok" if not wrong else "refused" if all(text.startswith("refused") for text in wrong) else "FAILED"
            print(f"{word:7} {name}", flush=True)
            for other, text in enumerate(every):
                if text:
                    print(f"rank {other}: {text}", flush=True)
        if any(text and not text.startswith("refused") for text in every):
            os._exit(1)  # what a failed case left behind would spoil the next ones
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
