# SPDX-License-Identifier: Apache-2.0
"""Calls that differ between ranks and are found by no comparison: they end by the timeout, and name the other rank.
docs/engines.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
from patience import short_timeout_ms  # noqa: E402

RANKS, EXPERTS, TOPK, HIDDEN, MOST = 2, 4, 2, 256, 8


class Calls:
    """The three kinds of a rank; every seed is another routing. Rows are few, so the normal mode has small batches."""

    def __init__(self, comm: ep.Communicator) -> None:
        self.comm = comm
        self.buffer: Any = deep_ep.Buffer(comm, 1 << 20, 1 << 20, low_latency_mode=True, explicitly_destroy=True)
        self.elastic: Any = deep_ep.ElasticBuffer(
            comm, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOPK, explicitly_destroy=True
        )

    def arguments(self, seed: int) -> tuple[Any, Any, Any]:
        random = torch.Generator().manual_seed(10 * seed + self.comm.rank)
        x = torch.randn(4, HIDDEN, generator=random).bfloat16()
        ids = torch.rand(4, EXPERTS, generator=random).argsort(dim=1)[:, :TOPK].contiguous()
        return x, ids, torch.rand(4, TOPK, generator=random)

    def normal(self, seed: int = 0) -> Any:
        x, ids, weights = self.arguments(seed)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, EXPERTS)
        return self.buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )

    def low_latency(self, seed: int = 0, most: int = MOST, num_experts: int = EXPERTS) -> Any:
        x, ids, _ = self.arguments(seed)
        return self.buffer.low_latency_dispatch(x, ids, most, num_experts, use_fp8=False)

    def version_2(self, seed: int = 0) -> Any:
        x, ids, weights = self.arguments(seed)
        return self.elastic.dispatch(x, ids, weights, num_experts=EXPERTS)


def fresh_and_cached(calls: Calls) -> Any:
    handle = calls.normal()[4]
    return calls.normal() if calls.comm.rank == 0 else calls.buffer.dispatch(calls.arguments(0)[0], handle=handle)


def dispatch_and_combine(calls: Calls) -> Any:
    rows, _, _, _, handle, _ = calls.normal()
    return calls.normal() if calls.comm.rank == 0 else calls.buffer.combine(rows, handle)


def normal_and_low_latency(calls: Calls) -> Any:
    calls.normal(), calls.low_latency()
    return calls.normal() if calls.comm.rank == 0 else calls.low_latency()


def version_2_and_low_latency(calls: Calls) -> Any:
    calls.version_2(), calls.low_latency()
    return calls.version_2() if calls.comm.rank == 0 else calls.low_latency()


def handles_of_other_dispatches(calls: Calls) -> Any:
    mine = [calls.normal(seed) for seed in range(2)][calls.comm.rank]
    return calls.buffer.combine(mine[0], mine[4])


def handles_of_other_elastic_dispatches(calls: Calls) -> Any:
    mine = [calls.version_2(seed) for seed in range(2)][calls.comm.rank]
    return calls.elastic.combine(mine[0], mine[3])


def a_known_shape_and_another(calls: Calls) -> Any:
    calls.low_latency(), calls.low_latency(most=2 * MOST)
    return calls.low_latency(most=(1 + calls.comm.rank) * MOST)


def a_shape_that_is_new_to_one(calls: Calls) -> Any:
    calls.low_latency()
    return calls.low_latency(most=(1 + calls.comm.rank) * MOST)


def experts_that_are_new_to_one(calls: Calls) -> Any:
    calls.low_latency()
    return calls.low_latency(num_experts=(1 + calls.comm.rank) * EXPERTS)


KINDS = [
    fresh_and_cached,
    dispatch_and_combine,
    normal_and_low_latency,
    version_2_and_low_latency,
    handles_of_other_dispatches,
    handles_of_other_elastic_dispatches,
    a_known_shape_and_another,
    a_shape_that_is_new_to_one,
    experts_that_are_new_to_one,
]


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_and_names_the_other_rank(kind: Callable[[Calls], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", short_timeout_ms())
    monkeypatch.setenv("CROSSDOCK_JOIN_TIMEOUT_MS", short_timeout_ms())

    def program(comm: ep.Communicator) -> str:
        calls = Calls(comm)
        with pytest.raises(ep.Error) as raised:
            kind(calls)
        return str(raised.value)

    for rank, message in enumerate(ep.run_threads(RANKS, program)):
        assert f"rank {rank}" in message and f"rank {1 - rank}" in message, message
