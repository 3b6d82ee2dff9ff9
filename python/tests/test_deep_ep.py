# SPDX-License-Identifier: Apache-2.0
"""crossdock.deep_ep.Buffer: what DeepEP's own tests demand of it, in small, on CPU tensors; ranks are threads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

from crossdock._core import count_routing  # noqa: E402

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
from crossdock.deep_ep import elastic_groups  # noqa: E402
from crossdock.deep_ep.normal import targets_of  # noqa: E402
from crossdock.deep_ep.streams import tensors_in  # noqa: E402
from crossdock.deep_ep.utils.math import (  # noqa: E402
    calc_diff,
    per_token_cast_to_fp8,
)
from deep_ep_checks import Problem, arguments_of  # noqa: E402

RANKS = 3


def buffer_of(comm: ep.Communicator, **arguments: Any) -> Any:
    return deep_ep.Buffer(comm, 1 << 20, 0, explicitly_destroy=True, **arguments)


def forms_of(x: Any) -> dict[str, Any]:
    if x.shape[1] % 128 != 0:
        return {"bf16": x, "constant": torch.ones_like(x) * x[:, -4:-3]}
    values, scales = per_token_cast_to_fp8(x)
    column_major = scales.t().contiguous().t()
    packed = torch.arange(2 * len(x), dtype=torch.int32).view(len(x), 2)
    return {
        "bf16": x,
        "constant": torch.ones_like(x) * x[:, -4:-3],
        "fp8": (values, column_major),
        "one scale": (values, scales[:, :1].contiguous()),
        "int32 scales": (values, packed),
        "fp32": x.float(),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and all(map(equal, a, b))
    return bool(a.dtype == b.dtype) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def rows_of(form: Any, chosen: Any) -> Any:
    if isinstance(form, tuple):
        return tuple(rows_of(part, chosen) for part in form)
    return form.view(torch.uint8)[chosen].view(form.dtype) if form.element_size() == 1 else form[chosen].contiguous()


def expected_of(problem: Problem, name: str, rank: int) -> Any:
    _, _, _, sources, tokens = problem.received(rank)
    parts = [rows_of(forms_of(problem.x[source])[name], tokens[sources == source]) for source in range(RANKS)]
    if not isinstance(parts[0], tuple):
        parts = [(part,) for part in parts]
    joined = [torch.cat([p.view(torch.uint8) for p in of]).view(of[0].dtype) for of in zip(*parts, strict=True)]
    return tuple(joined) if len(joined) > 1 else joined[0]


@pytest.mark.parametrize("repeats", [False, True])
def test_layout(repeats: bool) -> None:
    problem = Problem(RANKS, [40, 0, 7], repeats=repeats)

    def program(comm: ep.Communicator) -> None:
        buffer, ids = buffer_of(comm), problem.ids[comm.rank]
        per_rank, per_node, per_expert, is_in_rank, event = buffer.get_dispatch_layout(ids, problem.num_experts)
        expected = problem.is_in_rank(comm.rank)
        assert per_node is None and event.event is None
        assert torch.equal(is_in_rank, expected)
        assert torch.equal(per_rank, expected.sum(dim=0).int())
        assert per_expert.tolist() == [int((ids == expert).sum()) for expert in range(problem.num_experts)]
        event = buffer.get_dispatch_layout(topk_idx=ids, num_experts=problem.num_experts, async_finish=True)[-1]
        assert event.event is not None
        event.current_stream_wait()
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_layout_counts_what_is_there(num_nodes: int) -> None:
    """Numbers are of both types, repeated, and of any stride."""
    random = torch.Generator().manual_seed(1)
    for tokens, topk, num_experts in ((0, 3, 8), (1, 1, 4), (33, 8, 12)):
        for dtype in (torch.int64, torch.int32):
            ids = torch.randint(-2, num_experts, (topk, tokens), generator=random).to(dtype).t()
            per_rank, per_node, per_expert, is_in_rank = count_routing(ids, num_experts, 4, num_nodes)
            is_chosen = ids.unsqueeze(2) == torch.arange(num_experts)
            by_rank = is_chosen.view(tokens, topk, 4, num_experts // 4).any(dim=(1, 3))
            assert torch.equal(per_expert, is_chosen.sum(dim=(0, 1)).int()) and torch.equal(is_in_rank, by_rank)
            assert torch.equal(per_rank, by_rank.sum(dim=0).int())
            assert (per_node is None) == (num_nodes == 1)
            if per_node is not None:
                by_node = by_rank.view(tokens, num_nodes, 4 // num_nodes).any(dim=2)
                assert torch.equal(per_node, by_node.sum(dim=0).int())


@pytest.mark.parametrize("largest_batch", [elastic_groups.LARGEST_BATCH, 0])
@pytest.mark.parametrize("hidden", [256, 100, 9])
@pytest.mark.parametrize("tokens", [[40, 33, 35], [0, 200, 1], [0, 0, 0]])
def test_normal_mode(hidden: int, tokens: list[int], largest_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh, cached and worst-case calls of every form of x; rows, weights, ids, lists and sums are exact."""
    monkeypatch.setattr(elastic_groups, "LARGEST_BATCH", largest_batch)
    problem = Problem(RANKS, tokens, hidden=hidden, repeats=True)

    def program(comm: ep.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
        arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))
        _, local_ids, local_weights, sources, source_tokens = problem.received(rank)
        num = len(local_ids)
        for name, form in forms_of(x).items():
            expected = expected_of(problem, name, rank)
            routing = {"topk_idx": ids, "topk_weights": weights}
            received, found_ids, found_weights, counts, handle, event = buffer.dispatch(
                form, **arguments, **routing, expert_alignment=4, async_finish=True
            )
            event.current_stream_wait()
            assert isinstance(received, tuple) == isinstance(form, tuple)
            assert equal(received, expected)
            assert torch.equal(found_ids, local_ids) and torch.equal(found_weights, local_weights)
            assert counts == (-(-problem.counts(rank) // 4) * 4).tolist()
            assert len(handle) == 6 and isinstance(handle, tuple)
            prefix, _, _, numbers, mask, _ = handle
            own = torch.tensor([(sources <= source).sum() for source in range(RANKS)])
            assert torch.equal(prefix[:, rank], own.int()) and prefix.shape == (RANKS, RANKS)
            assert torch.equal(numbers, source_tokens.int()) and torch.equal(mask, arguments["is_token_in_rank"])

            again, *nothing, event = buffer.dispatch(form, handle=handle)
            assert equal(again, expected) and nothing == [None] * 4 and event.event is None

            without_weights, *nothing, counts, _, _ = buffer.dispatch(form, **arguments)
            assert equal(without_weights, expected) and nothing == [None, None]
            assert counts == problem.counts(rank).tolist()

            worst = sum(tokens) + 5
            padded, found_ids, found_weights, counts, worst_handle, _ = buffer.dispatch(
                form, **arguments, **routing, num_worst_tokens=worst
            )
            padded_rows = padded[0] if isinstance(padded, tuple) else padded
            assert padded_rows.shape[0] == worst and counts == [] and torch.equal(found_ids[:num], local_ids)
            assert (found_ids[num:] == -1).all()
            assert equal(rows_of(padded, torch.arange(num)), expected)

            if isinstance(form, tuple) or form.dtype != torch.bfloat16:
                continue
            times = arguments["is_token_in_rank"].sum(dim=1, keepdim=True)
            for rows, way, own_weights in ((received, handle, local_weights), (padded, worst_handle, found_weights)):
                sums, returned, event = buffer.combine(rows, way, topk_weights=own_weights)
                assert torch.equal(sums, (form.float() * times).bfloat16()) and event.event is None
                torch.testing.assert_close(returned, torch.where(ids >= 0, weights, 0), rtol=0, atol=1e-9)
                sums, returned, _ = buffer.combine(rows.clone(), way)
                assert returned is None and torch.equal(sums, (form.float() * times).bfloat16())
                # Any number of columns, and what columns of other ranks hold counts, too.
                ones = torch.ones(len(rows), 5)
                assert torch.equal(buffer.combine(rows, way, ones)[1], times.expand(-1, 5).float())
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_tensors_of_handles_are_found() -> None:
    """Those that an asynchronous call keeps; a handle's prefix sums are not computed for it."""
    problem = Problem(1, [9], experts_per_rank=4)

    def program(comm: ep.Communicator) -> None:
        buffer, x, ids, weights = buffer_of(comm), problem.x[0], problem.ids[0], problem.weights[0]
        arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))
        made = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **arguments)
        handle = made[4]
        found = list(tensors_in((made, (x, None), buffer.runtime.normal.lease_of(handle))))
        expected = [*made[:3], handle[3], handle[4], x, buffer.runtime.normal.lease_of(handle).topk_idx]
        assert {tensor.data_ptr() for tensor in found} == {tensor.data_ptr() for tensor in expected}
        assert handle._prefix is None and handle[0] is handle[-6] and handle[:1][0].tolist() == [[len(made[0])]]
        assert handle._prefix is handle[0] and copy.copy(handle) is handle
        buffer.destroy()

    ep.run_threads(1, program)


