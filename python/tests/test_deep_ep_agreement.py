# SPDX-License-Identifier: Apache-2.0
"""What DeepEP's classes do where results could differ in silence: from DeepEP's, or from rank to rank. CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
from crossdock.deep_ep import elastic_groups  # noqa: E402
from crossdock.deep_ep.elastic_dispatch import Elastic  # noqa: E402
from deep_ep_checks import Problem, arguments_of  # noqa: E402
from test_deep_ep import RANKS, buffer_of, quantised  # noqa: E402


def elastic_of(comm: ep.Communicator, **arguments: Any) -> Any:
    return deep_ep.ElasticBuffer(comm, explicitly_destroy=True, **arguments)


def test_scales_are_deep_eps_bit_by_bit() -> None:
    """amax * (1 / 448) in fp32, not amax / 448, and the values are x * (448 / amax)."""
    num_max, hidden = 16, 1024
    problem = Problem(RANKS, [16, 16, 16], hidden=hidden, dropped=0)
    differ = [(quantised(x, False)[1] != amax_of(x) / 448).float().mean() for x in problem.x]
    assert min(differ) > 0.4  # so a division would be seen

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        for rounded in (False, True):
            (values, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
                problem.x[comm.rank], problem.ids[comm.rank], num_max, problem.num_experts, round_scale=rounded
            )
            sources, ranges = handle[:2]
            expected = [quantised(x, rounded) for x in problem.x]
            for expert in range(problem.local):
                for source in range(RANKS):
                    num, first = int(ranges[expert, source]) & 0xFFFFFFFF, int(ranges[expert, source]) >> 32
                    tokens = sources[expert, first : first + num].long()
                    assert torch.equal(scales[expert, first : first + num], expected[source][1][tokens])
                    found = values[expert, first : first + num].view(torch.uint8)
                    assert torch.equal(found, expected[source][0].view(torch.uint8)[tokens])
        buffer.destroy()

    ep.run_threads(RANKS, program)


def amax_of(x: Any) -> Any:
    return x.float().view(len(x), -1, 128).abs().amax(dim=2).clamp_min(1e-4)


def test_low_latency_combine_goes_by_its_own_choices() -> None:
    """It may leave choices out, whose rows may hold anything, and have them in another order; then as dispatched."""
    problem = Problem(RANKS, [8, 5, 3], dropped=0, repeats=True)

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        x, ids, weights = problem.x[comm.rank], problem.ids[comm.rank], problem.weights[comm.rank]
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, problem.num_experts, use_fp8=False)
        experts = torch.arange(problem.local).view(-1, 1, 1) + comm.rank * problem.local
        rows = rows * (experts + 1)  # the experts

        def expected(own: Any, own_weights: Any) -> Any:
            factors = torch.where(own >= 0, own_weights * (own + 1), 0).sum(dim=1, keepdim=True)
            return x.float() * factors

        def check(own: Any, own_weights: Any, given: Any = None) -> None:
            sums, _, hook = buffer.low_latency_combine(
                rows if given is None else given, own, own_weights, handle, return_recv_hook=True
            )
            hook()
            torch.testing.assert_close(sums.float(), expected(own, own_weights), rtol=2e-2, atol=2e-2)

        check(ids.clone(), weights)
        order = torch.tensor([2, 0, 1])
        check(ids[:, order].contiguous(), weights[:, order].contiguous())
        fewer = ids.clone()
        fewer[:, 1] = -1
        check(fewer, weights)
        check(fewer.int(), weights)
        # Expert 0's rows are not for any token now.
        spoilt = rows.clone()
        if comm.rank == 0:
            spoilt[0] = torch.nan
        check(torch.where(ids == 0, -1, ids), weights, spoilt)
        check(ids, weights)
        # An expert of the dispatch more than once, an unmoved column among them.
        check(ids[:, [0, 0, 1]].contiguous(), weights)
        check(ids[:, [1, 1, 1]].contiguous(), weights)
        other = ids.clone()
        other[0, 2] = next(e for e in range(problem.num_experts) if e not in ids[0].tolist())
        with pytest.raises(AssertionError, match=rf"topk_idx has expert {int(other[0, 2])} for token 0, expected"):
            buffer.low_latency_combine(rows, other, weights, handle)
        buffer.destroy()

    ep.run_threads(RANKS, program)


@pytest.mark.parametrize("with_hooks", [False, True])
def test_low_latency_keeps_the_choices_that_were_dispatched(with_hooks: bool) -> None:
    """Callers may overwrite topk_idx after the dispatch; a combine goes by what its own topk_idx holds."""
    problem = Problem(RANKS, [8, 5, 3], dropped=2)

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        x, ids, weights = problem.x[comm.rank], problem.ids[comm.rank], problem.weights[comm.rank]

        def sums_of(overwritten_by: Any, ids_type: Any, own: Any, own_weights: Any) -> Any:
            mine = ids.to(ids_type, copy=True)
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                x, mine, 8, problem.num_experts, use_fp8=False, return_recv_hook=with_hooks
            )
            mine.copy_(overwritten_by)
            if with_hooks:
                hook()
            sums, _, hook = buffer.low_latency_combine(
                rows, mine if own is None else own, own_weights, handle, return_recv_hook=with_hooks
            )
            if with_hooks:
                hook()
            return sums

        expected = x.float() * torch.where(ids >= 0, weights, 0).sum(dim=1, keepdim=True)
        order = torch.tensor([2, 0, 1])
        overwritten = {"dropped": torch.full_like(ids, -1), "others": (ids + 1) % problem.num_experts}
        for by in overwritten.values():
            for kind in (torch.int64, torch.int32):
                found = sums_of(by, kind, ids.clone(), weights)
                torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
                found = sums_of(by, kind, ids[:, order].contiguous(), weights[:, order].contiguous())
                torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
        # The tensor of the dispatch, in which choices are left out meanwhile.
        fewer = ids.clone()
        fewer[:, 1] = -1
        found = sums_of(fewer, torch.int64, None, weights)
        expected = x.float() * torch.where(fewer >= 0, weights, 0).sum(dim=1, keepdim=True)
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_nothing_that_callers_hold_is_read_again() -> None:
    """Cached dispatches and combines go by the handle, whatever became of the arguments and results of its dispatch."""
    problem = Problem(RANKS, [9, 4, 7], dropped=0)

    def spoil(*tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(0 if tensor.dtype == torch.bool else 77)

    def program(comm: ep.Communicator) -> None:
        rank = comm.rank
        x, rows = problem.x[rank], problem.received(rank)[0]

        def fresh() -> list[Any]:
            return [part[rank].clone() for part in (problem.x, problem.ids, problem.weights)]

        def check_sums(sums: Any, num: Any) -> None:
            torch.testing.assert_close(sums.float(), x.float() * num, rtol=2e-2, atol=2e-2)

        buffer = buffer_of(comm)
        own, ids, weights = fresh()
        arguments = buffer.get_dispatch_layout(ids, problem.num_experts)
        *made, _, handle, _ = buffer.dispatch(own, topk_idx=ids, topk_weights=weights, **arguments_of(arguments))
        spoil(own, ids, weights, *arguments, *made)
        assert torch.equal(buffer.dispatch(x, handle=handle)[0], rows)
        check_sums(buffer.combine(rows, handle)[0], problem.is_in_rank(rank).sum(dim=1, keepdim=True))
        buffer.destroy()
        for do_expand in (False, True):
            elastic = elastic_of(comm, num_max_tokens_per_rank=16, hidden=256)
            own, ids, weights = fresh()
            *made, handle, _ = elastic.dispatch(
                own, topk_idx=ids, topk_weights=weights, num_experts=problem.num_experts, do_expand=do_expand
            )
            kept = made[0].clone()
            spoil(own, ids, weights, *made)
            for _ in range(2):
                *again, _, _ = elastic.dispatch(x, handle=handle, do_expand=do_expand)
                assert torch.equal(again[0], kept)
                assert do_expand or not (again[1] == 77).any()
                spoil(*again)
            targets = problem.is_in_rank(rank) if not do_expand else problem.ids[rank] >= 0
            check_sums(elastic.combine(kept, handle)[0], targets.sum(dim=1, keepdim=True))
            elastic.destroy()

    ep.run_threads(RANKS, program)


def test_a_handle_takes_rows_of_any_length() -> None:
    """Also longer ones than those of the dispatch that made it, with scales beside them and without."""
    problem = Problem(RANKS, [9, 4, 7], dropped=0)

    def program(comm: ep.Communicator) -> None:
        rank = comm.rank
        ids = problem.ids[rank]
        buffer, elastic = buffer_of(comm), elastic_of(comm, num_max_tokens_per_rank=16, hidden=256)
        arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))
        of_buffer = buffer.dispatch(problem.x[rank], **arguments)[4]
        of_elastic = elastic.dispatch(problem.x[rank], topk_idx=ids, num_experts=problem.num_experts)[3]
        _, _, _, sources, tokens = problem.received(rank)

        def received(parts: list[Any]) -> Any:
            return torch.cat([parts[source][tokens[sources == source]] for source in range(RANKS)])

        for columns, dtype in ((256, torch.float32), (1000, torch.float32), (4099, torch.int8), (901, torch.float16)):
            made = torch.Generator().manual_seed(columns)
            rows = [(100 * torch.randn(len(x), columns, generator=made)).to(dtype) for x in problem.x]
            assert torch.equal(buffer.dispatch(rows[rank], handle=of_buffer)[0], received(rows))
            assert torch.equal(elastic.dispatch(rows[rank], handle=of_elastic)[0], received(rows))
        wide = [x.repeat(1, 40) for x in problem.x]
        quantised_rows = [quantised(x, False) for x in wide]
        for dispatch, handle in ((buffer.dispatch, of_buffer), (elastic.dispatch, of_elastic)):
            values, scales = dispatch(quantised_rows[rank], handle=handle)[0]
            expected = received([q.view(torch.uint8) for q, _ in quantised_rows])
            assert torch.equal(values.view(torch.uint8), expected)
            assert torch.equal(scales, received([s for _, s in quantised_rows]))
        buffer.destroy()
        elastic.destroy()

    ep.run_threads(RANKS, program)


def test_a_fresh_dispatch_goes_by_is_token_in_rank() -> None:
    """Rows go where it says; counts and topk_idx that say something else are refused."""
    problem = Problem(RANKS, [9, 4, 7], dropped=0)

    def program(comm: ep.Communicator) -> None:
        buffer, rank = buffer_of(comm), comm.rank
        x, ids, weights = problem.x[rank], problem.ids[rank], problem.weights[rank]
        everywhere = torch.ones(len(x), RANKS, dtype=torch.bool)
        everywhere[0] = False
        arguments = arguments_of(buffer.get_dispatch_layout(ids, problem.num_experts))
        arguments |= {"is_token_in_rank": everywhere, "num_tokens_per_rank": everywhere.sum(dim=0).int()}
        rows, _, _, _, handle, _ = buffer.dispatch(x, **arguments)
        assert torch.equal(rows, torch.cat([of[1:] for of in problem.x]))
        with pytest.raises(AssertionError, match=r"is_token_in_rank\[0, .\] is False, and topk_idx\[0\] has an expert"):
            buffer.dispatch(x, **arguments, topk_idx=ids, topk_weights=weights)
        sums = buffer.combine(rows, handle)[0]
        assert torch.equal(sums, (x.float() * everywhere.sum(dim=1, keepdim=True)).bfloat16())
        arguments["num_tokens_per_rank"] = arguments["num_tokens_per_rank"] - 1
        with pytest.raises(AssertionError, match=r"num_tokens_per_rank is \[.*\], is_token_in_rank has"):
            buffer.dispatch(x, **arguments)
        buffer.destroy()

    ep.run_threads(RANKS, program)


def test_more_rows_of_an_expert_than_there_is_room_for() -> None:
    """Repeated ids that recv_x has no room for are an error, not rows that are missing."""

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        x, ids = torch.ones(3, 128, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
        with pytest.raises(AssertionError, match=r"topk_idx has an expert 6 times, .* at most .* \(4\)"):
            buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
        _, counts, _, _, _ = buffer.low_latency_dispatch(x[:2], ids[:2], 4, 2, use_fp8=False)
        assert counts.tolist() == ([8] if comm.rank == 0 else [0])
        buffer.destroy()

    ep.run_threads(2, program)


def test_more_experts_than_go_with_the_header() -> None:
    """Their counts are exchanged in two parts; and calls with fewer follow."""

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm)
        for experts in (6144, RANKS):
            ids = torch.tensor([[0], [experts - 1], [experts - 1]])
            arguments = arguments_of(buffer.get_dispatch_layout(ids, experts))
            x = torch.ones(3, 64, dtype=torch.bfloat16)
            counts = buffer.dispatch(x, **arguments, topk_idx=ids, topk_weights=torch.ones(3, 1))[3]
            assert len(counts) == experts // RANKS and sum(counts[1:-1]) == 0
            first, last = (RANKS if comm.rank == 0 else 0), (2 * RANKS if comm.rank == RANKS - 1 else 0)
            assert (counts[0], counts[-1]) == ((first, last) if experts > RANKS else (first + last, first + last))
        buffer.destroy()

    ep.run_threads(RANKS, program)


Call = Any


def calls_that_differ() -> dict[str, tuple[Call, str]]:
    """A call for rank 0 and for rank 1, by what differs, and the error's words."""

    def low_latency(comm: ep.Communicator, **fields: Any) -> None:
        topk, hidden = fields.pop("topk", 2), fields.pop("hidden", 256)
        x, ids = torch.ones(2, hidden, dtype=torch.bfloat16), torch.arange(topk).repeat(2, 1)
        buffer = buffer_of(comm, low_latency_mode=True)
        buffer.low_latency_dispatch(torch.ones(2, 512, dtype=torch.bfloat16), ids, 2, 4, use_fp8=False)
        buffer.low_latency_dispatch(x, ids, 2, 4, **fields)

    def cached(
        comm: ep.Communicator, width: int = 256, scales: int = 0, rows: Any = torch.bfloat16, of: Any = torch.float32
    ) -> None:
        buffer, ids = buffer_of(comm), torch.arange(2).repeat(2, 1) * 2
        x = torch.ones(2, 256, dtype=torch.bfloat16)
        arguments = arguments_of(buffer.get_dispatch_layout(ids, 4))
        handle = buffer.dispatch(x, **arguments)[4]
        again = torch.ones(2, width).to(rows)
        buffer.dispatch((again, torch.ones(2, scales).to(of)) if scales else again, handle=handle)

    def seven_or_eight(comm: ep.Communicator, columns: int = 8, scales: int = 8) -> None:
        cached(comm, columns, scales)

    def normal(
        comm: ep.Communicator, x: Any = None, worst: int = 0, experts: int = 4, expert: int = 2, **fields: Any
    ) -> Any:
        buffer, ids = buffer_of(comm, **fields), torch.arange(expert, expert + 2).repeat(3, 1) % experts
        x = torch.ones(3, 256, dtype=torch.bfloat16) if x is None else x
        arguments = arguments_of(buffer.get_dispatch_layout(ids, experts))
        routing = {"topk_idx": ids, "topk_weights": torch.ones(3, 2)}
        return buffer, buffer.dispatch(x, **arguments, **routing, num_worst_tokens=worst)

    def too_few(comm: ep.Communicator, worst: int = 16) -> None:
        normal(comm, worst=worst)

    def combine(comm: ep.Communicator, width: int = 256, rows: Any = torch.bfloat16, weights: bool = False) -> None:
        buffer, (received, _, own, _, handle, _) = normal(comm, expert=1)
        buffer.combine(received[:, :width].to(rows).contiguous(), handle, own if weights else None)

    def elastic_cached(comm: ep.Communicator, scales: int = 0, weights: bool = False) -> None:
        buffer, ids = elastic_of(comm), torch.arange(2).repeat(2, 1) * 2
        x: Any = torch.ones(2, 256, dtype=torch.bfloat16)
        handle = buffer.dispatch(x, topk_idx=ids, num_experts=4)[3]
        x = (x, torch.ones(2, scales)) if scales else x
        buffer.dispatch(x, handle=handle, topk_weights=torch.ones(2, 2) if weights else None)

    def elastic_combine(comm: ep.Communicator, weights: bool = False, bias: bool = False, **fields: Any) -> None:
        buffer, ids = elastic_of(comm, **fields), torch.arange(2).repeat(2, 1) * 2
        x = torch.ones(2, 256, dtype=torch.bfloat16)
        rows, _, own, handle, _ = buffer.dispatch(x, ids, torch.ones(2, 2), num_experts=4)
        buffer.combine(rows, handle, own if weights else None, x if bias else None)

    def of_class(comm: ep.Communicator, kind: Any = buffer_of) -> None:
        kind(comm)

    def elastic(
        comm: ep.Communicator, topk: int = 2, experts: int = 4, scales: int = 0, most: int = 4, **fields: Any
    ) -> None:
        buffer, ids = elastic_of(comm), torch.arange(topk).repeat(2, 1)
        x: Any = torch.ones(2, 256, dtype=torch.bfloat16)
        x = (x, torch.ones(2, scales)) if scales else x
        weights = torch.ones(2, topk) if fields.get("weights") else None
        sync = fields.get("sync", False)
        buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=experts, num_max_tokens_per_rank=most, do_cpu_sync=sync
        )

    def expanded(comm: ep.Communicator, alignment: int = 1) -> None:
        x, ids = torch.ones(2, 256, dtype=torch.bfloat16), torch.arange(2).repeat(2, 1)
        settings = {"num_experts": 4, "num_max_tokens_per_rank": 4, "do_cpu_sync": False, "do_expand": True}
        elastic_of(comm).dispatch(x, topk_idx=ids, expert_alignment=alignment, **settings)

    def case(call: Any, words: str, **fields: Any) -> tuple[Call, str]:
        return lambda comm: call(comm, **(fields if comm.rank == 1 else {})), words

    return {
        "use_fp8": case(low_latency, "quantization recipe is . on rank ., . on rank .", use_fp8=False),
        "round_scale": case(low_latency, "quantization recipe is .*2 with rounded scales", round_scale=True),
        "LL hidden": case(low_latency, "bytes of a row is .* on rank ., .* on rank .", hidden=512),
        "LL top-k": case(low_latency, "top_k is . on rank ., . on rank .", topk=3),
        "cached rows": case(cached, "bytes of a row is (512|256) on rank ., (512|256) on rank .", width=128),
        "cached scales": case(cached, "is .* on rank ., .* on rank .", scales=4),
        "cached columns": case(seven_or_eight, "bytes of a row of x modulo 16 is .* on rank ., .* on", columns=7),
        "cached columns of scales": case(seven_or_eight, "the scales of a row is . on rank ., . on rank .", scales=7),
        "cached type": case(cached, "datatype of the tokens is .*float16 on rank ., .*float16 on", rows=torch.float16),
        "cached bytes": case(cached, "the datatype of the tokens is", rows=torch.uint8, width=512),
        "cached int32": case(cached, "type of x is .*torch.int32 on rank", rows=torch.int32, width=128),
        "cached type of scales": case(
            lambda comm, of=torch.float32: cached(comm, scales=4, of=of), "type of the scales of x is", of=torch.int32
        ),
        "scales or weights": case(
            lambda comm, weights=False: elastic_cached(comm, 0 if weights else 2, weights),
            "topk_weights is (None|given) on rank ., (None|given) on rank .",
            weights=True,
        ),
        "type of x": case(normal, "type of x: .* rank 1 has torch.float16", x=torch.ones(3, 256, dtype=torch.float16)),
        "bytes as x": case(normal, "type of x: .* rank 1 has torch.uint8", x=torch.ones(3, 512, dtype=torch.uint8)),
        "type of scales": case(
            lambda comm, of=torch.float32: normal(comm, (torch.ones(3, 8, dtype=torch.uint8), torch.ones(3, 2).to(of))),
            "type of the scales: .* rank 0 has torch.float32, rank 1 has torch.int32",
            of=torch.int32,
        ),
        "num_worst_tokens": case(normal, "kind of call: .* rank 1 has a dispatch with num_worst_tokens", worst=16),
        "too few": case(too_few, r"num_worst_tokens is 4 on rank 1, allowed: at least the 6 rows", worst=4),
        "experts far apart": case(normal, r"number of experts: the ranks' values are \[4, 2048\]", experts=2048),
        "combined columns": case(
            lambda comm, width=8: combine(comm, width), "bytes of a row of x modulo 16 is (0|14) on rank .", width=7
        ),
        "combined weights": case(combine, "topk_weights is (None|given) on rank ., (None|given)", weights=True),
        "elastic weights": case(elastic_combine, "topk_weights is (None|given) on rank ., (None|given)", weights=True),
        "reduction": case(
            elastic_combine,
            "allow_multiple_reduction: .* rank 0 has True, rank 1 has False",
            allow_multiple_reduction=False,
        ),
        "deterministic": case(
            elastic_combine, "deterministic: .* rank 0 has False, rank 1 has True", deterministic=True
        ),
        "low_latency_mode": case(normal, "low_latency_mode: .* rank 0 has False, rank 1 has", low_latency_mode=True),
        "enable_shrink": case(normal, "enable_shrink: .* rank 0 has False, rank 1 has True", enable_shrink=True),
        "class": case(of_class, "class: .* rank 0 has Buffer, rank 1 has ElasticBuffer", kind=elastic_of),
        "top-k": case(elastic, r"top-k: the ranks' values are \[2, 3\].*rank 0 has 2, rank 1 has 3", topk=3),
        "experts": case(elastic, r"number of experts: the ranks' values are \[4, 8\]", experts=8),
        "scales": case(elastic, r"columns of scales: the ranks' values are \[0, 2\]", scales=2),
        "weights": case(elastic, r"routing weights: the ranks' values are \[0, 1\]", weights=True),
        "M": case(elastic, r"num_max_tokens_per_rank: the ranks' values are \[4, 8\]", most=8),
        "alignment": case(expanded, "expert_alignment: .* rank 0 has 1, rank 1 has 8", alignment=8),
        "CPU sync": case(elastic, "kind of call: .* rank 0 has a dispatch without CPU sync, rank 1 has", sync=True),
    }


