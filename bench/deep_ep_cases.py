# SPDX-License-Identifier: Apache-2.0
"""The cases of deep_ep_bench.py: what is called, what must come of it, and what is timed.

Expert e multiplies its rows by 2 ** (e % 3). So a round trip is right only if each row reaches its expert, and, where
rows are not by expert, brings its expert ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from deep_ep_names import FP8_BLOCK, NORMAL_SMS, Case, Shape
from deep_ep_timing import Clock, Work

LARGEST_E4M3 = 448.0
SMALLEST_AMAX = 1e-4
MOST_STEADY_TOKENS = 512  # of an ElasticBuffer's case: one with more has single calls timed, not graphs
NORMAL_BYTES = 1 << 30
MOST_ERROR = 1e-2  # of a token's result, by norms: bf16 rounds each step by at most 2 ** -9


class WrongResult(Exception):
    """A round trip whose result is not what the tokens say."""


class Timed(NamedTuple):
    operation: str
    way: str  # of Clock; on CPUs, latency stands for steady and queued
    work: Work


class Bench(Protocol):
    """One case of one library."""

    has_graphs: bool

    def expected(self) -> torch.Tensor:
        """[T, H] fp32: of each round trip."""
        ...

    def round_trips(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Operations with their experts, by name."""
        ...

    def timed(self) -> list[Timed]: ...

    def close(self) -> None:
        """Collective."""
        ...


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] as e4m3 [T, H] and fp32 scales [T, H / FP8_BLOCK]."""
    blocks = x.float().view(x.shape[0], -1, FP8_BLOCK)
    amax = blocks.abs().amax(dim=2, keepdim=True).clamp_min(SMALLEST_AMAX)
    values = (blocks * (LARGEST_E4M3 / amax)).to(torch.float8_e4m3fn)
    return values.view(x.shape), (amax / LARGEST_E4M3).squeeze(2)


def plain(rows: Any) -> torch.Tensor:
    """Rows [..., H] in bf16, also where they are (values, scales [..., H / FP8_BLOCK])."""
    if not isinstance(rows, tuple):
        return rows  # type: ignore[no-any-return]
    values, scales = rows
    blocks = values.float().unflatten(-1, (-1, FP8_BLOCK)) * scales.unsqueeze(-1)
    return blocks.flatten(-2).bfloat16()


class Problem:
    """A rank's tokens. Every run draws the same; every token has top-k different experts."""

    def __init__(self, case: Case, shape: Shape, rank: int, num_ranks: int, device: torch.device, ids: Any) -> None:
        """ids: the dtype of topk_idx."""
        random = torch.Generator().manual_seed(rank)
        self.hidden, self.experts, self.topk = shape
        self.local = shape.experts // num_ranks
        self.x = torch.randn(case.tokens, shape.hidden, generator=random).bfloat16().to(device)
        scores = torch.rand(case.tokens, shape.experts, generator=random)
        self.ids = scores.topk(shape.topk, dim=1).indices.to(device, ids)
        self.weights = torch.softmax(torch.rand(case.tokens, shape.topk, generator=random), dim=1).to(device)
        self.sent = quantised(self.x) if case.fp8 else self.x  # by the caller, where the library does not quantise
        self._factors = 2.0 ** (torch.arange(shape.experts, device=device) % 3)
        self.own_factors = self._factors[rank * self.local : (rank + 1) * self.local]

    def sums(self, weights: torch.Tensor | None) -> torch.Tensor:
        """What comes back to a token: the sum of its experts' rows, weighted or not."""
        factors = self._factors[self.ids.long()]
        factors = factors if weights is None else factors * weights
        return plain(self.sent).float() * factors.sum(dim=1, keepdim=True)

    def rows_by_ids(self, rows: Any, ids: torch.Tensor) -> torch.Tensor:
        """Each row times the factors of its local experts, added up. ids [rows, K]: undefined for rows without data."""
        is_here = (ids >= 0) & (ids < self.local)
        factors = torch.where(is_here, self.own_factors[ids.clamp(0, self.local - 1).long()], 0.0)
        return (plain(rows) * factors.sum(dim=1, keepdim=True)).bfloat16()

    def rows_by_ends(self, rows: Any, ends: torch.Tensor) -> torch.Tensor:
        """Each row times the factor of its expert. ends [L]: the end of each local expert's rows."""
        rows = plain(rows)
        places = torch.arange(rows.shape[0], device=rows.device)
        experts = torch.searchsorted(ends.long(), places, right=True).clamp_max(self.local - 1)
        return (rows * self.own_factors[experts].unsqueeze(1)).bfloat16()


