# SPDX-License-Identifier: Apache-2.0
"""Low latency: results match the reference for every layout, type and backend."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossdock as ep
from reference import Problem, combined, expert_factor, random_problem, rows_of_expert, rows_of_rank

TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


def group_of(comm: ep.Communicator, problem: Problem) -> ep.Group:
    return ep.Group(
        comm,
        num_experts=problem.num_experts,
        max_dispatch_tokens_per_rank=problem.max_tokens,
        max_token_bytes=problem.hidden * problem.tokens[0].itemsize,
    )


def expert_major(comm: ep.Communicator, problem: Problem, split: bool = False) -> None:
    """Every row in its place, the counts, and the weighted sums of two steps."""
    rank, local = comm.rank, problem.experts_per_rank
    tokens = problem.tokens[rank]
    received = np.zeros((local, comm.num_ranks * problem.max_tokens, problem.hidden), tokens.dtype)
    counts = np.full(local, -1, np.int32)
    result = np.ones_like(tokens)
    outputs = ep.CombineOutputs(tokens=result, topk_weights=problem.topk_weights[rank])
    with (
        group_of(comm, problem) as group,
        group.create_handle(ep.Layout.EXPERT_MAJOR, problem.topk_idx[rank]) as handle,
    ):
        for _ in range(2):
            handle.dispatch(tokens, received, layout_info=ep.LayoutInfo(expert_counters=counts), send_only=split)
            handle.complete()
            for expert in range(local):
                rows = rows_of_expert(problem, rank * local + expert)
                assert counts[expert] == len(rows)
                for row, (source, token, _) in enumerate(rows):
                    np.testing.assert_array_equal(received[expert, row], problem.tokens[source][token])
                received[expert] *= np.asarray(expert_factor(rank * local + expert), tokens.dtype)
            handle.combine(received, outputs, send_only=split)
            handle.complete()
            bound = TOLERANCE[tokens.dtype.name]
            np.testing.assert_allclose(result.astype(np.float64), combined(problem, rank), rtol=bound, atol=bound)


def rank_major(comm: ep.Communicator, problem: Problem) -> None:
    """A row for each (source, token) in order, with weights and local expert numbers; sums are the caller's."""
    rank, size, topk = comm.rank, comm.num_ranks, problem.topk_idx[0].shape[1]
    tokens, first = problem.tokens[rank], rank * problem.experts_per_rank
    received = np.zeros((size, problem.max_tokens, problem.hidden), tokens.dtype)
    weights = np.zeros((size, problem.max_tokens, topk), np.float32)
    indices = np.zeros((size, problem.max_tokens, topk), np.int32)
    counts = np.zeros(size, np.int32)
    result = np.ones_like(tokens)
    with group_of(comm, problem) as group, group.create_handle(ep.Layout.RANK_MAJOR, problem.topk_idx[rank]) as handle:
        handle.dispatch(
            ep.DispatchInputs(tokens=tokens, topk_weights=problem.topk_weights[rank]),
            ep.DispatchOutputs(tokens=received, topk_weights=weights, topk_idx=indices),
            layout_info=ep.LayoutInfo(src_rank_counters=counts),
        )
        expected = rows_of_rank(problem, rank)
        assert counts.tolist() == [sum(source == other for source, _ in expected) for other in range(size)]
        next_row = [0] * size
        for source, token in expected:
            row = next_row[source]
            next_row[source] += 1
            np.testing.assert_array_equal(received[source, row], problem.tokens[source][token])
            factor = 0.0
            for k, choice in enumerate(problem.topk_idx[source][token]):
                local = choice - first if first <= choice < first + problem.experts_per_rank else -1
                assert indices[source, row, k] == local
                if local >= 0:
                    factor += float(weights[source, row, k]) * expert_factor(int(choice))
            received[source, row] = (received[source, row].astype(np.float32) * factor).astype(tokens.dtype)
        handle.combine(received, result)
    bound = TOLERANCE[tokens.dtype.name]
    np.testing.assert_allclose(result.astype(np.float64), combined(problem, rank), rtol=bound, atol=bound)


