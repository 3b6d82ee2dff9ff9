# SPDX-License-Identifier: Apache-2.0
"""Invariant groups: the same tokens and experts give the same bits on any number of ranks, in both modes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import crossdock as ep

TOKENS, HIDDEN, EXPERTS, TOPK = 37, 64, 16, 5
BF16 = ml_dtypes.bfloat16


class Model:
    """All tokens, and what experts make of them. Sums of choices in other orders have other bits."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        self.x = random.standard_normal((TOKENS, HIDDEN)).astype(BF16)
        self.ids = np.array([random.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)])
        self.ids[random.random(self.ids.shape) < 0.1] = -1
        self.factors = np.exp2(random.integers(-6, 7, EXPERTS)) * random.standard_normal(EXPERTS)

    def of_expert(self, expert: int, rows: Any) -> Any:
        return np.tanh(rows.astype(np.float32) * np.float32(self.factors[expert])).astype(BF16)

    def sums(self) -> Any:
        """In plain loops."""
        result = np.zeros((TOKENS, HIDDEN), np.float32)
        for token in range(TOKENS):
            for expert in self.ids[token]:
                if expert >= 0:
                    result[token] += self.of_expert(expert, self.x[token]).astype(np.float32)
        return result.astype(BF16)


def group_of(comm: ep.Communicator, algorithm: ep.Algorithm, most: int, **fields: Any) -> ep.Group:
    return ep.Group(
        comm,
        algorithm=algorithm,
        num_experts=EXPERTS,
        max_dispatch_tokens_per_rank=most,
        max_token_bytes=HIDDEN * 2,
        num_topk=TOPK,
        **fields,
    )


def low_latency(comm: ep.Communicator, model: Model, fields: dict[str, Any]) -> Any:
    local, most = EXPERTS // comm.num_ranks, -(-TOKENS // comm.num_ranks)
    own = np.array_split(np.arange(TOKENS), comm.num_ranks)[comm.rank]
    with group_of(comm, ep.Algorithm.LOW_LATENCY, most, **fields) as group:
        with group.create_handle(ep.Layout.EXPERT_MAJOR, model.ids[own]) as handle:
            rows = np.zeros((local, comm.num_ranks * most, HIDDEN), BF16)
            counts = np.zeros(local, np.int32)
            handle.dispatch(model.x[own], rows, layout_info=ep.LayoutInfo(expert_counters=counts))
            for expert in range(local):
                rows[expert] = model.of_expert(comm.rank * local + expert, rows[expert])
            result = np.ones((len(own), HIDDEN), BF16)
            ones = np.ones((len(own), TOPK), np.float32)
            handle.combine(rows, ep.CombineOutputs(tokens=result, topk_weights=ones))
            return result


def high_throughput(comm: ep.Communicator, model: Model, fields: dict[str, Any]) -> Any:
    """The sums of a forward pass, and of a backward one with the same rows."""
    local, most = EXPERTS // comm.num_ranks, -(-TOKENS // comm.num_ranks)
    own = np.array_split(np.arange(TOKENS), comm.num_ranks)[comm.rank]
    counts, offsets, total = np.zeros(local, np.int64), np.zeros(local, np.int64), np.zeros(1, np.int64)
    info = ep.LayoutInfo(recv_total_counter=total, expert_counters=counts, expert_offsets=offsets)
    with group_of(comm, ep.Algorithm.HIGH_THROUGHPUT, most, **fields) as group:
        with group.create_handle(ep.Layout.EXPERT_MAJOR, model.ids[own], layout_info=info) as handle:
            rows = np.zeros((int(total[0]), HIDDEN), BF16)
            weights = np.zeros(int(total[0]), np.float32)
            handle.dispatch(
                ep.DispatchInputs(tokens=model.x[own], topk_weights=np.ones((len(own), TOPK), np.float32)),
                ep.DispatchOutputs(tokens=rows, topk_weights=weights),
            )
            for expert in range(local):
                zone = slice(int(offsets[expert]), int(offsets[expert] + counts[expert]))
                rows[zone] = model.of_expert(comm.rank * local + expert, rows[zone])
            result, gradients = np.ones((2, len(own), HIDDEN), BF16)
            handle.combine(rows, result)
            handle.combine(
                ep.CombineInputs(tokens=rows, topk_weights=weights),
                ep.CombineOutputs(tokens=gradients, topk_weights=np.ones((len(own), TOPK), np.float32)),
                pass_direction=ep.PassDir.BWD,
            )
            np.testing.assert_array_equal(gradients, result)
            return result


@pytest.mark.parametrize("layer", [low_latency, high_throughput])
@pytest.mark.parametrize(
    ("ranks", "lsa_team_size"), [(1, 0), (2, 0), (4, 0), (4, 2), (8, 0), (8, 2), (8, 1), (16, 0), (16, 4)]
)
def test_bits_are_those_of_plain_loops(layer: Any, ranks: int, lsa_team_size: int) -> None:
    model = Model()
    fields = {"invariant": True, "lsa_team_size": lsa_team_size}
    found = np.concatenate(ep.run_threads(ranks, layer, model, fields))
    np.testing.assert_array_equal(found.view(np.uint16), model.sums().view(np.uint16))


def test_without_the_option_bits_depend_on_ranks() -> None:
    """Or the test above would show nothing."""
    model = Model()
    found = np.concatenate(ep.run_threads(2, high_throughput, model, {}))
    assert (found.view(np.uint16) != model.sums().view(np.uint16)).any()


def test_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_INVARIANT", "1")
    model = Model()
    found = np.concatenate(ep.run_threads(2, high_throughput, model, {}))
    np.testing.assert_array_equal(found.view(np.uint16), model.sums().view(np.uint16))


def flat(comm: ep.Communicator, model: Model) -> None:
    fields = {"invariant": True, "max_recv_tokens_per_rank": TOKENS}
    with group_of(comm, ep.Algorithm.HIGH_THROUGHPUT, TOKENS, **fields) as group:
        with group.create_handle(ep.Layout.FLAT, model.ids) as handle:
            with pytest.raises(ep.InvalidUsage, match="the handle is not expert-major.*combines expert-major rows"):
                handle.combine(np.zeros((TOKENS, HIDDEN), BF16), np.zeros((TOKENS, HIDDEN), BF16))


def test_flat_combines_are_refused() -> None:
    ep.run_threads(1, flat, Model())


def test_other_values_are_refused() -> None:
    def group(comm: ep.Communicator) -> None:
        with pytest.raises(ep.InvalidArgument, match="invariant is yes, allowed: True, False"):
            group_of(comm, ep.Algorithm.LOW_LATENCY, 1, invariant="yes")

    ep.run_threads(1, group)
