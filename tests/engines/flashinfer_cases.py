# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's own nccl_ep backend must do on Crossdock: cases for ranks on CPUs and on GPUs.

Files of the wheel run unchanged: moe_ep's configuration, validation, fault tolerance, and its Fleet and Handle over
nccl.ep. The rest of FlashInfer (kernels, JIT) is stood in for. Expert e multiplies its rows by (e + 1) / E, so that a
token becomes itself times the sum of its weights times that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stand_ins import load

REAL = (
    "errors",
    "config",
    "algo_knobs",
    "core.bootstrap_utils",
    "core.comm",
    "core.comm.communication",
    "core.comm.fleet",
    "core.comm.handle",
    "core.comm.fault_tolerance",
    "core.validation.common",
    "backends.split.comm.nccl_ep",
    "backends.split.comm.nccl_ep.config",
    "backends.split.comm.nccl_ep._mask_ffi",
    "backends.split.comm.nccl_ep.fleet",
    "backends.split.comm.nccl_ep.handle",
)
HIDDEN, LOCAL, TOPK, MOST = 2048, 2, 3, 16  # low latency takes certain hidden sizes only


def load_engine(home: Path) -> Any:
    """The names of the loaded files, in one object."""
    modules = load(home, "flashinfer.moe_ep", REAL, {"flashinfer.moe_ep": {"_require_built": lambda _: None}})
    names: dict[str, Any] = {}
    for module in modules:
        names |= {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return SimpleNamespace(**names)


class Refused(Exception):
    """The library says that it does not do what the case asks for."""


@dataclass
class World:
    """One rank. comm: an ncclComm_t; new_comm(ranks): another one, of those ranks; store: torch.distributed's."""

    engine: Any
    rank: int
    size: int
    comm: int
    store: Any
    device: str
    new_comm: Callable[[int], int]

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def bootstrap(self, size: int | None = None, comm: int | None = None, **fields: Any) -> Any:
        own = {"nccl_comm": self.comm if comm is None else comm, "tcp_store": self.store}
        return self.engine.BootstrapConfig(world_size=size or self.size, rank=self.rank, **(own | fields))

    def fleet(self, kind: str, knobs: Sequence[Any] = (), hidden: int = HIDDEN, bytes_: int = 2, **boot: Any) -> Any:
        engine = self.engine
        mode = engine.EpAlgorithm.HIGH_THROUGHPUT if kind == "ht" else engine.EpAlgorithm.LOW_LATENCY
        layout = engine.EpLayout.RANK_MAJOR if kind == "rank-major" else engine.EpLayout.EXPERT_MAJOR
        params = engine.FleetParams(
            num_experts=LOCAL * self.size,
            max_tokens_per_rank=MOST,
            token_hidden_size=hidden,
            dtype_bytes=bytes_,
            algorithm=mode,
            layout=layout,
        )
        return engine.create_fleet(self.bootstrap(**boot), params, knobs, "nccl_ep")


class Problem:
    """Random tokens, distinct choices, weights; other ones on every rank and in every step."""

    def __init__(self, world: World, step: int, num_tokens: int, dtype: Any = torch.bfloat16) -> None:
        self.experts = LOCAL * world.size
        random = torch.Generator().manual_seed(100 * step + world.rank)
        self.x = torch.randn(num_tokens, HIDDEN, generator=random).to(dtype).to(world.device)
        scores = torch.rand(num_tokens, self.experts, generator=random)
        self.ids = scores.argsort(dim=1)[:, :TOPK].contiguous().to(world.device)
        self.weights = torch.rand(num_tokens, TOPK, generator=random).to(world.device)

    def expected(self, lost: int | None = None) -> Any:
        """Without what the experts of a lost rank would have added."""
        factors = self.weights * (self.ids + 1) / self.experts
        if lost is not None:
            factors = torch.where(self.ids // LOCAL == lost, 0.0, factors)
        return self.x.float() * factors.sum(dim=1, keepdim=True)

    def compare(self, result: Any, what: str, lost: int | None = None) -> None:
        bound = 1e-5 if self.x.dtype == torch.float32 else 4e-2
        torch.testing.assert_close(
            result.float(), self.expected(lost), rtol=bound, atol=bound, msg=lambda text: f"{what}: {text}"
        )


def experts(world: World, kind: str, out: Any) -> Any:
    """What a kernel would make of the received rows."""
    numbers = torch.arange(LOCAL, device=world.device) + world.rank * LOCAL + 1
    total = LOCAL * world.size
    if kind == "expert-major":
        return (out.expert_tensors.float() * (numbers / total)[:, None, None]).to(out.expert_tensors.dtype)
    rows = out.expert_tensors.reshape(out.num_tokens, -1)
    ids, weights = out.recv_topk_idx.long(), out.recv_topk_weights
    is_here = (ids >= 0) & (ids < LOCAL)
    factors = torch.where(is_here, weights * numbers[ids.clamp(0, LOCAL - 1)] / total, 0.0).sum(dim=1, keepdim=True)
    # Rows that were not received hold anything, as in FlashInfer, whose kernels write zeros or nothing there.
    made = torch.where(factors > 0, rows.float() * factors, 0.0)
    return made.to(rows.dtype).reshape(out.expert_tensors.shape)


def forward(world: World, fleet: Any, kind: str, problem: Problem, knobs: Sequence[Any] = (), **combine: Any) -> Any:
    """A layer as MoEEpSplitLayer runs it: a handle per forward."""
    engine = world.engine
    weights = engine.HandleAlgoKnobTopKWeights(problem.weights)
    handle = fleet.create_handle(engine.HandleParams(problem.ids), [weights, *knobs])
    result = trip(world, handle, kind, problem, **combine)
    world.synchronize()
    handle.destroy()
    return result


def trip(world: World, handle: Any, kind: str, problem: Problem, **combine: Any) -> Any:
    out = handle.dispatch(world.engine.DispatchInputParams([problem.x]))
    made = experts(world, kind, out)
    return handle.combine(world.engine.CombineInputParams([made], **combine)).x


def uneven(world: World, step: int) -> int:
    """Other numbers of tokens on every rank, zero and the most among them."""
    return (MOST, 0, 5, 11)[(world.rank + step) % 4]


def layers(world: World, kind: str, dtype: Any = torch.bfloat16) -> None:
    """Twelve forwards with handles of their own, as an engine's layers."""
    fleet = world.fleet(kind, bytes_=dtype.itemsize)
    for step in range(12):
        problem = Problem(world, step, uneven(world, step), dtype)
        problem.compare(forward(world, fleet, kind, problem), f"step {step}")
    fleet.destroy()


def staged(world: World, kind: str) -> None:
    """send_only, and then complete."""
    fleet = world.fleet(kind)
    for step in range(3):
        problem = Problem(world, step, uneven(world, step))
        result = forward(world, fleet, kind, problem, [world.engine.HandleAlgoKnobSplitOperation()])
        problem.compare(result, f"step {step}")
    fleet.destroy()


def updates(world: World, kind: str) -> None:
    """One handle whose routing is overwritten, and a result that stays where it is."""
    engine, fleet = world.engine, world.fleet(kind)
    problem = Problem(world, 0, 7)
    handle = fleet.create_handle(engine.HandleParams(problem.ids), [engine.HandleAlgoKnobTopKWeights(problem.weights)])
    output = torch.zeros_like(problem.x)
    for step in range(5):
        other = Problem(world, step, 7)
        for own, new in ((problem.x, other.x), (problem.ids, other.ids), (problem.weights, other.weights)):
            own.copy_(new)
        handle.update(engine.HandleParams(problem.ids))
        result = trip(world, handle, kind, problem, out=output, out_is_stable=True)
        world.synchronize()
        assert result is output
        problem.compare(result, f"step {step}")
    handle.destroy()
    fleet.destroy()


def received_count(world: World, dtype: Any) -> None:
    """High throughput writes how many rows came into the counter that an engine hands over with the routing."""
    engine, fleet = world.engine, world.fleet("ht")
    for step in range(3):
        problem, total = Problem(world, step, 9), torch.full((1,), -7, dtype=dtype, device=world.device)
        everyone = [Problem(at, step, 9).ids for at in (ranked(world, rank) for rank in range(world.size))]
        knob = engine.HandleAlgoKnobNumReceivedTokens(total)
        problem.compare(forward(world, fleet, "ht", problem, [knob]), f"step {step}")
        expected = sum(int((ids // LOCAL == world.rank).any(dim=1).sum()) for ids in everyone)
        assert int(total.item()) == expected, f"step {step}: {int(total.item())} rows, {expected} expected"
    fleet.destroy()


def ranked(world: World, rank: int) -> World:
    return World(world.engine, rank, world.size, 0, None, world.device, world.new_comm)


def settings(world: World, kind: str) -> None:
    """Channels, queue pairs, and the size of the transport's buffer."""
    engine = world.engine
    knobs = [engine.FleetAlgoKnobNumChannelsPerRank(4), engine.FleetAlgoKnobNumQpsPerRank(2)]
    if kind != "ht":
        knobs.append(engine.FleetAlgoKnobRdmaBufferSize(64 << 20))
    fleet = world.fleet(kind, knobs)
    problem = Problem(world, 1, 6)
    problem.compare(forward(world, fleet, kind, problem), "with settings")
    fleet.destroy()


def topology(world: World, kind: str) -> None:
    """update_topology makes the group anew, over another communicator."""
    fleet = world.fleet(kind)
    for step in range(3):
        problem = Problem(world, step, uneven(world, step))
        problem.compare(forward(world, fleet, kind, problem), f"step {step}")
        fleet.update_topology(world.bootstrap(comm=world.new_comm(world.size)))
    fleet.destroy()


def packed_rows(world: World, kind: str) -> None:
    """Rows of bytes that a kernel packed (values and scales), without a recipe: they arrive bit by bit."""
    engine, fleet = world.engine, world.fleet(kind)
    problem = Problem(world, 2, 6)
    rows = torch.arange(HIDDEN + 64, device=world.device).repeat(6, 1) + 7 * world.rank
    rows = (rows + torch.arange(6, device=world.device)[:, None] * 31).to(torch.uint8)
    handle = fleet.create_handle(engine.HandleParams(problem.ids), [engine.HandleAlgoKnobTopKWeights(problem.weights)])
    try:
        out = handle.dispatch(engine.DispatchInputParams([rows]))
    except Exception as error:
        if "code 4" not in str(error):
            raise
        raise Refused("rows of uint8 without a recipe are an invalid argument") from error
    world.synchronize()
    got = out.expert_tensors
    pattern = torch.arange(HIDDEN + 64, device=world.device).to(torch.uint8)
    counts = out.expert_counts.tolist()
    if kind == "expert-major":
        found = torch.cat([got[expert, :count] for expert, count in enumerate(counts)])
    else:
        found = torch.cat([got[source, :count] for source, count in enumerate(counts)])
    assert len(found) > 0
    assert torch.equal(found - found[:, :1], pattern.expand_as(found)), "bytes differ"
    handle.destroy()
    fleet.destroy()


def too_many(world: World, kind: str) -> None:
    """More tokens than the fleet was made for are an error, and the next forward is right."""
    fleet = world.fleet(kind)
    problem = Problem(world, 1, MOST + 1)
    try:
        forward(world, fleet, kind, problem)
    except Exception as error:  # FlashInfer's own, or nccl.ep's for invalid arguments
        assert "max_tokens_per_rank" in str(error) or "code 4" in str(error), error
    else:
        raise AssertionError("no error")
    problem = Problem(world, 1, MOST)
    problem.compare(forward(world, fleet, kind, problem), "after the error")
    fleet.destroy()


def masks_by_hand(world: World, kind: str) -> None:
    """All ranks leave one out, which takes no part meanwhile, and take it back."""
    engine = world.engine
    fleet = world.fleet(kind, [engine.FleetAlgoKnobFaultTolerance(timeout_ms=20000)])
    assert fleet.supports_fault_tolerance and not fleet.query_fault()
    assert fleet.query_active_mask().tolist() == [1] * world.size
    problem = Problem(world, 0, 6)
    problem.compare(forward(world, fleet, kind, problem), "before")
    lost = world.size - 1
    if world.rank != lost:
        mask = [1] * world.size
        mask[lost] = 0
        fleet.set_active_mask(mask)
        world.synchronize()
        assert fleet.query_active_mask().tolist() == mask and fleet.active_mask_epoch == 1
        for step in range(1, 4):
            problem = Problem(world, step, 6)
            problem.compare(forward(world, fleet, kind, problem), f"without it, step {step}", lost)
        assert not fleet.query_fault()
    wait_for_all(world, f"masks-{kind}")
    fleet.clear_faults(readmit=True)
    world.synchronize()
    assert fleet.query_active_mask().tolist() == [1] * world.size
    for step in range(4, 7):
        problem = Problem(world, step, 6)
        problem.compare(forward(world, fleet, kind, problem), f"after, step {step}")
    fleet.destroy()


def silent_rank(world: World, kind: str) -> None:
    """A rank that stops is masked when it times out; the others agree about it through the store and go on."""
    lost = world.size - 1
    fleet = world.fleet(kind, [world.engine.FleetAlgoKnobFaultTolerance(timeout_ms=1000, reconcile_timeout_s=2.0)])
    problem = Problem(world, 0, 6)
    problem.compare(forward(world, fleet, kind, problem), "before")
    wait_for_all(world, f"silence-{kind}")
    if world.rank != lost:
        survive(world, fleet, kind, lost)
    wait_for_all(world, f"silence-end-{kind}")
    fleet.destroy()


def survive(world: World, fleet: Any, kind: str, lost: int) -> None:
    problem = Problem(world, 1, 6)
    problem.compare(forward(world, fleet, kind, problem), "as it is lost", lost)
    assert fleet.query_fault(), "no fault was noticed"
    mask = fleet.reconcile_active_mask().tolist()
    assert mask == [int(rank != lost) for rank in range(world.size)], mask
    fleet.clear_faults()
    for step in range(2, 5):
        problem = Problem(world, step, 6)
        problem.compare(forward(world, fleet, kind, problem), f"without it, step {step}", lost)
    assert not fleet.query_fault()


def wait_for_all(world: World, name: str) -> None:
    """Until every rank came here, through the store: no collective of the library."""
    world.store.set(f"{name}-{world.rank}", b"1")
    world.store.wait([f"{name}-{rank}" for rank in range(world.size)])


KINDS = ("expert-major", "rank-major", "ht")
Case = Callable[[World], None]


def named(case: Callable[..., None], *arguments: Any) -> tuple[str, Case]:
    words = [str(argument).removeprefix("torch.") for argument in arguments]
    return " ".join([case.__name__, *words]), lambda world: case(world, *arguments)


CASES: dict[str, Case] = dict(
    [named(layers, kind) for kind in KINDS]
    + [named(layers, kind, torch.float32) for kind in KINDS]
    + [named(case, kind) for case in (staged, updates, settings, topology, too_many) for kind in KINDS]
    + [named(received_count, dtype) for dtype in (torch.int32, torch.int64)]
    + [named(masks_by_hand, kind) for kind in KINDS[:2]]
    + [named(silent_rank, kind) for kind in KINDS[:2]]
    + [named(packed_rows, kind) for kind in KINDS[:2]]
)
