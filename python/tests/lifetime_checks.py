# SPDX-License-Identifier: Apache-2.0
"""Buffers, exchanges, groups and their results, made, used, dropped and destroyed in random orders, on CPUs and GPUs.

All ranks take the same steps, which a seed draws. A model says what must work: an object until it is destroyed, and a
result of it until then, too, whatever else has gone meanwhile.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import crossdock as ep
import crossdock.deep_ep as deep_ep
import crossdock.torch as ept

TOKENS, HIDDEN, TOPK, LOCAL = 4, 128, 2, 2
MOST_OBJECTS, MOST_RESULTS = 4, 6


class Given:
    """What a rank sends: whole numbers, so that sums are exact."""

    def __init__(self, comm: ep.Communicator, device: str) -> None:
        self.num_ranks, self.num_experts = comm.num_ranks, LOCAL * comm.num_ranks
        self.x = torch.full((TOKENS, HIDDEN), comm.rank + 1.0, dtype=torch.bfloat16, device=device)
        first = torch.arange(TOKENS, device=device).unsqueeze(1) + comm.rank
        self.ids = (first + LOCAL * torch.arange(TOPK, device=device)) % self.num_experts  # on different ranks
        self.weights = torch.full((TOKENS, TOPK), 0.5, device=device)
        self.targets = min(TOPK, comm.num_ranks) if comm.num_ranks > 1 else 1


class Subject:
    """An object that ranks make together; use() gives a function that uses the result again and checks what it says."""

    def __init__(self, given: Given) -> None:
        self.given = given

    def use(self) -> Callable[[], None]:
        raise NotImplementedError

    def destroy(self) -> None:
        raise NotImplementedError


class OfBuffer(Subject):
    def __init__(self, given: Given, comm: ep.Communicator, _: ep.Communicator, draw: random.Random) -> None:
        super().__init__(given)
        self.is_low_latency = draw.random() < 0.5
        self.own: Any = deep_ep.Buffer(comm, 1 << 20, 0, low_latency_mode=self.is_low_latency, explicitly_destroy=True)

    def use(self) -> Callable[[], None]:
        own, given = self.own, self.given
        if self.is_low_latency:
            hooked = own.low_latency_dispatch(
                given.x, given.ids, TOKENS, given.num_experts, use_fp8=False, return_recv_hook=True
            )
            hooked[4]()
            rows, handle = hooked[0], hooked[2]

            def sums() -> Any:
                return own.low_latency_combine(rows, given.ids, given.weights, handle)[0]

            return lambda: expect_equal(sums(), given.x)
        layout = own.get_dispatch_layout(given.ids, given.num_experts)
        rows, _, _, _, handle, _ = own.dispatch(
            given.x, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3], num_tokens_per_expert=layout[2]
        )
        return lambda: expect_equal(own.combine(rows, handle)[0], given.x * given.targets)

    def destroy(self) -> None:
        self.own.destroy()


class OfElasticBuffer(Subject):
    def __init__(self, given: Given, comm: ep.Communicator, *_: Any) -> None:
        super().__init__(given)
        self.own: Any = deep_ep.ElasticBuffer(
            comm, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True
        )

    def use(self) -> Callable[[], None]:
        own, given = self.own, self.given
        result = own.dispatch(given.x, topk_idx=given.ids, num_experts=given.num_experts)
        return lambda: expect_equal(own.combine(result[0], result[3])[0], given.x * given.targets)

    def destroy(self) -> None:
        self.own.destroy()


class OfExchange(Subject):
    """Over the borrowed communicator."""

    def __init__(self, given: Given, _: ep.Communicator, borrowed: ep.Communicator, draw: random.Random) -> None:
        super().__init__(given)
        self.own = ept.Exchange(
            borrowed,
            num_experts=given.num_experts,
            num_topk=TOPK,
            max_tokens=TOKENS,
            hidden=HIDDEN,
            algorithm=draw.choice(list(ep.Algorithm)),
            dtype=torch.bfloat16,
            max_in_flight=MOST_RESULTS + 1,
        )

    def use(self) -> Callable[[], None]:
        own, given = self.own, self.given
        received = own.start_dispatch(given.x, given.ids, given.weights)()
        weights = received.weights.masked_fill(received.experts < 0, 0).sum(dim=1, keepdim=True)
        rows = torch.where(weights > 0, received.rows * weights.bfloat16(), 0)
        return lambda: expect_equal(own.combine(rows, received), given.x)

    def destroy(self) -> None:
        self.own.close()


class OfGroup(Subject):
    """Over the borrowed communicator; handles outlive the group."""

    def __init__(self, given: Given, _: ep.Communicator, borrowed: ep.Communicator, draw: random.Random) -> None:
        super().__init__(given)
        self.is_pending = draw.random() < 0.3
        sizes: dict[str, Any] = {"num_experts": given.num_experts, "max_dispatch_tokens_per_rank": TOKENS}
        self.own = ep.Group(borrowed, algorithm=ep.Algorithm.LOW_LATENCY, max_token_bytes=2 * HIDDEN, **sizes)

    def use(self) -> Callable[[], None]:
        given, device = self.given, self.given.x.device
        handle = self.own.create_handle(ep.Layout.EXPERT_MAJOR, given.ids)
        rows = given.x.new_zeros(LOCAL, given.num_ranks * TOKENS, HIDDEN)
        counts = torch.zeros(LOCAL, dtype=torch.int32, device=device)
        info, sums = ep.LayoutInfo(expert_counters=counts), torch.empty_like(given.x)
        handle.dispatch(given.x, rows, layout_info=info, send_only=self.is_pending)
        handle.complete()

        def again() -> None:
            handle.combine(rows, ep.CombineOutputs(tokens=sums, topk_weights=given.weights))
            expect_equal(sums, given.x)

        if self.is_pending:  # a second one, which nobody completes
            left = self.own.create_handle(ep.Layout.EXPERT_MAJOR, given.ids)
            left.dispatch(given.x, rows.clone(), layout_info=info, send_only=True)
        return again

    def destroy(self) -> None:
        self.own.close()


KINDS = (OfBuffer, OfElasticBuffer, OfExchange, OfGroup)


def expect_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected), f"{found[:, 0].tolist()}, expected {expected[:, 0].tolist()}"


def random_orders(comm: ep.Communicator, borrowed: ep.Communicator, device: str, seed: int, steps: int) -> None:
    """comm: of CPUs; borrowed: what exchanges and groups use, of the device."""
    draw, given = random.Random(seed), Given(comm, device)
    open_ones: list[Subject] = []
    results: list[tuple[Subject, Callable[[], None]]] = []
    for _ in range(steps):
        step = draw.choice(["make", "use", "use", "again", "drop", "destroy", "collect"])
        if step == "make" and len(open_ones) < MOST_OBJECTS:
            open_ones.append(draw.choice(KINDS)(given, comm, borrowed, draw))
        elif step == "use" and open_ones and len(results) < MOST_RESULTS:
            used = draw.choice(open_ones)
            result = used.use()
            results.append((used, result))
            result()
        elif step == "again" and results:
            used, result = draw.choice(results)
            if used in open_ones:
                result()
            else:
                with pytest.raises(ep.InvalidUsage, match="destroyed|closed"):
                    result()
        elif step == "drop" and results:
            results.pop(draw.randrange(len(results)))
        elif step == "destroy" and open_ones:
            open_ones.pop(draw.randrange(len(open_ones))).destroy()
        elif step == "collect":
            gc.collect()
    draw.shuffle(open_ones)
    for left in open_ones:
        left.destroy()


def elastic_buffers_one_after_another(comm: ep.Communicator, device: str) -> None:
    """The second buffer is made, used and destroyed while a result of the first one is there, and then gone."""
    given = Given(comm, device)
    result: Any = None
    for _ in range(3):
        buffer: Any = deep_ep.ElasticBuffer(
            comm,
            num_max_tokens_per_rank=TOKENS,
            hidden=HIDDEN,
            num_topk=TOPK,
            allow_hybrid_mode=False,
            explicitly_destroy=True,
        )
        result = buffer.dispatch(given.x, topk_idx=given.ids, topk_weights=given.weights, num_experts=given.num_experts)
        expect_equal(buffer.combine(result[0], result[3])[0], given.x * given.targets)
        buffer.barrier()
        buffer.destroy()