@given(
    seed=st.integers(0, 1000),
    num_ranks=st.integers(1, 5),
    experts_per_rank=st.integers(1, 4),
    max_tokens=st.integers(1, 40),
    hidden=st.integers(1, 9),
    data=st.data(),
)
@pytest.mark.parametrize("program", [expert_major, rank_major])
def test_random_shapes(
    program: Any, seed: int, num_ranks: int, experts_per_rank: int, max_tokens: int, hidden: int, data: Any
) -> None:
    topk = data.draw(st.integers(1, min(6, num_ranks * experts_per_rank)))
    problem = random_problem(seed, num_ranks, experts_per_rank, max_tokens, hidden * 8, topk)
    ep.run_threads(num_ranks, program, problem)


@pytest.mark.parametrize("program", [expert_major, rank_major])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_types(program: Any, dtype: Any) -> None:
    ep.run_threads(3, program, random_problem(7, 3, 2, 12, 32, 3, dtype))


def test_halves_of_an_operation() -> None:
    ep.run_threads(4, expert_major, random_problem(3, 4, 2, 16, 64, 4), True)


@pytest.mark.parametrize("program", [expert_major, rank_major])
def test_processes(program: Any) -> None:
    ep.run_processes(3, program, random_problem(11, 3, 2, 16, 64, 4))


def nodes(comm: ep.Communicator, problem: Problem, option: dict[str, Any]) -> tuple[int, int]:
    """Two nodes of two ranks: the same sums, and rows that crossed are counted."""
    rank = comm.rank
    received = np.zeros((problem.experts_per_rank, comm.num_ranks * problem.max_tokens, problem.hidden), np.float32)
    counts, result = np.zeros(problem.experts_per_rank, np.int32), np.zeros_like(problem.tokens[rank])
    with (
        ep.Group(
            comm,
            num_experts=problem.num_experts,
            max_dispatch_tokens_per_rank=problem.max_tokens,
            max_token_bytes=problem.hidden * 4,
            **option,
        ) as group,
        group.create_handle(ep.Layout.EXPERT_MAJOR, problem.topk_idx[rank]) as handle,
    ):
        handle.dispatch(problem.tokens[rank], received, layout_info=ep.LayoutInfo(expert_counters=counts))
        for expert in range(problem.experts_per_rank):
            received[expert] *= expert_factor(rank * problem.experts_per_rank + expert)
        handle.combine(received, ep.CombineOutputs(tokens=result, topk_weights=problem.topk_weights[rank]))
        np.testing.assert_allclose(result, combined(problem, rank), rtol=1e-5, atol=1e-5)
        traffic = group.traffic()
        return traffic.lsa_team_size, traffic.rows_crossed


def test_nodes() -> None:
    found = ep.run_threads(4, nodes, random_problem(12, 4, 2, 20, 16, 3), {"lsa_team_size": 2})
    assert all(lsa_team_size == 2 for lsa_team_size, _ in found)
    assert sum(rows for _, rows in found) > 0