@pytest.mark.parametrize("num_ranks", [1, 63, 64, 65, 200])
def test_ranks_of_tokens_without_topk_idx(num_ranks: int) -> None:
    """All of them, or 64, which is as many as a token's routing has."""
    random = torch.Generator().manual_seed(num_ranks)
    is_in_rank = torch.rand(20, num_ranks, generator=random) < torch.linspace(0, 1, 20)[:, None]
    for mask, ranks in zip(is_in_rank, targets_of(is_in_rank).tolist(), strict=True):
        chosen = [rank for rank in ranks if rank >= 0]
        assert len(ranks) == min(num_ranks, 64) and sorted(chosen) == mask.nonzero()[:, 0].tolist()[:64]


def test_biases_and_types_of_combine() -> None:
    problem = Problem(RANKS, [20, 9, 30])

    def program(comm: ep.Communicator) -> None:
        buffer, x = buffer_of(comm), problem.x[comm.rank]
        arguments = arguments_of(buffer.get_dispatch_layout(problem.ids[comm.rank], problem.num_experts))
        received, _, _, _, handle, _ = buffer.dispatch(x, **arguments)
        times = arguments["is_token_in_rank"].sum(dim=1, keepdim=True)
        biases = torch.randn(2, *x.shape, generator=torch.Generator().manual_seed(comm.rank)).bfloat16().unbind()
        for bias, added in [(biases[0], biases[0].float()), (biases, biases[0].float() + biases[1].float())]:
            sums = buffer.combine(received, handle, bias=bias)[0]
            torch.testing.assert_close(sums, (added + x.float() * times).bfloat16(), rtol=2**-8, atol=1e-6)
            assert torch.equal(sums, buffer.combine(received, handle, bias=list(biases[: 2 - (bias is biases[0])]))[0])
            of_one_rank = buffer.combine(received, handle, bias=bias if comm.rank == 0 else None)[0]
            assert torch.equal(of_one_rank, sums if comm.rank == 0 else (x.float() * times).bfloat16())
        # Other lengths and types of rows, longer ones than were dispatched, too.
        for rows, factor in ((received.half()[:, :40].contiguous(), 1), (received.float().repeat(1, 9), 9)):
            sums = buffer.combine(rows, handle)[0]
            source = x.to(rows.dtype).repeat(1, factor)[:, : rows.shape[1]]
            torch.testing.assert_close(sums, (source.float() * times).to(rows.dtype))
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_handles_of_many_layers() -> None:
    """Handles stay usable in any order while others come and buffers grow, after their tensors are gone."""
    problems = [Problem(RANKS, [5 * 2**i, 3, 4 * 2**i], seed=i, experts_per_rank=1 + i % 2) for i in range(6)]

    def program(comm: ep.Communicator) -> None:
        buffer, handles = buffer_of(comm), []
        for problem in problems:
            arguments = arguments_of(buffer.get_dispatch_layout(problem.ids[comm.rank], problem.num_experts))
            handles.append(buffer.dispatch(problem.x[comm.rank], **arguments)[4])
        for i in (3, 0, 5, 1, 1, 4, 2, 0):
            x, handle = problems[i].x[comm.rank] * 2, tuple(handles[i]) if i == 4 else handles[i]
            rows = buffer.dispatch(x, handle=handle)[0]
            assert torch.equal(rows, problems[i].received(comm.rank)[0] * 2)
            times = problems[i].is_in_rank(comm.rank).sum(dim=1, keepdim=True)
            assert torch.equal(buffer.combine(rows, handle)[0], (x.float() * times).bfloat16())
        del handles, handle
        buffer.destroy()

    ep.run_threads(RANKS, program)


