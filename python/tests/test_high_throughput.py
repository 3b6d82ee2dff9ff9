# SPDX-License-Identifier: Apache-2.0
"""High throughput: flat and expert-major, forward and backward, against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import crossdock as ep
from reference import Problem, combined, expert_factor, random_problem, rows_of_expert, rows_of_rank


def group_of(comm: ep.Communicator, problem: Problem, **fields: Any) -> ep.Group:
    return ep.Group(
        comm,
        algorithm=ep.Algorithm.HIGH_THROUGHPUT,
        num_experts=problem.num_experts,
        max_dispatch_tokens_per_rank=problem.max_tokens,
        max_token_bytes=problem.hidden * problem.tokens[0].itemsize,
        num_topk=problem.topk_idx[0].shape[1],
        **fields,
    )


def flat(comm: ep.Communicator, problem: Problem, budget: int = 0, **fields: Any) -> None:
    """Eager (budget 0) or fixed: rows in order, ids ascending with weights beside them, sums, gradients of weights."""
    rank, topk, tokens = comm.rank, problem.topk_idx[0].shape[1], problem.tokens[comm.rank]
    total = np.zeros(1, np.int32)
    counts = np.zeros(problem.experts_per_rank, np.int32)
    expected = rows_of_rank(problem, rank)
    with group_of(comm, problem, max_recv_tokens_per_rank=budget, **fields) as group:
        handle = group.init_handle(ep.Layout.FLAT, topk)
        handle.update(
            problem.topk_idx[rank], layout_info=ep.LayoutInfo(recv_total_counter=total, expert_counters=counts)
        )
        assert total[0] == len(expected)
        num_rows = budget or len(expected)
        received = np.zeros((num_rows, problem.hidden), tokens.dtype)
        weights = np.zeros((num_rows, topk), np.float32)
        indices = np.zeros((num_rows, topk), np.int64)
        handle.dispatch(
            ep.DispatchInputs(tokens=tokens, topk_weights=problem.topk_weights[rank]),
            ep.DispatchOutputs(tokens=received, topk_weights=weights, topk_idx=indices),
        )
        for row, (source, token) in enumerate(expected):
            np.testing.assert_array_equal(received[row], problem.tokens[source][token])
            local = indices[row][indices[row] >= 0]
            assert (np.diff(local) > 0).all()
            factors = [expert_factor(rank * problem.experts_per_rank + int(expert)) for expert in local]
            factor = np.dot(weights[row][: len(local)].astype(np.float64), factors)
            received[row] = (received[row].astype(np.float32) * np.float32(factor)).astype(tokens.dtype)
        result = np.ones_like(tokens)
        handle.combine(received, result)
        bound = 1e-5 if tokens.dtype == np.float32 else 4e-2
        np.testing.assert_allclose(result.astype(np.float64), combined(problem, rank), rtol=bound, atol=bound)

        # Backward: the same rows again, and numbers that were put beside the ids return as gradients.
        handle.dispatch(tokens, received, pass_direction=ep.PassDir.BWD)
        gradients = np.where(indices >= 0, indices + 1 + rank * 100.0, 0).astype(np.float32)
        returned = np.ones((len(tokens), topk), np.float32)
        handle.combine(
            ep.CombineInputs(tokens=received, topk_weights=gradients),
            ep.CombineOutputs(tokens=result, topk_weights=returned),
            pass_direction=ep.PassDir.BWD,
        )
        chosen = problem.topk_idx[rank]
        owner, local_id = chosen // problem.experts_per_rank, chosen % problem.experts_per_rank
        np.testing.assert_array_equal(returned, np.where(chosen >= 0, local_id + 1 + owner * 100.0, 0))
        handle.close()


def expert_major(comm: ep.Communicator, problem: Problem, alignment: int) -> None:
    rank, local = comm.rank, problem.experts_per_rank
    tokens = problem.tokens[rank]
    total, counts, offsets = np.zeros(1, np.int64), np.zeros(local, np.int64), np.zeros(local, np.int64)
    info = ep.LayoutInfo(recv_total_counter=total, expert_counters=counts, expert_offsets=offsets)
    with group_of(comm, problem) as group:
        handle = group.create_handle(
            ep.Layout.EXPERT_MAJOR,
            problem.topk_idx[rank],
            layout_info=info,
            dispatch_output_per_expert_alignment=alignment,
        )
        received = np.ones((int(total[0]), problem.hidden), tokens.dtype)
        weights = np.ones(int(total[0]), np.float32)
        handle.dispatch(
            ep.DispatchInputs(tokens=tokens, topk_weights=problem.topk_weights[rank]),
            ep.DispatchOutputs(tokens=received, topk_weights=weights),
        )
        for expert in range(local):
            rows = rows_of_expert(problem, rank * local + expert)
            assert counts[expert] == -(-len(rows) // alignment) * alignment
            zone = slice(int(offsets[expert]), int(offsets[expert] + counts[expert]))
            for row, (source, token, k) in enumerate(rows):
                np.testing.assert_array_equal(received[zone][row], problem.tokens[source][token])
                assert weights[zone][row] == problem.topk_weights[source][token, k]
            assert not received[zone][len(rows) :].any()
            received[zone] *= expert_factor(rank * local + expert) * weights[zone, None]
        result = np.ones_like(tokens)
        handle.combine(received, result)
        np.testing.assert_allclose(result, combined(problem, rank), rtol=1e-5, atol=1e-5)
        handle.close()


@pytest.mark.parametrize("run", [ep.run_threads, ep.run_processes])
@pytest.mark.parametrize("budget", [0, 200])
def test_flat(run: Any, budget: int) -> None:
    run(3, flat, random_problem(21, 3, 3, 50, 16, 4), budget)


def two_nodes(comm: ep.Communicator, problem: Problem) -> None:
    flat(comm, problem, 200, lsa_team_size=2)


def test_nodes() -> None:
    """Two nodes of two ranks: the same rows, sums and gradients."""
    ep.run_threads(4, two_nodes, random_problem(24, 4, 2, 30, 16, 4))


def test_flat_in_bf16() -> None:
    ep.run_threads(2, flat, random_problem(22, 2, 4, 40, 64, 3, ml_dtypes.bfloat16))


@pytest.mark.parametrize("alignment", [1, 8])
def test_expert_major(alignment: int) -> None:
    ep.run_threads(4, expert_major, random_problem(23, 4, 2, 33, 16, 4), alignment)


def overflow(comm: ep.Communicator, problem: Problem) -> None:
    with group_of(comm, problem, max_recv_tokens_per_rank=problem.max_tokens) as group:
        handle = group.init_handle(ep.Layout.FLAT, problem.topk_idx[0].shape[1])
        with pytest.raises(ep.Error, match="max_recv_tokens_per_rank"):
            handle.update(problem.topk_idx[comm.rank])
            handle.dispatch(problem.tokens[comm.rank], problem.tokens[comm.rank])
        handle.close()


def test_a_budget_that_is_too_small_is_told() -> None:
    problem = random_problem(1, 2, 2, 8, 16, 4)
    for rank in range(2):
        problem.tokens[rank] = np.ones((8, 16), np.float32)
        problem.topk_idx[rank] = np.tile(np.arange(4), (8, 1))
        problem.topk_weights[rank] = np.ones((8, 4), np.float32)
    ep.run_threads(2, overflow, problem)


def limited(comm: ep.Communicator, problem: Problem) -> None:
    with group_of(comm, problem) as group:
        handle = group.init_handle(ep.Layout.FLAT, problem.topk_idx[0].shape[1])
        for num_sms in (0, 1, 20, 2**32 - 1):
            handle.set_sms(num_sms)
            assert handle.sms == (1, 1, 1)
        handle.close()
    group = ep.Group(comm, num_experts=2, max_dispatch_tokens_per_rank=2, max_token_bytes=16)
    handle = group.init_handle(ep.Layout.RANK_MAJOR, 1)
    handle.set_sms(1)  # in low latency a limit without an agreement
    with pytest.raises(ep.InvalidUsage, match="HT handles"):
        handle.sms  # noqa: B018
    group.close()


def test_handles_take_a_number_of_sms() -> None:
    # On CPUs a rank has one thread, whatever is asked for.
    ep.run_threads(2, limited, random_problem(1, 2, 2, 8, 16, 4))


def relocation(comm: ep.Communicator, problem: Problem) -> None:
    """A second handle over the memory of the first works with its routing."""
    rank, topk, tokens = comm.rank, problem.topk_idx[0].shape[1], problem.tokens[comm.rank]
    with group_of(comm, problem, max_recv_tokens_per_rank=200) as group:
        memory = np.zeros(group.handle_mem_size(ep.Layout.FLAT, topk), np.uint8)
        first = group.init_handle(ep.Layout.FLAT, topk, handle_mem=memory)
        first.update(problem.topk_idx[rank])
        first.close()
        second = group.init_handle(ep.Layout.FLAT, topk, handle_mem=memory)
        received = np.zeros((200, problem.hidden), np.float32)
        second.dispatch(tokens, received, pass_direction=ep.PassDir.BWD)
        for row, (source, token) in enumerate(rows_of_rank(problem, rank)):
            np.testing.assert_array_equal(received[row], problem.tokens[source][token])
        second.close()


def test_routing_moves_with_handle_mem() -> None:
    ep.run_threads(2, relocation, random_problem(31, 2, 2, 30, 16, 3))