@pytest.mark.parametrize("largest_batch", [elastic_groups.LARGEST_BATCH, 0])
@pytest.mark.parametrize("what", calls_that_differ())
def test_every_rank_is_told_what_differs(what: str, largest_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the quantity, the ranks and both values."""
    monkeypatch.setattr(elastic_groups, "LARGEST_BATCH", largest_batch)
    call, words = calls_that_differ()[what]

    def program(comm: ep.Communicator) -> None:
        with pytest.raises(AssertionError, match=words) as raised:
            call(comm)
        assert isinstance(raised.value, ep.Error)

    ep.run_threads(2, program)


@pytest.mark.parametrize("most", [4, 600])
def test_forms_without_sync_are_compared_by_kernels(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where ranks exchange a form once: if two known forms meet in one call, all ranks fail."""
    compare = Elastic._compare
    monkeypatch.setattr(Elastic, "_compare", lambda self, form, is_cpu: compare(self, form, False))
    forms = [(2, 4), (3, 4)]

    def program(comm: ep.Communicator) -> None:
        buffer = elastic_of(comm, num_max_tokens_per_rank=most)

        def dispatch(topk: int, experts: int) -> Any:
            ids = torch.arange(topk).repeat(3, 1)
            x = torch.ones(3, 256, dtype=torch.bfloat16)
            return buffer.dispatch(x, topk_idx=ids, num_experts=experts, do_cpu_sync=False)

        for form in (*forms, *forms):
            dispatch(*form)
        with pytest.raises(AssertionError, match="top_k is . on rank ., . on rank .; all ranks must pass the same"):
            dispatch(*forms[comm.rank])

    ep.run_threads(2, program)


@pytest.mark.parametrize("strides", [(1, 1), (512, 2), (7, 3)])
def test_an_idle_rank_has_any_strides(strides: tuple[int, int]) -> None:
    """A rank without tokens, whose x counts as contiguous with any strides, takes part in all modes."""

    def program(comm: ep.Communicator) -> None:
        elastic, buffer = elastic_of(comm), buffer_of(comm)
        for width, dtype in ((256, torch.bfloat16), (9, torch.float32), (256, torch.uint8), (1, torch.int16)):
            num = 2 * comm.rank
            x = torch.ones(num, width).to(dtype)
            if num == 0:
                x = x.as_strided((0, width), strides)
            ids = torch.zeros(num, 1, dtype=torch.int64)
            rows, _, _, handle, _ = elastic.dispatch(x, topk_idx=ids, num_experts=2)
            assert rows.shape == (2 if comm.rank == 0 else 0, width)
            again = elastic.dispatch(x, handle=handle)[0]
            assert torch.equal(again, rows)
            arguments = arguments_of(buffer.get_dispatch_layout(ids, 2))
            assert torch.equal(buffer.dispatch(x, **arguments)[0], rows)
        elastic.destroy()
        buffer.destroy()

    ep.run_threads(2, program)
