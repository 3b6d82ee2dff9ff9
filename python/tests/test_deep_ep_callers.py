# SPDX-License-Identifier: Apache-2.0
"""Those who call DeepEP: vLLM's and SGLang's calls, one by one, by hand. Their own code runs in tests/engines.

The layer is the same everywhere: expert e multiplies its rows by e + 1, so a token becomes x times the sum of its
weights times (e + 1). Ranks are threads in the replays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
from crossdock.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8  # noqa: E402
from deep_ep_checks import Problem  # noqa: E402

RANKS = 2
TOLERANCE = {"rtol": 6e-2, "atol": 6e-2}


def expected_of(problem: Problem, rank: int) -> Any:
    ids, weights = problem.ids[rank], problem.weights[rank]
    factors = torch.where(ids >= 0, weights * (ids + 1), 0).sum(dim=1, keepdim=True)
    return problem.x[rank].float() * factors


def experts_by_row(problem: Problem, rank: int, rows: Any, ids: Any, weights: Any) -> Any:
    """What an engine's experts and its reduction make of rows with K local ids each."""
    factors = torch.where(ids >= 0, weights * (ids + rank * problem.local + 1), 0)
    return (rows.float() * factors.sum(dim=1, keepdim=True)).bfloat16()


def experts_by_slot(problem: Problem, rank: int, rows: Any) -> Any:
    """[L, P, H], every local expert its rows; weights come later."""
    numbers = torch.arange(problem.local) + rank * problem.local + 1
    return (rows.float() * numbers[:, None, None]).bfloat16()