def quantised(x: Any, round_scale: bool) -> tuple[Any, Any]:
    """By the contract: amax of 128 elements, at least 1e-4; the values and scales of a row."""
    blocks = x.float().view(*x.shape[:-1], x.shape[-1] // 128, 128)
    amax = blocks.abs().amax(dim=-1).clamp_min(1e-4)
    scale = amax * (1 / 448)
    if round_scale:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
        factor = 1 / scale
    else:
        factor = torch.full_like(amax, 448) / amax  # 448 / amax is a product with the reciprocal in torch
    values = (blocks * factor.unsqueeze(-1)).to(torch.float8_e4m3fn).view(x.shape)
    return values, scale


@pytest.mark.parametrize("form", ["bf16", "fp8", "rounded", "ue8m0"])
def test_low_latency(form: str) -> None:
    """Counts, sources and rows are exact; sums are those of one fp32 sum; with hooks and without, in both orders."""
    num_max, hidden = 24, 512
    problem = Problem(RANKS, [24, 0, 17], hidden=hidden, repeats=True)
    fp8 = {"use_fp8": form != "bf16", "round_scale": form in ("rounded", "ue8m0"), "use_ue8m0": form == "ue8m0"}

    def check_rows(comm: ep.Communicator, received: Any, counts: Any, handle: Any) -> Any:
        sources, ranges, *sizes = handle
        assert sizes == [num_max, hidden, problem.num_experts]
        assert len(handle) == 5 and sources.dtype == torch.int32 and ranges.dtype == torch.int64
        values = received[0] if isinstance(received, tuple) else received
        assert values.shape == (problem.local, RANKS * num_max, hidden) and values.is_contiguous()
        rows = values.float()
        if isinstance(received, tuple):
            scales = received[1]
            blocks = hidden // 512 if form == "ue8m0" else hidden // 128
            assert scales.shape == (problem.local, RANKS * num_max, blocks)
            assert scales.stride() == (RANKS * num_max * blocks, 1, RANKS * num_max)
            if form == "ue8m0":
                exponents = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).int()
                scales = torch.exp2((exponents - 127).float())
            rows = (rows.view(*rows.shape[:2], -1, 128) * scales.unsqueeze(-1)).flatten(2)
        for expert in range(problem.local):
            assert counts[expert] == problem.counts(comm.rank)[expert]
            at = 0
            for source in range(RANKS):
                num, first = int(ranges[expert, source]) & 0xFFFFFFFF, int(ranges[expert, source]) >> 32
                ids = problem.ids[source]
                tokens = (ids == comm.rank * problem.local + expert).nonzero()[:, 0]
                assert (num, first) == (len(tokens), at)
                at += num
                found = sources[expert, first : first + num].long()
                assert torch.equal(found.sort().values, tokens)
                expected = problem.x[source][found]
                if form == "bf16":
                    assert torch.equal(values[expert, first : first + num], expected)
                else:
                    q, s = quantised(expected, fp8["round_scale"])
                    # A quotient and a product with the reciprocal round alike, but for some ties.
                    same = values[expert, first : first + num].float() == q.float()
                    assert num == 0 or same.float().mean() > 0.99
                    expected = (q.float().view(num, hidden // 128, 128) * s.unsqueeze(-1)).view(num, hidden)
                    torch.testing.assert_close(rows[expert, first : first + num], expected, rtol=2**-3, atol=1e-4)
        return rows.bfloat16()

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        x, ids, weights = problem.x[comm.rank], problem.ids[comm.rank], problem.weights[comm.rank]
        statistics, waited = torch.zeros(problem.local, dtype=torch.int32), torch.zeros(RANKS, dtype=torch.int64)
        for use_hook in (False, True):
            received, counts, handle, event, hook = buffer.low_latency_dispatch(
                x,
                ids,
                num_max,
                problem.num_experts,
                cumulative_local_expert_recv_stats=statistics,
                dispatch_wait_recv_cost_stats=waited,
                async_finish=not use_hook,
                return_recv_hook=use_hook,
                **fp8,
            )
            assert (hook is not None) == use_hook and (event.event is not None) == (not use_hook)
            if hook is not None:
                hook()
            rows = check_rows(comm, received, counts, handle)
            bound = 1e-5 if form == "bf16" else 9e-4
            expected = x.float() * torch.where(ids >= 0, weights, 0).sum(dim=1, keepdim=True)
            for zero_copy in (False, True):
                out = torch.full_like(x, torch.nan) if zero_copy else None
                given = rows
                if zero_copy:
                    given = buffer.get_next_low_latency_combine_buffer(handle)
                    given.copy_(rows)
                sums, event, hook = buffer.low_latency_combine(
                    given, ids, weights, handle, zero_copy=zero_copy, return_recv_hook=use_hook, out=out
                )
                if hook is not None:
                    hook()
                assert out is None or sums is out
                assert not sums.isnan().any() and (calc_diff(sums, expected) < bound or len(x) == 0)
        assert torch.equal(statistics, 2 * problem.counts(comm.rank).int())
        assert (waited.sum() > 0) and waited[comm.rank] == 0
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_hooks_that_are_never_called() -> None:
    """A call that was given up ends with its last reference, whatever unused handles there are and what was refused."""
    problem = Problem(RANKS, [8, 5, 3])
    wait_for_hooks = (
        "return_recv_hook is True while 2 earlier calls wait for their hooks, allowed: at most 2: call one of these "
        "hooks, or drop the hook and the handle of a call that was given up"
    )

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        x, ids, weights = problem.x[comm.rank], problem.ids[comm.rank], problem.weights[comm.rank]
        expected = x.float() * torch.where(ids >= 0, weights, 0).sum(dim=1, keepdim=True)

        def dispatch(with_hook: bool, **further: Any) -> Any:
            return buffer.low_latency_dispatch(
                x, ids, 8, problem.num_experts, use_fp8=False, return_recv_hook=with_hook, **further
            )

        def combine(sent: Any, with_hook: bool, **further: Any) -> Any:
            rows, handle = sent[0], sent[2]
            return buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=with_hook, **further)

        def check(with_hook: bool) -> None:
            sent = dispatch(with_hook)
            if with_hook:
                sent[4]()
            sums, _, hook = combine(sent, with_hook)
            if with_hook:
                hook()
            assert calc_diff(sums, expected) < 1e-5

        alive = [dispatch(False) for _ in range(3)]
        del alive
        waiting = {"dispatch_wait_recv_cost_stats": torch.zeros(RANKS, dtype=torch.int64)}
        for further in ({}, waiting):  # the general path, too
            for _ in range(3):
                dispatch(True, **further)
            check(True)
            given_up = [dispatch(True, **further) for _ in range(2)]
            for _ in range(3):
                with pytest.raises(AssertionError, match=wait_for_hooks):
                    dispatch(True)
            check(False)
            del given_up
            check(True)
        waiting = {"combine_wait_recv_cost_stats": torch.zeros(RANKS, dtype=torch.int64)}
        for further in ({}, waiting):
            sent = [dispatch(False) for _ in range(3)]
            given_up = [combine(each, True, **further) for each in sent[:2]]
            for _ in range(3):
                with pytest.raises(AssertionError, match=wait_for_hooks):
                    combine(sent[2], True)
            given_up.clear()
            with pytest.raises(AssertionError, match="call the hook that it returned first"):
                combine(sent[0], True)
            del sent[:2]
            assert calc_diff(combine(sent[0], False)[0], expected) < 1e-5
            check(True)
        dispatch(True)
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_two_batches_with_pending_hooks() -> None:
    """Dispatch A, dispatch B, hook A, hook B, and so their combines, beside the normal mode on the same buffer."""
    problems = [Problem(RANKS, [8, 5, 3], seed=seed) for seed in range(2)]

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        for _ in range(3):
            started = []
            for problem in problems:
                x, ids = problem.x[comm.rank], problem.ids[comm.rank]
                rows, _, handle, _, hook = buffer.low_latency_dispatch(
                    x, ids, 8, problem.num_experts, use_fp8=False, return_recv_hook=True
                )
                started.append((rows, handle, hook))
            for _, _, hook in started:
                hook()
            finished = []
            for problem, (rows, handle, _) in zip(problems, started, strict=True):
                ids, weights = problem.ids[comm.rank], problem.weights[comm.rank]
                finished.append(buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True))
            for problem, (sums, _, hook) in zip(problems, finished, strict=True):
                hook()
                ids, weights = problem.ids[comm.rank], problem.weights[comm.rank]
                expected = problem.x[comm.rank].float() * torch.where(ids >= 0, weights, 0).sum(dim=1, keepdim=True)
                assert calc_diff(sums, expected) < 1e-5
            arguments = arguments_of(buffer.get_dispatch_layout(problems[0].ids[comm.rank], problems[0].num_experts))
            rows = buffer.dispatch(problems[0].x[comm.rank], **arguments)[0]
            assert torch.equal(rows, problems[0].received(comm.rank)[0])
            buffer.clean_low_latency_buffer(8, 256, problems[0].num_experts)
            buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_masks() -> None:
    """A masked rank sends and gets nothing, and its experts add nothing; cleaned, all is as before."""
    problem = Problem(RANKS, [6, 6, 6], dropped=0)

    def program(comm: ep.Communicator) -> None:
        buffer, rank = buffer_of(comm, low_latency_mode=True, enable_shrink=True), comm.rank
        x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
        status = torch.full((RANKS,), 7, dtype=torch.int32)

        def layer() -> tuple[Any, Any]:
            rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 6, problem.num_experts, use_fp8=False)
            return buffer.low_latency_combine(rows, ids, weights, handle)[0], handle[1]

        for masked in (False, True, False):
            if masked:
                for other in range(RANKS):
                    if (other == 2) != (rank == 2):
                        buffer.low_latency_update_mask_buffer(other, True)
            buffer.low_latency_query_mask_buffer(status)
            lost = ([0, 1] if rank == 2 else [2]) if masked else []
            assert status.tolist() == [int(other in lost) for other in range(RANKS)]
            sums, ranges = layer()
            there = torch.tensor([other not in lost for other in range(RANKS)])
            kept = torch.where(there[ids // problem.local], weights, 0)
            assert calc_diff(sums, x.float() * kept.sum(dim=1, keepdim=True)) < 1e-5
            assert all(int((ranges[:, other] & 0xFFFFFFFF).sum()) == 0 for other in lost)
            if masked:
                buffer.low_latency_clean_mask_buffer()
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_names_and_hints() -> None:
    parameters = list(inspect.signature(deep_ep.Buffer.dispatch).parameters)
    assert (
        parameters
        == (
            "self x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert "
            "topk_idx topk_weights expert_alignment num_worst_tokens config previous_event "
            "async_finish allocate_on_comm_stream"
        ).split()
    )
    assert not hasattr(deep_ep, "HybridEPBuffer") and deep_ep.topk_idx_t == torch.int64
    before = deep_ep.Buffer.num_sms
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24
    deep_ep.Buffer.set_num_sms(before)
    with pytest.raises(AssertionError, match="num_sms is 21, allowed: positive even numbers"):
        deep_ep.Buffer.set_num_sms(21)
    for num_ranks in (1, 3, 8, 200):
        for config in (deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)):
            assert config.get_nvl_buffer_size_hint(14336, num_ranks) > 0
            assert (config.get_rdma_buffer_size_hint(14336, num_ranks) > 0) == (num_ranks > 8)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert 0 < hint(128, 2048, 8, 64) < hint(128, 7168, 8, 64) < hint(129, 7168, 8, 288) and hint(1, 7, 1, 1) % 128 == 0
    deep_ep.Config(num_sms=6, num_max_nvl_chunked_send_tokens=1000)
    with pytest.raises(ValueError, match="num_sms is 0, allowed: 1 and more"):
        deep_ep.Config(0)


def test_num_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every operation takes as many as its config says, or set_num_sms, whatever the dispatch before it took.
    seen: list[int] = []
    for name, place in (("elastic_dispatch", 8), ("elastic_dispatch_again", 5), ("elastic_combine", 5)):

        def spy(*arguments: Any, call: Any = getattr(elastic_groups, name), place: int = place) -> Any:
            seen.append(arguments[place])
            return call(*arguments)

        monkeypatch.setattr(elastic_groups, name, spy)
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", 20)

    def program(comm: ep.Communicator) -> None:
        problem, buffer = Problem(1, [30], experts_per_rank=4), buffer_of(comm)
        x, ids, weights = problem.x[0], problem.ids[0], problem.weights[0]
        arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))

        def expect(sms: int, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
            seen.clear()
            made = call(*given, **named)
            assert set(seen) == {sms}
            return made

        routing = {"topk_idx": ids, "topk_weights": weights, **arguments}
        rows, _, own, _, handle, _ = expect(20, buffer.dispatch, x, **routing)
        sums, back, _ = expect(20, buffer.combine, rows, handle, own, x)
        for num_sms in (2, 64, 1 << 40):
            config = deep_ep.Config(num_sms)
            given = min(num_sms, 1 << 16)
            assert equal(expect(given, buffer.dispatch, x, config=config, **routing)[0], rows)
            deep_ep.Buffer.set_num_sms(num_sms)
            for form in ({"config": config}, {}, {"async_finish": True}, {"previous_event": buffer.capture()}):
                assert equal(expect(given, buffer.dispatch, x, handle, **form)[0], rows)
                assert equal(expect(given, buffer.dispatch, (x, x[:, :2].float()), handle, **form)[0][0], rows)
                expect(given, buffer.combine, rows, handle, **form)
                again = expect(given, buffer.combine, rows, handle, own, x, **form)
                assert equal(again[0], sums) and equal(again[1], back)
            deep_ep.Buffer.set_num_sms(48)
        for call in (
            lambda: buffer.dispatch(x, handle, config=20),
            lambda: buffer.combine(x, handle, config=20),
        ):
            with pytest.raises(AssertionError, match="config is of type int, expected a Config or None"):
                call()
        buffer.destroy()

    ep.run_threads(1, program)


def test_num_sms_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not on CPUs, where ranks may also differ, and not if it changes at any time.
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", 20)
    problem = Problem(RANKS, [40, 23, 0])

    def program(comm: ep.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
        arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))
        first: Any = None
        for step in range(6):
            deep_ep.Buffer.set_num_sms(2 + 2 * rank + 20 * step)
            rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **arguments)
            deep_ep.Buffer.set_num_sms(4)
            rows, *_ = buffer.dispatch(x, handle)
            sums, _, _ = buffer.combine(rows, handle, config=deep_ep.Config(1 + step))
            first = sums if first is None else first
            assert torch.equal(rows, problem.received(rank)[0]) and torch.equal(sums, first)
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_events() -> None:
    event = deep_ep.EventOverlap()
    with pytest.raises(AssertionError, match="the call that returned it was not asynchronous"):
        event.current_stream_wait()
    calls = []
    event = deep_ep.EventOverlap(deep_ep.EventHandle(), (torch.zeros(1),))
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(AssertionError, match="one is allowed"):
        event.register_hook_after_wait(lambda: None)
    with event:
        assert calls == []
    event.current_stream_wait()
    assert calls == [1] and event.event is not None
    with event(release_handle=True) as same:
        assert same is event
    assert event.event is None


