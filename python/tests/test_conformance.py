# SPDX-License-Identifier: Apache-2.0
"""Random problems of the C suite through Python's calls, whole buffers compared, byte for byte, with its reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import crossdock as ep

c_reference: Any = pytest.importorskip("c_reference", reason="the C suite's reference is not built: skipped")

POISON, NUM_RANKS, SEEDS = 0x5A, 3, 40
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def rows_of(rows: list[bytes], row_bytes: int) -> Bytes:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), row_bytes).copy()  # aligned, unlike bytes


def poisoned(*shape: int) -> Bytes:
    return np.full(shape, POISON, np.uint8)


def typed(array: Bytes, dtype: int, *shape: int) -> ep.Tensor:
    return ep.Tensor(array, dtype=dtype, shape=shape)


def routing_of(problem: Any, rank: int) -> tuple[Any, Any]:
    shape = (problem.num_tokens(rank), problem.num_topk)
    dtype = np.int64 if problem.index_is_64_bit else np.int32
    return np.array(problem.ids(rank), dtype).reshape(shape), np.array(problem.weights(rank), np.float32).reshape(shape)


def low_latency(comm: ep.Communicator, problem: Any) -> None:
    rank, blocks, slots, hidden = comm.rank, problem.num_blocks, problem.slots, problem.hidden
    is_expert_major = problem.layout == ep.Layout.EXPERT_MAJOR
    num_tokens, row_bytes, scale_bytes = problem.num_tokens(rank), problem.received_row_bytes, problem.scale_row_bytes
    topk_idx, weights = routing_of(problem, rank)
    tokens = rows_of([problem.token_row(rank, token) for token in range(num_tokens)], problem.token_row_bytes)
    inputs = ep.DispatchInputs(tokens=typed(tokens, problem.token_type, num_tokens, hidden))
    received, scales = poisoned(blocks * slots, row_bytes), poisoned(blocks * slots, scale_bytes)
    outputs = ep.DispatchOutputs(tokens=typed(received, problem.received_type, blocks, slots, hidden))
    if problem.recipe != ep.DispatchQuantizationRecipe.NONE:
        outputs.scales = typed(scales, problem.scale_type, blocks, slots, problem.num_scales)
    if problem.recipe == ep.DispatchQuantizationRecipe.FWD:
        sent = rows_of([problem.scale_row(rank, token) for token in range(num_tokens)], scale_bytes)
        inputs.scales = typed(sent, problem.scale_type, num_tokens, problem.num_scales)
    counts = np.zeros(blocks, np.int32)
    info = ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind(problem.id_kind))
    arrived_weights, arrived_ids = np.zeros((blocks, slots, problem.num_topk), np.float32), None
    if is_expert_major:
        info.expert_counters = counts
    else:
        arrived_ids = np.full(arrived_weights.shape, 77, np.int32)
        inputs.topk_weights, info.src_rank_counters = weights, counts
        outputs.topk_weights, outputs.topk_idx = arrived_weights, arrived_ids
    expected_rows: list[list[tuple[int, int, int]]] = problem.received(rank)

    fields: dict[str, Any] = {"num_experts": problem.num_experts, "max_dispatch_tokens_per_rank": problem.max_tokens}
    with (
        ep.Group(comm, **fields, max_token_bytes=problem.max_token_bytes) as group,
        group.create_handle(ep.Layout(problem.layout), topk_idx) as handle,
    ):
        recipe = ep.DispatchQuantizationRecipe(problem.recipe)
        handle.dispatch(inputs, outputs, layout_info=info, quant_recipe=recipe, round_scales=problem.round_scales)
        rows, row_scales = poisoned(blocks * slots, row_bytes), poisoned(blocks * slots, scale_bytes)
        experts = poisoned(blocks * slots, problem.combine_row_bytes)
        for block, sources in enumerate(expected_rows):
            assert counts[block] == len(sources)
            for slot, (source, token, k) in enumerate(sources):
                place = block * slots + slot
                row, row_scale = problem.arrived_row(source, token, k)
                rows[place] = np.frombuffer(row, np.uint8)
                row_scales[place] = np.frombuffer(row_scale, np.uint8)
                experts[place] = np.frombuffer(problem.expert_row(rank, source, token, k), np.uint8)
                if arrived_ids is not None:
                    assert arrived_ids[block, slot].tolist() == problem.metadata(rank, source, token)[0]
                    assert arrived_weights[block, slot].tolist() == routing_of(problem, source)[1][token].tolist()
            if arrived_ids is not None:
                assert (arrived_ids[block, len(sources) :] == -1).all()
        np.testing.assert_array_equal(received, rows)
        np.testing.assert_array_equal(scales, row_scales)

        result = poisoned(num_tokens, problem.combine_row_bytes)
        returned = ep.CombineOutputs(tokens=typed(result, problem.combine_type, num_tokens, problem.combine_hidden))
        if is_expert_major:
            returned.topk_weights = weights
        handle.combine(typed(experts, problem.combine_type, blocks, slots, problem.combine_hidden), returned)
    sums = [problem.combined_row(rank, token) for token in range(num_tokens)]
    np.testing.assert_array_equal(result, rows_of(sums, problem.combine_row_bytes))


def high_throughput(comm: ep.Communicator, problem: Any) -> None:
    rank, hidden, row_bytes, budget = comm.rank, problem.hidden, problem.token_row_bytes, problem.budget
    is_flat, num_tokens, dtype = problem.layout == ep.Layout.FLAT, problem.num_tokens(rank), problem.token_type
    topk_idx, weights = routing_of(problem, rank)
    tokens = rows_of([problem.token_row(rank, token) for token in range(num_tokens)], row_bytes)
    total, received = np.zeros(1, np.int32), poisoned(budget, row_bytes)
    metadata = (budget, problem.num_topk) if is_flat else (budget,)
    ids, own = np.zeros(metadata, np.int64), np.zeros(metadata, np.float32)
    outputs = ep.DispatchOutputs(tokens=typed(received, dtype, budget, hidden), topk_weights=own)
    if is_flat:
        outputs.topk_idx = ids
    expected: list[tuple[int, int, int]] = problem.ht_received(rank)
    with (
        ep.Group(
            comm,
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=problem.num_experts,
            max_dispatch_tokens_per_rank=problem.max_tokens,
            max_token_bytes=row_bytes,
            max_recv_tokens_per_rank=budget,
        ) as group,
        group.create_handle(
            ep.Layout(problem.layout),
            topk_idx,
            layout_info=ep.LayoutInfo(recv_total_counter=total),
            dispatch_output_per_expert_alignment=problem.alignment,
        ) as handle,
    ):
        assert total[0] == len(expected)
        inputs = ep.DispatchInputs(tokens=typed(tokens, dtype, num_tokens, hidden), topk_weights=weights)
        kind = ep.ExpertIdKind(problem.id_kind) if is_flat else ep.ExpertIdKind.AUTO
        handle.dispatch(inputs, outputs, layout_info=ep.LayoutInfo(recv_topk_idx_kind=kind))
        rows, experts = poisoned(budget, row_bytes), poisoned(budget, row_bytes)
        for row, (source, token, expert) in enumerate(expected):
            rows[row] = 0 if source < 0 else np.frombuffer(problem.token_row(source, token), np.uint8)
            if source < 0:
                continue
            experts[row] = np.frombuffer(problem.expert_row(rank, source, token, expert), np.uint8)
            if is_flat:
                assert (ids[row].tolist(), own[row].tolist()) == problem.metadata(rank, source, token)
        np.testing.assert_array_equal(received[: len(expected)], rows[: len(expected)])
        result = poisoned(num_tokens, row_bytes)
        handle.combine(typed(experts, dtype, budget, hidden), typed(result, dtype, num_tokens, hidden))
    np.testing.assert_array_equal(result, rows_of(problem.ht_combined_rows(rank), row_bytes))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_low_latency(seed: int) -> None:
    problem = c_reference.random_problem(seed, NUM_RANKS)
    print(problem.describe())
    ep.run_threads(NUM_RANKS, low_latency, problem)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_high_throughput(seed: int) -> None:
    problem = c_reference.random_ht_problem(seed, NUM_RANKS, seed % 2 == 0, (1, 4, 16)[seed % 3])
    print(problem.describe())
    ep.run_threads(NUM_RANKS, high_throughput, problem)