class Elastic:
    """ElasticBuffer without CPU sync."""

    def __init__(self, library: Any, case: Case, shape: Shape, device: torch.device) -> None:
        self.case, self.has_graphs = case, case.tokens <= MOST_STEADY_TOKENS
        ids = getattr(library, "topk_idx_t", torch.int64)
        self.problem = Problem(case, shape, dist.get_rank(), dist.get_world_size(), device, ids)
        self.sms = {"num_sms": case.sms} if case.sms else {}
        self.buffer = library.ElasticBuffer(
            dist.group.WORLD,
            num_max_tokens_per_rank=case.tokens,
            hidden=shape.hidden,
            num_topk=shape.topk,
            use_fp8_dispatch=case.fp8,
            allow_hybrid_mode=False,
            allow_multiple_reduction=not case.is_exact,
            explicitly_destroy=True,
        )

    def expected(self) -> torch.Tensor:
        return self.problem.sums(None)

    def dispatch(self) -> Any:
        problem = self.problem
        return self.buffer.dispatch(
            problem.sent,
            problem.ids,
            problem.weights,
            num_experts=problem.experts,
            do_cpu_sync=False,
            do_expand=self.case.by_expert,
            **self.sms,
        )

    def dispatch_again(self, handle: Any) -> Any:
        # With num_sms 0, DeepEP 2.1.0 needs the number of experts again.
        settings = self.sms or {"num_experts": self.problem.experts}
        return self.buffer.dispatch(self.problem.sent, handle=handle, do_expand=self.case.by_expert, **settings)

    def experts(self, rows: Any, ids: Any, handle: Any) -> torch.Tensor:
        if self.case.by_expert:
            return self.problem.rows_by_ends(rows, handle.psum_num_recv_tokens_per_expert)
        return self.problem.rows_by_ids(rows, ids)

    def combine(self, rows: Any, handle: Any) -> torch.Tensor:
        return self.buffer.combine(rows, handle, **self.sms)[0]  # type: ignore[no-any-return]

    def round_trips(self) -> dict[str, Callable[[], torch.Tensor]]:
        def once(is_again: bool) -> torch.Tensor:
            rows, ids, _, handle, _ = self.dispatch()
            if is_again:
                rows = self.dispatch_again(handle)[0]
            return self.combine(self.experts(rows, ids, handle), handle)

        return {"dispatch, combine": partial(once, False), "cached dispatch, combine": partial(once, True)}

    def timed(self) -> list[Timed]:
        rows, ids, _, handle, _ = self.dispatch()
        rows = self.experts(rows, ids, handle)

        def pair() -> None:
            found = self.dispatch()
            self.combine(rows if self.case.fp8 else found[0], found[3])

        combine = partial(self.combine, rows, handle)
        if not self.has_graphs:
            again = partial(self.dispatch_again, handle)
            works: dict[str, Work] = {"dispatch": self.dispatch, "cached dispatch": again, "combine": combine}
            return [Timed(operation, "queued", work) for operation, work in works.items()]
        works = {"dispatch": self.dispatch, "combine": combine, "pair": pair}
        return [*(Timed(name, "steady", work) for name, work in works.items()), Timed("pair", "eager", pair)]

    def close(self) -> None:
        self.buffer.destroy()


class LowLatency:
    """Buffer's low latency."""

    def __init__(self, library: Any, case: Case, shape: Shape, device: torch.device) -> None:
        self.case, self.has_graphs = case, True
        num_ranks = dist.get_world_size()
        ids = getattr(library, "topk_idx_t", torch.int64)
        self.problem = Problem(case, shape, dist.get_rank(), num_ranks, device, ids)
        # DeepEP wants a number of rows for each expert that 4 divides.
        self.max_tokens = max(case.tokens, 4)
        self.out = torch.empty_like(self.problem.x)
        self.buffer = library.Buffer(
            dist.group.WORLD,
            0,
            library.Buffer.get_low_latency_rdma_size_hint(self.max_tokens, shape.hidden, num_ranks, shape.experts),
            low_latency_mode=True,
            num_qps_per_rank=self.problem.local,
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
        )

    def expected(self) -> torch.Tensor:
        return self.problem.sums(self.problem.weights)

    def dispatch(self, has_hook: bool = False) -> Any:
        problem = self.problem
        made = self.buffer.low_latency_dispatch(
            problem.x,
            problem.ids,
            self.max_tokens,
            problem.experts,
            use_fp8=self.case.fp8,
            return_recv_hook=has_hook,
        )
        if has_hook:
            made[4]()
        return made

    def combine(self, rows: torch.Tensor, handle: Any, has_hook: bool = False) -> torch.Tensor:
        problem = self.problem
        _, _, hook = self.buffer.low_latency_combine(
            rows, problem.ids, problem.weights, handle, return_recv_hook=has_hook, out=self.out
        )
        if has_hook:
            hook()
        return self.out

    def experts(self, rows: Any) -> torch.Tensor:
        return (plain(rows) * self.problem.own_factors.view(-1, 1, 1)).bfloat16()

    def round_trips(self) -> dict[str, Callable[[], torch.Tensor]]:
        def once(has_hook: bool) -> torch.Tensor:
            rows, _, handle, _, _ = self.dispatch(has_hook)
            return self.combine(self.experts(rows), handle, has_hook)

        return {"dispatch, combine": partial(once, False), "dispatch, combine with hooks": partial(once, True)}

    def timed(self) -> list[Timed]:
        rows, _, handle, _, _ = self.dispatch()
        rows = self.experts(rows)

        def pair(has_hook: bool = False) -> None:
            found = self.dispatch(has_hook)
            self.combine(rows if self.case.fp8 else found[0], found[2], has_hook)

        hooks = partial(pair, True)
        combine = partial(self.combine, rows, handle)
        works = {"dispatch": self.dispatch, "combine": combine, "pair": pair, "pair with hooks": hooks}
        eager = [Timed("pair", "eager", pair), Timed("pair with hooks", "eager", hooks)]
        return [*(Timed(name, "steady", work) for name, work in works.items()), *eager]

    def close(self) -> None:
        self.buffer.destroy()