def test_wrong_use() -> None:
    problem = Problem(2, [6, 6])

    def program(comm: ep.Communicator) -> None:
        buffer, other = buffer_of(comm, low_latency_mode=True), deep_ep.Buffer(comm)
        x, ids, weights = problem.x[comm.rank], problem.ids[comm.rank], problem.weights[comm.rank]
        arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))
        handle = buffer.dispatch(x, **arguments)[4]
        sent = buffer.low_latency_dispatch(x, ids, 6, problem.num_experts, use_fp8=False)[2]
        rows = torch.zeros(problem.local, 12, 256, dtype=torch.bfloat16)
        routing = {"topk_idx": ids, "topk_weights": weights}
        dispatch, low_latency, combine = buffer.dispatch, buffer.low_latency_dispatch, buffer.low_latency_combine
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: buffer.get_dispatch_layout(ids, 5), "num_experts is 5, allowed: positive multiples"),
            (lambda: buffer.get_dispatch_layout(ids + 9, 4), "topk_idx has the value 12, allowed: below num_experts"),
            (lambda: buffer.get_dispatch_layout(ids.float(), 4), "torch.float32, expected .* torch.int64"),
            (lambda: dispatch(x), "num_tokens_per_rank is None, expected what get_dispatch_layout returned"),
            (lambda: dispatch(x.t(), **arguments), r"x is \[256, 6\] .* expected a contiguous"),
            (lambda: dispatch((x, x), **arguments), "the scales of x are .* of 4-byte elements"),
            (lambda: dispatch(x, **arguments, topk_idx=ids), "one of topk_idx and topk_weights is None"),
            (
                lambda: dispatch(x, **arguments, **routing | {"topk_weights": weights.half()}),
                "topk_weights is .*float16",
            ),
            (lambda: dispatch(x, handle=handle, **routing), "not allowed with a handle"),
            (lambda: dispatch(x[:3], handle=handle), "x has 3 rows, expected those of the dispatch .*: 6"),
            (lambda: dispatch(x, handle=(1, 2)), "handle is of type tuple, expected one that a fresh"),
            (lambda: dispatch(x, **arguments, num_worst_tokens=9), "topk_idx is None, expected with num_worst_tokens"),
            (lambda: other.combine(x, handle), "handle is of another buffer"),
            (lambda: buffer.combine(x[:, :0], handle), "x is .* the rows that dispatch returned"),
            (lambda: buffer.combine(x, handle, bias=[x] * 3), "bias is of type Tensor, Tensor, Tensor, allowed"),
            (lambda: low_latency(x, ids, 5, 4), "x has 6 rows, allowed: at most num_max_dispatch_tokens_per_rank .5."),
            (lambda: low_latency(x.float(), ids, 6, 4), "expected a contiguous .* of torch.bfloat16"),
            (lambda: low_latency(x, ids, 6, 4, use_ue8m0=True), "x has 256 columns, allowed here: multiples of 512"),
            (
                lambda: low_latency(x, ids, 6, 4, async_finish=True, return_recv_hook=True),
                "async_finish and return_recv_hook are both True",
            ),
            (lambda: combine(x, ids, weights, sent), r"x is \[6, 256\] .*, expected a contiguous \[2, 12, 256\]"),
            (lambda: combine(rows, ids, weights, handle), "handle is of type DispatchHandle, expected one"),
            (lambda: combine(rows, ids, weights, sent, zero_copy=True), "get_next_low_latency_combine_buffer was not"),
            (lambda: combine(rows, ids, weights, sent, out=x.float()), "out is .* expected a contiguous"),
            (lambda: combine(rows, ids[:2], weights, sent), r"topk_idx is \[2, 3\] .*, expected \[6, 3\]"),
            (lambda: other.low_latency_dispatch(x, ids, 6, 4), "low_latency_mode is False"),
            (lambda: buffer.low_latency_update_mask_buffer(0, True), "enable_shrink is False"),
            (lambda: other.destroy(), "explicitly_destroy is False"),
            (lambda: deep_ep.Buffer(None), "group and comm are None"),
            (lambda: deep_ep.Buffer(comm, -1), "num_nvl_bytes is -1, allowed: 0 and more"),
        ]
        for call, message in cases:
            with pytest.raises(AssertionError, match=message) as raised:
                call()
            assert isinstance(raised.value, ep.Error)
        # What only all ranks together can see is told to all of them.
        with pytest.raises(AssertionError, match=r"bytes of a token's row: the ranks' values are \[\d+, \d+\]"):
            dispatch(x[:, : 32 * (1 + comm.rank)].contiguous(), **arguments)
        assert torch.equal(dispatch(x, handle=handle)[0], problem.received(comm.rank)[0])
        buffer.destroy()
        for call in (lambda: dispatch(x, handle=handle), buffer.destroy, lambda: low_latency(x, ids, 6, 4)):
            with pytest.raises(AssertionError, match="the buffer is destroyed"):
                call()

    ep.run_threads(2, program)


def test_a_call_with_another_number_of_experts_on_each_rank() -> None:
    def program(comm: ep.Communicator) -> None:
        problem = Problem(2, [6, 6], experts_per_rank=1 + 600 * comm.rank, topk=2, dropped=0)
        buffer = buffer_of(comm)
        arguments = arguments_of(buffer.get_dispatch_layout(problem.ids[comm.rank], problem.num_experts))
        with pytest.raises(ep.Error, match="number of experts|bytes"):
            buffer.dispatch(problem.x[comm.rank], **arguments)
        buffer.destroy()

    ep.run_threads(2, program)