def problem_of(**settings: Any) -> Problem:
    problem = Problem(RANKS, [20, 13], topk=4, experts_per_rank=4, **settings)
    problem.weights = [weights / 8 for weights in problem.weights]
    return problem


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_vllm_high_throughput(form: str) -> None:
    problem = problem_of(repeats=True)

    def program(comm: ep.Communicator) -> None:
        rank = comm.rank
        deep_ep.Buffer.set_num_sms(20)
        buffer = deep_ep.Buffer(
            group=comm,
            num_nvl_bytes=1 << 20,
            num_rdma_bytes=0,
            low_latency_mode=False,
            num_qps_per_rank=1,
            explicitly_destroy=True,
        )
        for _ in range(2):
            x: Any = problem.x[rank]
            x = per_token_cast_to_fp8(x) if form == "fp8" else x
            per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
                topk_idx=problem.ids[rank],
                num_experts=problem.num_experts,
                previous_event=None,
                async_finish=False,
                allocate_on_comm_stream=False,
            )
            rows, ids, weights, counts, handle, event = buffer.dispatch(
                x=x,
                handle=None,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=problem.ids[rank],
                topk_weights=problem.weights[rank],
                expert_alignment=1,
                config=deep_ep.Buffer.get_dispatch_config(comm.num_ranks),
                previous_event=event,
                async_finish=True,
                allocate_on_comm_stream=False,
            )
            assert event.event is not None
            event.current_stream_wait()
            assert sum(counts or []) == int((torch.as_tensor(ids) >= 0).sum())
            rows = per_token_cast_back(*rows) if form == "fp8" else rows
            output = experts_by_row(problem, rank, rows, ids, weights)
            result, _, event = buffer.combine(
                x=output,
                handle=handle,
                topk_weights=None,
                config=deep_ep.Buffer.get_combine_config(comm.num_ranks),
                previous_event=None,
                async_finish=False,
                allocate_on_comm_stream=False,
            )
            torch.testing.assert_close(result.float(), expected_of(problem, rank), **TOLERANCE)
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("form", ["bf16", "fp8", "ue8m0"])
def test_vllm_low_latency(form: str) -> None:
    """Two micro-batches, whose dispatches are both under way before the first hook is called."""
    problem, num_max = problem_of(hidden=512), 32

    def program(comm: ep.Communicator) -> None:
        rank, packed = comm.rank, form == "ue8m0"
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=num_max, hidden=512, num_ranks=RANKS, num_experts=problem.num_experts
        )
        buffer = deep_ep.Buffer(
            group=comm,
            num_nvl_bytes=1 << 20,
            num_rdma_bytes=size,
            low_latency_mode=True,
            num_qps_per_rank=problem.local,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            explicitly_destroy=True,
            enable_shrink=False,
        )
        started = []
        for _ in range(2):
            rows, counts, handle, _, hook = buffer.low_latency_dispatch(
                problem.x[rank],
                problem.ids[rank],
                num_max,
                problem.num_experts,
                use_fp8=form != "bf16",
                round_scale=packed,
                use_ue8m0=packed,
                async_finish=False,
                return_recv_hook=True,
            )
            started.append((rows, counts, handle, hook))
        for rows, counts, handle, hook in started:
            assert hook is not None
            hook()
            assert torch.equal(counts, problem.counts(rank).int())
            if isinstance(rows, tuple):
                values, scales = rows
                flat = values.view(-1, 512), scales.reshape(values.shape[0] * values.shape[1], -1)
                rows = per_token_cast_back(*flat).view(values.shape)
            output = torch.full_like(problem.x[rank], torch.nan)
            _, _, hook = buffer.low_latency_combine(
                experts_by_slot(problem, rank, rows),
                problem.ids[rank],
                problem.weights[rank],
                handle,
                async_finish=False,
                zero_copy=False,
                return_recv_hook=True,
                out=output,
            )
            assert hook is not None
            hook()
            torch.testing.assert_close(output.float(), expected_of(problem, rank), **TOLERANCE)
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("is_graph", [False, True])
def test_vllm_version_2(is_graph: bool) -> None:
    """Prefill expanded with exact shapes, decode as for a graph: no CPU sync, by rank, ids overwritten in place."""
    problem = problem_of()

    def program(comm: ep.Communicator) -> None:
        rank = comm.rank
        buffer = deep_ep.ElasticBuffer(
            group=comm,
            num_max_tokens_per_rank=64,
            hidden=256,
            num_topk=4,
            use_fp8_dispatch=False,
            allow_hybrid_mode=True,
            prefer_overlap_with_compute=False,
            allow_multiple_reduction=False,
            explicitly_destroy=True,
        )
        assert buffer.get_theoretical_num_sms(num_experts=problem.num_experts, num_topk=4) > 0
        for _ in range(2):
            rows, ids, weights, handle, event = buffer.dispatch(
                x=problem.x[rank],
                topk_idx=problem.ids[rank],
                topk_weights=problem.weights[rank],
                num_experts=problem.num_experts,
                num_max_tokens_per_rank=32 if is_graph else None,
                do_expand=not is_graph,
                do_cpu_sync=not is_graph,
                async_with_compute_stream=False,
            )
            assert event.event is None and weights is not None
            if is_graph:
                assert ids is not None
                num = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
                output = experts_by_row(problem, rank, rows, ids, weights)
                output[num:] = torch.nan
                ids.add_(7)
            else:
                counts = handle.num_recv_tokens_per_expert_list
                assert len(rows) == sum(counts)
                numbers = torch.arange(problem.local).repeat_interleave(torch.tensor(counts))
                output = (rows.float() * (weights * (numbers + rank * problem.local + 1)).unsqueeze(1)).bfloat16()
            result, _, event = buffer.combine(
                x=output,
                handle=handle,
                topk_weights=None,
                async_with_compute_stream=is_graph,
                allocate_on_comm_stream=is_graph,
            )
            if event.event is not None:
                event.current_stream_wait()
            torch.testing.assert_close(result.float(), expected_of(problem, rank), **TOLERANCE)
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("use_hook", [False, True])
def test_sglang(use_hook: bool) -> None:
    """One buffer for both modes, cleaned at every change: prefill asynchronously, then decode."""
    problem, num_max = problem_of(hidden=512), 32

    def program(comm: ep.Communicator) -> None:
        rank: int = comm.rank
        buffer_class: Any = deep_ep.Buffer
        config = deep_ep.Config(num_sms=24, num_max_nvl_chunked_send_tokens=8, num_max_nvl_chunked_recv_tokens=256)
        sizes = [0, buffer_class.get_low_latency_rdma_size_hint(num_max, 512, RANKS, problem.num_experts)]
        for hints in (config, buffer_class.get_combine_config(RANKS)):
            sizes[0] = max(sizes[0], hints.get_nvl_buffer_size_hint(1024, RANKS))
            sizes[1] = max(sizes[1], hints.get_rdma_buffer_size_hint(1024, RANKS))
        buffer = buffer_class(
            comm, *sizes, low_latency_mode=True, num_qps_per_rank=problem.local, allow_mnnvl=True, use_fabric=True
        )
        x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
        for _ in range(2):
            previous = buffer_class.capture()
            per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
                ids, problem.num_experts, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
            )
            (values, scales), local_ids, local_weights, counts, handle, event = buffer.dispatch(
                per_token_cast_to_fp8(x),
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                previous_event=previous,
                async_finish=True,
                allocate_on_comm_stream=True,
                expert_alignment=128,
                config=config,
            )
            event.current_stream_wait()
            assert counts == (-(-problem.counts(rank) // 128) * 128).tolist()
            rows = per_token_cast_back(values, scales)
            output = experts_by_row(problem, rank, rows, local_ids, local_weights)
            result, _, event = buffer.combine(
                output,
                handle,
                async_finish=True,
                previous_event=buffer_class.capture(),
                allocate_on_comm_stream=True,
                config=config,
            )
            event.current_stream_wait()
            torch.testing.assert_close(result.float(), expected_of(problem, rank), **TOLERANCE)

            buffer.clean_low_latency_buffer(num_max, 512, problem.num_experts)
            rows, counts, sent, event, hook = buffer.low_latency_dispatch(
                x,
                ids,
                num_max,
                problem.num_experts,
                use_fp8=False,
                async_finish=not use_hook,
                return_recv_hook=use_hook,
            )
            hook() if hook is not None else event.current_stream_wait()
            result, event, hook = buffer.low_latency_combine(
                x=experts_by_slot(problem, rank, rows),
                topk_idx=ids,
                topk_weights=weights,
                handle=sent,
                async_finish=not use_hook,
                return_recv_hook=use_hook,
            )
            hook() if hook is not None else event.current_stream_wait()
            torch.testing.assert_close(result.float(), expected_of(problem, rank), **TOLERANCE)

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("is_extend", [False, True])
def test_sglang_version_2(is_extend: bool, do_expand: bool) -> None:
    """FP8 rows with alignment 128, column-major packed scales; prefill exact, decode with worst-case shapes."""
    problem = problem_of(hidden=512)

    def program(comm: ep.Communicator) -> None:
        rank = comm.rank
        buffer = deep_ep.ElasticBuffer(
            comm,
            num_max_tokens_per_rank=32,
            hidden=512,
            num_topk=4,
            use_fp8_dispatch=True,
            allow_hybrid_mode=True,
            sl_idx=0,
            prefer_overlap_with_compute=False,
        )
        assert buffer.num_bytes > 0
        (values, scales), ids, weights, handle, event = buffer.dispatch(
            per_token_cast_to_fp8(problem.x[rank]),
            topk_idx=problem.ids[rank],
            topk_weights=problem.weights[rank],
            num_experts=problem.num_experts,
            num_max_tokens_per_rank=32,
            expert_alignment=128,
            num_sms=0,
            use_tma_aligned_col_major_sf=True,
            do_cpu_sync=is_extend,
            do_expand=do_expand,
        )
        assert event.event is None and scales.stride(0) == 1 and weights is not None
        rows = per_token_cast_back(values, scales.contiguous())
        if do_expand:
            assert weights.shape == (len(rows),)
            ends = handle.psum_num_recv_tokens_per_expert
            numbers = torch.zeros(len(rows))
            starts = [-(-int(end) // 128) * 128 for end in [0, *ends[:-1].tolist()]]
            for expert, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
                numbers[start:end] = expert + rank * problem.local + 1
            output = torch.where(numbers > 0, weights * numbers, 0).unsqueeze(1) * rows.float()
            output = torch.where((numbers > 0).unsqueeze(1), output, 0).bfloat16()
        else:
            num = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
            assert ids is not None
            output = torch.zeros_like(rows)
            output[:num] = experts_by_row(problem, rank, rows[:num], ids[:num], weights[:num])
        result, returned, _ = buffer.combine(output, handle=handle, topk_weights=weights if do_expand else None)
        torch.testing.assert_close(result.float(), expected_of(problem, rank), **TOLERANCE)
        wanted = torch.where(problem.ids[rank] >= 0, problem.weights[rank], 0)
        assert torch.equal(returned, wanted) if do_expand else returned is None

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_choices_that_change_places_in_the_tensor_of_the_dispatch(num_ranks: int) -> None:
    def program(comm: ep.Communicator) -> list[float]:
        buffer: Any = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
        x, ids, weights = torch.ones(1, 8).bfloat16(), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[2.0, 1.0]])
        sums = []
        for choices in ([[1, 0]], [[-1, 1]], [[0, 1]]):
            ids.copy_(torch.tensor([[0, 1]]))
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 1, 2, use_fp8=False)
            factors = torch.tensor([1, 10])[comm.rank * (2 // num_ranks) :][: 2 // num_ranks]
            made = rows * factors.view(-1, 1, 1).bfloat16()
            ids.copy_(torch.tensor(choices))
            sums.append(buffer.low_latency_combine(made, ids, weights, handle)[0][0, 0].item())
        with torch.inference_mode():  # where torch counts no changes
            ids = torch.tensor([[0, 1]])
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 1, 2, use_fp8=False)
            sums.append(buffer.low_latency_combine(rows, ids, weights, handle)[0][0, 0].item())
        buffer.destroy()
        return sums

    assert ep.run_threads(num_ranks, program) == [[21.0, 10.0, 12.0, 3.0]] * num_ranks


def test_numbers_of_numpy_and_one_combine_buffer_for_a_handle() -> None:
    def program(comm: ep.Communicator) -> None:
        buffer: Any = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
        x, ids = torch.ones(1, 128).bfloat16(), torch.tensor([[0, 1]])
        handle = buffer.low_latency_dispatch(x, ids, np.int64(2), np.int32(2), use_fp8=False)[2]
        first = buffer.get_next_low_latency_combine_buffer(handle)
        assert buffer.get_next_low_latency_combine_buffer(handle) is first
        buffer.destroy()

    ep.run_threads(1, program)


def test_what_does_not_match() -> None:
    def program(comm: ep.Communicator) -> None:
        buffer: Any = deep_ep.Buffer(comm, 1 << 20, 0, explicitly_destroy=True)
        x, ids = torch.ones(2, 128).bfloat16(), torch.tensor([[0], [1]])
        of_ranks, _, of_experts, is_in_rank, _ = buffer.get_dispatch_layout(ids, 2)
        layout: dict[str, Any] = {"num_tokens_per_rank": of_ranks, "is_token_in_rank": is_in_rank, "topk_idx": ids}
        message = r"num_tokens_per_expert is \[3, 3\], topk_idx has \[1, 1\] for the experts"
        with pytest.raises(AssertionError, match=message):
            buffer.dispatch(x, **layout, num_tokens_per_expert=of_experts + 2, topk_weights=torch.ones(2, 1))
        with pytest.raises(AssertionError, match=r"topk_idx is \[1, 3\] of torch.int64, allowed: 1..2 columns"):
            buffer.get_dispatch_layout(torch.tensor([[0, 1, 0]]), 2)
        buffer.destroy()

    ep.run_threads(1, program)


def test_a_layout_that_differs_between_ranks() -> None:
    def program(comm: ep.Communicator) -> None:
        buffer: Any = deep_ep.ElasticBuffer(comm, explicitly_destroy=True)
        x, ids = torch.ones(1, 128).bfloat16(), torch.tensor([[0, 1]])
        buffer.dispatch(x, ids, num_experts=2)
        with pytest.raises(AssertionError, match="do_expand: .*rank 0 has False, rank 1 has True"):
            buffer.dispatch(x, ids, num_experts=2, do_expand=comm.rank == 1)
        buffer.dispatch(x, ids, num_experts=2)
        buffer.destroy()

    ep.run_threads(2, program)