class Normal:
    """Buffer's normal mode. A fresh dispatch includes its layout, and waits for the counts on the CPU."""

    def __init__(self, library: Any, case: Case, shape: Shape, device: torch.device) -> None:
        self.case, self.has_graphs = case, False
        ids = getattr(library, "topk_idx_t", torch.int64)
        self.problem = Problem(case, shape, dist.get_rank(), dist.get_world_size(), device, ids)
        library.Buffer.set_num_sms(case.sms or NORMAL_SMS)
        self.buffer = library.Buffer(dist.group.WORLD, NORMAL_BYTES, 0, explicitly_destroy=True)

    def expected(self) -> torch.Tensor:
        return self.problem.sums(None)

    def dispatch(self) -> Any:
        problem = self.problem
        per_rank, per_node, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(problem.ids, problem.experts)
        return self.buffer.dispatch(
            problem.sent,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=problem.ids,
            topk_weights=problem.weights,
        )

    def dispatch_again(self, handle: Any) -> Any:
        return self.buffer.dispatch(self.problem.sent, handle=handle)

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return self.buffer.combine(rows, handle)[0]  # type: ignore[no-any-return]

    def round_trips(self) -> dict[str, Callable[[], torch.Tensor]]:
        def once(is_again: bool) -> torch.Tensor:
            rows, ids, _, _, handle, _ = self.dispatch()
            if is_again:
                rows = self.dispatch_again(handle)[0]
            return self.combine(self.problem.rows_by_ids(rows, ids), handle)

        return {"dispatch, combine": partial(once, False), "cached dispatch, combine": partial(once, True)}

    def timed(self) -> list[Timed]:
        rows, ids, _, _, handle, _ = self.dispatch()
        rows = self.problem.rows_by_ids(rows, ids)
        return [
            Timed("dispatch", "latency", self.dispatch),  # waits on the host
            Timed("cached dispatch", "queued", partial(self.dispatch_again, handle)),
            Timed("combine", "queued", partial(self.combine, rows, handle)),
        ]

    def close(self) -> None:
        self.buffer.destroy()


KINDS: dict[str, Callable[..., Bench]] = {"elastic": Elastic, "ll": LowLatency, "normal": Normal}


def check(bench: Bench, clock: Clock) -> None:
    """Compares each round trip with the tokens, on GPUs also in a graph where graphs are timed."""
    expected = bench.expected()
    for name, trip in bench.round_trips().items():
        _compare(name, trip(), expected, clock)
        if bench.has_graphs and clock.is_gpu:
            graph, found = clock.captured(trip, 1)
            for _ in range(2):
                found.zero_()
                graph.replay()
                _compare(f"{name} in a graph", found, expected, clock)
            graph.reset()


def _compare(name: str, found: torch.Tensor, expected: torch.Tensor, clock: Clock) -> None:
    """Fails on all ranks where a token is wrong on one."""
    error, token = float("inf"), 0
    if found.shape == expected.shape:
        errors = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
        found_error, place = torch.where(errors.isnan(), torch.inf, errors).max(dim=0)
        error, token = float(found_error), int(place)
    by_rank = clock.team.gather((error, token, list(found.shape)))
    rank = max(range(len(by_rank)), key=lambda rank: by_rank[rank][0])
    error, token, shape = by_rank[rank]
    if error > MOST_ERROR:
        raise WrongResult(
            f"{name}: the result {shape} of rank {rank} is wrong, token {token} by {error:.3g} of its norm, allowed: "
            f"at most {MOST_ERROR}"
        )