def quantised(comm: ep.Communicator, problem: Problem) -> None:
    rank, local, hidden = comm.rank, problem.experts_per_rank, problem.hidden
    received = np.zeros((local, comm.num_ranks * problem.max_tokens, hidden), ml_dtypes.float8_e4m3fn)
    scales = np.zeros((*received.shape[:2], hidden // 128), np.float32)
    counts = np.zeros(local, np.int32)
    with (
        group_of(comm, problem) as group,
        group.create_handle(ep.Layout.EXPERT_MAJOR, problem.topk_idx[rank]) as handle,
    ):
        handle.dispatch(
            problem.tokens[rank],
            ep.DispatchOutputs(tokens=received, scales=scales),
            layout_info=ep.LayoutInfo(expert_counters=counts),
            config=ep.DispatchConfig(quant_recipe=ep.DispatchQuantizationRecipe.DS_FP8E3M4),
        )
    for expert in range(local):
        for row, (source, token, _) in enumerate(rows_of_expert(problem, rank * local + expert)):
            decoded = received[expert, row].astype(np.float32) * np.repeat(scales[expert, row], 128)
            np.testing.assert_allclose(decoded, problem.tokens[source][token].astype(np.float32), rtol=0.07, atol=0.02)


def test_fp8_with_scales() -> None:
    ep.run_threads(2, quantised, random_problem(5, 2, 2, 8, 256, 2, ml_dtypes.bfloat16))


def sender_sums(comm: ep.Communicator, problem: Problem) -> None:
    rank = comm.rank
    received = np.zeros((problem.experts_per_rank, comm.num_ranks * problem.max_tokens, problem.hidden), np.float32)
    counts = np.zeros(problem.experts_per_rank, np.int32)
    result = np.zeros_like(problem.tokens[rank])
    with (
        group_of(comm, problem) as group,
        group.create_handle(ep.Layout.EXPERT_MAJOR, problem.topk_idx[rank]) as handle,
    ):
        handle.set_sums(ep.Sums.SENDER)
        handle.dispatch(problem.tokens[rank], received, layout_info=ep.LayoutInfo(expert_counters=counts))
        for expert in range(problem.experts_per_rank):
            received[expert] *= expert_factor(rank * problem.experts_per_rank + expert)
        handle.combine(received, ep.CombineOutputs(tokens=result, topk_weights=problem.topk_weights[rank]))
    np.testing.assert_allclose(result, combined(problem, rank), rtol=1e-5, atol=1e-5)


def test_sums_at_the_sender() -> None:
    ep.run_threads(3, sender_sums, random_problem(9, 3, 3, 10, 16, 4))


def windows(comm: ep.Communicator, problem: Problem) -> None:
    """Rows that peers write straight into a window are the same rows."""
    rank, size, topk = comm.rank, comm.num_ranks, problem.topk_idx[0].shape[1]
    shape = (size, problem.max_tokens, problem.hidden)
    memory: Any = ep.Memory(int(np.prod(shape)) * 4)
    received = np.frombuffer(memory, np.float32).reshape(shape)
    weights = np.zeros((*shape[:2], topk), np.float32)
    indices = np.zeros((*shape[:2], topk), np.int32)
    with comm.register_window(memory) as window, group_of(comm, problem) as group:
        handle = group.create_handle(ep.Layout.RANK_MAJOR, problem.topk_idx[rank])
        comm.barrier()
        handle.dispatch(
            ep.DispatchInputs(tokens=problem.tokens[rank], topk_weights=problem.topk_weights[rank]),
            ep.DispatchOutputs(tokens=ep.Tensor(received, window=window), topk_weights=weights, topk_idx=indices),
        )
        next_row = [0] * size
        for source, token in rows_of_rank(problem, rank):
            np.testing.assert_array_equal(received[source, next_row[source]], problem.tokens[source][token])
            next_row[source] += 1
        handle.close()
    with pytest.raises(ep.InvalidUsage, match="deregistered"):
        ep.Tensor(received, window=window)


@pytest.mark.parametrize("run", [ep.run_threads, ep.run_processes])
def test_windows(run: Any) -> None:
    run(2, windows, random_problem(4, 2, 2, 8, 32, 2))


def test_rows_that_an_expert_has_no_room_for() -> None:
    """Repeated ids bring more than R*M rows of an expert: dropped, or with trap an error that names both numbers."""
    [comm] = ep.Communicator.create_threads(1)
    tokens, ids = np.ones((2, 4), np.float32), np.zeros((2, 2), np.int64)
    received, counts = np.zeros((2, 2, 4), np.float32), np.zeros(2, np.int32)
    with comm:
        for policy in (ep.OverflowPolicy.DROP, ep.OverflowPolicy.TRAP):
            sizes: dict[str, Any] = {"num_experts": 2, "max_dispatch_tokens_per_rank": 2, "max_token_bytes": 16}
            with (
                ep.Group(comm, **sizes, overflow_policy=policy) as group,
                group.create_handle(ep.Layout.EXPERT_MAJOR, ids) as handle,
            ):
                info = ep.LayoutInfo(expert_counters=counts)
                if policy == ep.OverflowPolicy.DROP:
                    handle.dispatch(tokens, received, layout_info=info)
                    assert counts.tolist() == [2, 0]
                    continue
                with pytest.raises(ep.InvalidUsage, match="4 rows of one expert came to rank 0, allowed: at most 2"):
                    handle.dispatch(tokens, received, layout_info=info)
