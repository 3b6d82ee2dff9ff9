# SPDX-License-Identifier: Apache-2.0
"""crossdock.deep_ep.ElasticBuffer: what DeepEP's own tests demand, in small, on CPU tensors; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
from crossdock.deep_ep import elastic_groups  # noqa: E402
from crossdock.deep_ep.streams import tensors_in  # noqa: E402
from crossdock.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8  # noqa: E402
from deep_ep_checks import Problem  # noqa: E402

RANKS = 3


def buffer_of(comm: ep.Communicator, **arguments: Any) -> Any:
    return deep_ep.ElasticBuffer(comm, explicitly_destroy=True, **arguments)


def reference_sum(rows: list[Any], biases: list[Any]) -> Any:
    """fp32, biases first, then rows in their order, rounded once."""
    total: Any = torch.zeros_like(rows[0], dtype=torch.float32)
    if biases:
        total = sum(bias.float() for bias in biases)
    for row in rows:
        total = total + row.float()
    return total.bfloat16()


def expert_factor(expert: Any) -> Any:
    """What expert number `expert` multiplies rows by: exact in bf16, different for each."""
    return 2.0 ** (expert % 5 - 2)


@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_by_rank(alignment: int, do_cpu_sync: bool) -> None:
    problem = Problem(RANKS, [40, 23, 0], repeats=True)

    def program(comm: ep.Communicator) -> None:
        rank, buffer = comm.rank, buffer_of(comm, num_max_tokens_per_rank=64, hidden=256, num_topk=3)
        x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
        statistics = torch.zeros(problem.local, dtype=torch.int32)
        for copies in (True, False):
            received, found_ids, found_weights, handle, event = buffer.dispatch(
                x,
                ids,
                weights,
                cumulative_local_expert_recv_stats=statistics,
                num_experts=problem.num_experts,
                expert_alignment=alignment,
                do_handle_copy=copies,
                do_cpu_sync=do_cpu_sync,
                async_with_compute_stream=copies,
            )
            assert (event.event is not None) == copies
            assert (handle.topk_idx.data_ptr() == ids.data_ptr()) == (not copies or len(x) == 0)
            rows, local_ids, _, sources, tokens = problem.received(rank)
            num, counts = len(rows), problem.tokens(rank)
            assert received.shape == (num if do_cpu_sync else RANKS * 64, 256)
            assert torch.equal(received[:num], rows) and torch.equal(found_ids[:num], local_ids)
            assert (found_ids[num:] == -1).all()
            # All weights of a token, also those for other ranks.
            for i in range(num):
                assert torch.equal(found_weights[i], problem.weights[sources[i]][tokens[i]])
            most = handle.num_max_tokens_per_rank
            assert torch.equal(handle.recv_src_metadata[:num, 0], (sources * most + tokens).int())
            prefix = [(sources <= source).sum() for source in range(RANKS)]
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == prefix
            aligned = -(-counts // alignment) * alignment
            assert handle.num_recv_tokens_per_expert_list == (aligned.tolist() if do_cpu_sync else [])
            assert handle.psum_num_recv_tokens_per_expert.tolist() == aligned.cumsum(0).tolist()
            assert handle.num_sms > 0 and handle.num_experts == problem.num_experts

            again, again_ids, nothing, same, _ = buffer.dispatch(x, handle=handle)
            assert same is handle and nothing is None and torch.equal(again[:num], rows)
            assert torch.equal(again_ids, found_ids)
            times = problem.is_in_rank(rank).sum(dim=1, keepdim=True)
            for biases in ([], [x * 3], [x * 3, x / 7]):
                sums, returned, _ = buffer.combine(received, handle, topk_weights=found_weights, bias=tuple(biases))
                assert torch.equal(sums, reference_sum([x.float() * times], biases))
                assert torch.equal(returned, torch.where(ids >= 0, weights, 0))
        assert torch.equal(statistics, 2 * problem.tokens(rank).int())
        buffer.destroy()
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("several_sums", [True, False])
def test_rows_by_expert(several_sums: bool, alignment: int, do_cpu_sync: bool) -> None:
    problem = Problem(RANKS, [40, 23, 0], experts_per_rank=4)

    def program(comm: ep.Communicator) -> None:
        rank = comm.rank
        buffer = buffer_of(comm, num_max_tokens_per_rank=40, allow_multiple_reduction=several_sums)
        x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
        rows, local_ids, local_weights, _, _ = problem.received(rank)
        counts = problem.counts(rank)
        aligned = -(-counts // alignment) * alignment
        starts = (aligned.cumsum(0) - aligned).tolist()
        received, no_ids, found_weights, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=problem.num_experts,
            expert_alignment=alignment,
            do_cpu_sync=do_cpu_sync,
            do_expand=True,
            do_zero_padding=True,
        )
        most = -(-(RANKS * 40 * 3 + (alignment - 1) * 4) // alignment) * alignment
        num_rows = int(aligned.sum()) if do_cpu_sync else most
        assert no_ids is None and received.shape == (num_rows, 256) and found_weights.shape == (num_rows,)
        used = torch.zeros(num_rows, dtype=torch.bool)
        by_expert = torch.zeros_like(received)
        for expert, first in enumerate(starts):
            row, column = (local_ids == expert).nonzero(as_tuple=True)
            end = first + len(row)
            assert torch.equal(received[first:end], rows[row])
            assert torch.equal(found_weights[first:end], local_weights[row, column])
            places = handle.recv_src_metadata[row, 2 + column]
            assert torch.equal(places, torch.arange(first, end, dtype=torch.int32))
            used[first:end] = True
            by_expert[first:end] = rows[row] * expert_factor(rank * problem.local + expert)
        gaps = ~used
        gaps[int(aligned.sum()) :] = False  # what is behind all zones is undefined
        assert (received[gaps] == 0).all() and (found_weights[gaps] == 0).all()
        ends = [first + int(count) for first, count in zip(starts, counts, strict=True)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        assert torch.equal(handle.num_unaligned_recv_tokens_per_expert, counts.int())
        by_expert[~used] = torch.nan  # padding is not read
        factors = torch.where(ids >= 0, expert_factor(ids), 0)
        for biases in ([], [x * 3, x / 7]):
            sums, returned, _ = buffer.combine(by_expert, handle, topk_weights=found_weights, bias=biases)
            columns = torch.stack([x.float() * factors[:, k : k + 1] for k in range(3)])
            parts = list(columns)
            if several_sums:
                of_rank = [((ids >= 0) & (ids // problem.local == other)).t().unsqueeze(2) for other in range(RANKS)]
                parts = [torch.where(here, columns, 0).sum(0).bfloat16() for here in of_rank]
            assert torch.equal(sums, reference_sum(parts, biases))
            assert torch.equal(returned, torch.where(ids >= 0, weights, 0))
        again, _, again_weights, _, _ = buffer.dispatch(
            x, topk_weights=weights * 2, handle=handle, do_expand=True, do_zero_padding=True
        )
        zones = slice(int(aligned.sum()))
        assert torch.equal(again[zones], received[zones])
        assert torch.equal(again_weights[zones], found_weights[zones] * 2)
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("largest_batch", [elastic_groups.LARGEST_BATCH, 0])
def test_deterministic_sums_do_not_depend_on_the_ranks(largest_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_groups, "LARGEST_BATCH", largest_batch)
    num, num_experts, topk = 24, 12, 5
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 256, generator=generator).bfloat16()
    ids = torch.rand(num, num_experts, generator=generator).argsort(dim=1)[:, :topk].contiguous()
    ids[3, 2], ids[5], ids[7, 4] = -1, -1, ids[7, 1]
    weights, bias = torch.rand(num, topk, generator=generator), x.flip(0) / 7

    def sums_on(ranks: int, do_cpu_sync: bool, **settings: bool) -> torch.Tensor:
        parts: dict[int, torch.Tensor] = {}

        def program(comm: ep.Communicator) -> None:
            buffer = buffer_of(comm, num_max_tokens_per_rank=num, **settings)
            own = slice(comm.rank * num // ranks, (comm.rank + 1) * num // ranks)
            rows, _, scales, handle, _ = buffer.dispatch(
                x[own], ids[own], weights[own], num_experts=num_experts, do_expand=True, do_cpu_sync=do_cpu_sync
            )
            output = (rows * scales.unsqueeze(1)).bfloat16()
            parts[comm.rank], returned, _ = buffer.combine(output, handle, scales, bias=bias[own])
            assert torch.equal(returned > 0, ids[own] >= 0)
            buffer.destroy()

        ep.run_threads(ranks, program)
        return torch.cat([parts[rank] for rank in range(ranks)])

    alone = sums_on(1, True, deterministic=True)
    for ranks in (2, 3, 4):
        for do_cpu_sync in (True, False):
            assert torch.equal(sums_on(ranks, do_cpu_sync, deterministic=True), alone)
    assert torch.equal(sums_on(3, True, allow_multiple_reduction=False), alone)
    assert not torch.equal(sums_on(3, True), alone)  # rounds the sums of ranks


def test_an_invariant_environment_combines_expanded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_EP_INVARIANT", "1")
    problem = Problem(RANKS, [9, 5, 3])

    def program(comm: ep.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        sent = problem.x[rank], problem.ids[rank], problem.weights[rank]
        rows, _, _, handle, _ = buffer.dispatch(*sent, num_experts=problem.num_experts)
        with pytest.raises(AssertionError, match="NCCL_EP_INVARIANT is set in the environment; .*do_expand=True"):
            buffer.combine(rows, handle)
        rows, _, _, handle, _ = buffer.dispatch(*sent, num_experts=problem.num_experts, do_expand=True)
        times = (problem.ids[rank] >= 0).sum(dim=1, keepdim=True)
        assert torch.equal(buffer.combine(rows, handle)[0], (problem.x[rank] * times).bfloat16())
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("do_expand", [False, True])
def test_scales(do_expand: bool, column_major: bool) -> None:
    """Values and scales are moved bit by bit, whatever the strides of the scales are."""
    problem = Problem(RANKS, [11, 7, 30], hidden=512)

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm)
        rank, settings = comm.rank, {"do_expand": do_expand, "use_tma_aligned_col_major_sf": column_major}
        values, scales = per_token_cast_to_fp8(problem.x[rank])
        exponents = torch.arange(2 * len(values), dtype=torch.int32).view(2, -1).t()
        for sent in (scales, scales.t().contiguous().t(), exponents, scales[:, :1]):
            (rows, came), _, _, handle, _ = buffer.dispatch(
                (values, sent), problem.ids[rank], num_experts=problem.num_experts, **settings
            )
            assert came.dtype == sent.dtype and came.shape == (len(rows), sent.shape[1])
            aligned = -(-len(rows) // 4) * 4
            assert came.stride() == ((1, aligned) if column_major else (sent.shape[1], 1))
            if sent.shape[1] == 4 and not do_expand:
                expected = per_token_cast_back(*per_token_cast_to_fp8(problem.received(rank)[0]))
                assert torch.equal(per_token_cast_back(rows, came.contiguous()), expected)
            (again, came_again), *_ = buffer.dispatch((values, sent), handle=handle, **settings)
            assert torch.equal(again.view(torch.uint8), rows.view(torch.uint8)) and torch.equal(came_again, came)
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_sizes_that_differ_and_names() -> None:
    """M may differ between ranks where shapes are exact; hints grow; fields are there."""
    problem = Problem(RANKS, [1, 300, 17])

    def program(comm: ep.Communicator) -> None:
        hint = deep_ep.ElasticBuffer.get_buffer_size_hint
        assert 0 < hint(comm, 64, 256) < hint(comm, 1 << 14, 256) < hint(comm, 1 << 14, 7168, 40)
        assert hint(comm, 1, 1) % (2 << 20) == 0
        buffer = buffer_of(comm, num_max_tokens_per_rank=77, hidden=4096, num_topk=3)
        assert buffer.num_bytes >= hint(comm, num_max_tokens_per_rank=77, hidden=4096, num_topk=3)
        sms = buffer.get_theoretical_num_sms(num_experts=problem.num_experts, num_topk=3)
        assert sms >= 4 and sms % 2 == 0 and buffer.get_theoretical_num_qps(sms) > 0
        assert buffer.get_logical_domain_size() == (1, RANKS) and buffer.get_physical_domain_size() == (1, RANKS)
        x, rank = problem.x[comm.rank], comm.rank
        rows, _, _, handle, _ = buffer.dispatch(
            x,
            problem.ids[rank],
            num_experts=problem.num_experts,
            num_max_tokens_per_rank=len(x),
            num_sms=8,
            previous_event=buffer.capture(),
        )
        assert handle.num_max_tokens_per_rank == 300 and handle.num_sms == 8
        assert torch.equal(rows, problem.received(rank)[0])
        buffer.barrier(with_cpu_sync=True)
        handle.psum_num_recv_tokens_per_expert = None  # callers replace fields
        buffer.combine(rows, handle, previous_event=deep_ep.EventOverlap(), previous_event_before_epilogue=None)
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_overlapped_calls_keep_what_handles_hold() -> None:
    """Tensors that another stream reads, or that it made, are said to the one who keeps them."""
    problem = Problem(1, [40], experts_per_rank=4)

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, num_max_tokens_per_rank=40)
        kept: list[set[int]] = [set(), set()]

        def run(device: Any, work: Any, arguments: Any, *rest: Any) -> Any:
            result = work(*arguments)
            for addresses, value in zip(kept, (arguments, result), strict=True):
                addresses.clear()
                addresses.update(tensor.data_ptr() for tensor in tensors_in(value))
            return result, deep_ep.EventOverlap()

        buffer.runtime.stream.run = run
        overlapped = {"async_with_compute_stream": True}
        for do_expand in (False, True):
            fresh = {"num_experts": problem.num_experts, "do_expand": do_expand, **overlapped}
            rows, _, weights, handle, _ = buffer.dispatch(problem.x[0], problem.ids[0], problem.weights[0], **fresh)
            read = {handle._lease.topk_idx}
            made = {value for value in vars(handle).values() if isinstance(value, torch.Tensor)}
            assert len(made) == 5 and {tensor.data_ptr() for tensor in read | made} <= kept[1]
            buffer.combine(rows, handle, weights, **overlapped)
            assert {tensor.data_ptr() for tensor in read | {rows, weights}} <= kept[0]
            buffer.dispatch(problem.x[0], handle=handle, do_expand=do_expand, **overlapped)
            assert {tensor.data_ptr() for tensor in read} <= kept[0]
        buffer.destroy()

    ep.run_threads(1, program)


def test_wrong_use() -> None:
    problem = Problem(2, [6, 6])

    def program(comm: ep.Communicator) -> None:
        buffer, other = buffer_of(comm, num_max_tokens_per_rank=8), deep_ep.ElasticBuffer(comm)
        x, ids, num = problem.x[comm.rank], problem.ids[comm.rank], problem.num_experts
        rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=num)
        dispatch = buffer.dispatch

        def aligned(alignment: int, **form: bool) -> Any:
            return dispatch(x, ids, num_experts=num, expert_alignment=alignment, **form)

        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: dispatch(x), "topk_idx is None"),
            (lambda: dispatch(x, ids), "num_experts is None"),
            (lambda: dispatch(x, ids, num_experts=7), "num_experts is 7, allowed: positive multiples of the 2 ranks"),
            (lambda: dispatch(x, ids, num_experts=num, num_max_tokens_per_rank=5), "x has 6 rows, allowed: at most"),
            (lambda: aligned(0), r"expert_alignment is 0, allowed: 1\.\.2147483647"),
            (lambda: aligned(2**31), "expert_alignment is 2147483648, allowed"),
            (lambda: aligned(2**32 + 1), "expert_alignment is 4294967297, allowed"),
            (lambda: aligned(2**30, do_expand=True), "expert_alignment is 1073741824: 214.* rows by expert could come"),
            (lambda: aligned(2**30, do_expand=True, do_cpu_sync=False), "rows by expert could come, allowed: at most"),
            (lambda: dispatch(x, ids, num_experts=num, do_zero_padding=True), "do_zero_padding is True and do_expand"),
            (lambda: dispatch(x, ids[:4], num_experts=num), "x has 6 rows, expected those of topk_idx: 4"),
            (lambda: dispatch(x, ids, handle=handle), "topk_idx is not allowed with a handle"),
            (lambda: dispatch(x, handle=handle, do_cpu_sync=True), "do_cpu_sync is True, allowed with a handle: False"),
            (lambda: dispatch(x, handle=handle, do_expand=True), "do_expand is True, the handle's is False"),
            (lambda: dispatch(x, handle=handle, num_experts=2), "num_experts is 2, the handle's is 4"),
            (lambda: dispatch(x, handle=(1, 2)), "handle is of type tuple, expected an EPHandle"),
            (lambda: other.combine(rows, handle), "handle is of another buffer"),
            (lambda: buffer.combine(rows[1:], handle), "x is .* the rows that dispatch returned"),
            (lambda: buffer.combine(rows, handle, rows.float()), r"topk_weights is .*, expected \[\d+, 3\]"),
            (lambda: other.dispatch(x, ids, num_experts=num, do_cpu_sync=False), "allowed without CPU sync: 1"),
            (lambda: other.destroy(), "explicitly_destroy is False"),
            (lambda: deep_ep.ElasticBuffer(None), "group is None"),
        ]
        for call, message in cases:
            with pytest.raises(AssertionError, match=message):
                call()
        buffer.destroy()
        with pytest.raises(AssertionError, match="the buffer is destroyed"):
            buffer.combine(rows, handle)

    ep.run_threads(2, program)


@pytest.mark.parametrize("prefers_overlap", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_num_sms(expand: bool, prefers_overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a fresh dispatch: the argument, or the theoretical number, which is lower for overlap, or one for expanded
    # rows; of others: the argument, or the handle's.
    seen: list[int] = []
    for name, place in (("elastic_dispatch", 8), ("elastic_dispatch_again", 5), ("elastic_combine", 5)):

        def spy(*arguments: Any, call: Any = getattr(elastic_groups, name), place: int = place) -> Any:
            seen.append(arguments[place])
            return call(*arguments)

        monkeypatch.setattr(elastic_groups, name, spy)

    def program(comm: ep.Communicator) -> None:
        problem = Problem(1, [30], experts_per_rank=4)
        x, ids, weights = problem.x[0], problem.ids[0], problem.weights[0]
        # More tokens than a low-latency group has, whose operations take all SMs.
        buffer = buffer_of(comm, num_max_tokens_per_rank=600, prefer_overlap_with_compute=prefers_overlap)
        usual = buffer.get_theoretical_num_sms(num_experts=problem.num_experts, num_topk=3)
        assert usual == (24 if prefers_overlap else 32)
        usual = 64 if expand and not prefers_overlap else usual

        def expect(sms: int, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
            seen.clear()
            made = call(*given, **named)
            assert set(seen) == {sms}
            return made

        forms: tuple[dict[str, Any], ...] = ({}, {"async_with_compute_stream": True})
        first: Any = None
        for asked in (0, 2, 64, 132):
            fresh = {"num_experts": problem.num_experts, "do_expand": expand, "num_sms": asked}
            rows, _, own, handle, _ = expect(asked or usual, buffer.dispatch, x, ids, weights, **fresh)
            assert handle.num_sms == (asked or usual)
            first = first or (rows, buffer.combine(rows, handle, own))
            for other in (0, 6):
                for form in ({"num_sms": other, **form} for form in forms):
                    num_sms = other or handle.num_sms
                    again = expect(num_sms, buffer.dispatch, x, handle=handle, do_expand=expand, **form)
                    assert torch.equal(again[0], first[0]) and again[3].num_sms == (asked or usual)
                    expect(num_sms, buffer.dispatch, x, None, weights, handle=handle, do_expand=expand, **form)
                    expect(num_sms, buffer.combine, rows, handle, **form)
                    sums = expect(num_sms, buffer.combine, rows, handle, own, x, **form)
                    assert torch.equal(sums[1], first[1][1])
        with pytest.raises(AssertionError, match="num_sms is -1, allowed: 0 and more"):
            buffer.combine(rows, handle, num_sms=-1)
        buffer.destroy()

    ep.run_threads(1, program)
