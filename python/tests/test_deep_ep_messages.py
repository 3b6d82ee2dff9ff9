# SPDX-License-Identifier: Apache-2.0
"""Every wrong argument of DeepEP's classes is an AssertionError that names it; and what their tests import is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
import crossdock.deep_ep as deep_ep  # noqa: E402
from crossdock.deep_ep import rows as carried  # noqa: E402
from crossdock.deep_ep.checks import once_per_form, require  # noqa: E402
from crossdock.deep_ep.low_latency import explained  # noqa: E402
from crossdock.deep_ep.ranks import Ranks  # noqa: E402
from crossdock.deep_ep.utils import math, testing  # noqa: E402
from deep_ep_checks import arguments_of  # noqa: E402
from test_deep_ep import buffer_of  # noqa: E402

E, M = 4, 4


def test_arguments_are_named() -> None:
    """Wrong devices, types and numbers, of all calls."""

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True, enable_shrink=True)
        elastic: Any = deep_ep.ElasticBuffer(comm, explicitly_destroy=True)
        buffers: Any = deep_ep.Buffer
        x, ids, weights = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        far = {"x": x.to("meta"), "ids": ids.to("meta"), "weights": weights.to("meta")}
        arguments = arguments_of(buffer.get_dispatch_layout(ids, E))
        rows, _, _, _, handle, _ = buffer.dispatch(x, **arguments)
        of_elastic = elastic.dispatch(x, topk_idx=ids, num_experts=E)[3]
        low_latency, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
        experts_rows, _, sent, _, _ = low_latency(x, ids, M, E, use_fp8=False)
        there = torch.zeros(1, dtype=torch.int32)
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: buffers.set_num_sms("a"), "num_sms is 'a', allowed: positive even numbers"),
            (lambda: buffers.get_dispatch_config("a"), "num_ranks is 'a', allowed"),
            (lambda: deep_ep.Config(num_sms="a"), "num_sms is 'a', allowed"),  # type: ignore[arg-type]
            (lambda: buffers(comm, "a"), "num_nvl_bytes is 'a', allowed"),
            (lambda: deep_ep.ElasticBuffer(comm, hidden=None), "hidden is None, allowed"),  # type: ignore[arg-type]
            (lambda: buffer.get_dispatch_layout(far["ids"], E), "topk_idx is on device meta, allowed: cpu, cuda"),
            (lambda: buffer.get_dispatch_layout(ids, "a"), "num_experts is 'a', allowed: whole numbers, 1 and more"),
            (lambda: buffer.dispatch(far["x"], **arguments), "x is on device meta, allowed: cpu, cuda"),
            (
                lambda: buffer.dispatch(x, **arguments, topk_idx=ids, topk_weights=far["weights"]),
                "topk_weights is on device meta, expected cpu",
            ),
            (
                lambda: buffer.dispatch(x, **arguments | {"num_tokens_per_rank": there.to("meta")}),
                "num_tokens_per_rank is on device meta, expected cpu",
            ),
            (
                lambda: buffer.dispatch(x, **arguments | {"num_tokens_per_rank": [2]}),
                "num_tokens_per_rank is of type list, expected a torch.Tensor",
            ),
            (
                lambda: buffer.dispatch(x, **arguments | {"num_tokens_per_expert": torch.ones(E)}),
                "num_tokens_per_expert is .*float32, expected .* of torch.int32",
            ),
            (lambda: buffer.combine(rows, handle, bias=7), "bias is of type int, allowed: None, a tensor, or two"),
            (lambda: elastic.combine(x, of_elastic, bias=7), "bias is of type int, allowed: None, a tensor, or two"),
            (
                lambda: elastic.combine(x, of_elastic, topk_weights=[1.0]),
                "topk_weights is of type list, expected a torch.Tensor",
            ),
            (lambda: buffer.combine(rows.to("meta"), handle), "x is on device meta, expected cpu"),
            (lambda: buffer.combine(rows, handle, bias=far["x"]), "bias is on device meta, expected cpu"),
            (
                lambda: buffer.combine(rows, handle, topk_weights=far["weights"]),
                "topk_weights is on device meta, expected cpu",
            ),
            (
                lambda: buffer.combine(rows, handle, topk_weights=torch.zeros(len(rows), 0)),
                "topk_weights has no columns, expected at least one",
            ),
            (lambda: low_latency(far["x"], far["ids"], M, E), "x is on device meta, allowed: cpu, cuda"),
            (lambda: low_latency(x, far["ids"], M, E), "topk_idx is on device meta, expected cpu"),
            (
                lambda: low_latency(x, ids, "a", E),
                "num_max_dispatch_tokens_per_rank is 'a', allowed: whole numbers, 1 and more",
            ),
            (lambda: low_latency(x, ids, M, None), "num_experts is None, allowed: whole numbers, 1 and more"),
            (lambda: combine(experts_rows, ids, far["weights"], sent), "topk_weights is on device meta, expected cpu"),
            (lambda: combine(experts_rows, [[0]], weights, sent), "topk_idx is of type list, expected a torch.Tensor"),
            (lambda: combine(experts_rows, ids, weights, sent, out=far["x"]), "out is on device meta, expected cpu"),
            (lambda: buffer.low_latency_update_mask_buffer("a"), "rank_to_mask is 'a', allowed: 0..0"),
            (lambda: buffer.low_latency_query_mask_buffer([0]), "mask_status is of type list, expected"),
            (lambda: elastic.dispatch(x, far["ids"], num_experts=E), "topk_idx is on device meta, expected cpu"),
            (lambda: elastic.dispatch(x, topk_idx=ids, num_experts="a"), "num_experts is 'a', allowed"),
            (
                lambda: elastic.dispatch(x, topk_idx=ids, num_experts=E, expert_alignment="a"),
                "expert_alignment is 'a', allowed",
            ),
            (
                lambda: elastic.dispatch(torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8), ids, num_experts=E),
                "x is .* of torch.qint8, a quantised type",
            ),
            (lambda: elastic.combine(x.to("meta"), of_elastic), "x is on device meta, expected cpu"),
            # What nobody looked at where calls are asynchronous, and numbers that the library below could not hold.
            (lambda: low_latency(None, ids, M, E, async_finish=True), "x is of type NoneType, expected"),
            (lambda: combine(None, ids, weights, sent, async_finish=True), "x is of type NoneType, expected"),
            (lambda: buffer.combine(None, handle, async_finish=True), "x is of type NoneType, expected"),
            (lambda: buffer.dispatch(None, handle=handle, async_finish=True), "x is of type NoneType, expected"),
            (lambda: buffer.dispatch(far["x"], handle=handle, async_finish=True), "x is on device meta, allowed"),
            (lambda: buffer.combine(rows.to("meta"), handle, async_finish=True), "x is on device meta, expected cpu"),
            (
                lambda: elastic.combine(None, of_elastic, async_with_compute_stream=True),
                "x is of type NoneType, expected",
            ),
            (lambda: buffer.combine(rows, handle, previous_event="a"), "previous_event is of type str, expected"),
            (lambda: buffer.dispatch(x, **arguments, previous_event=1), "previous_event is of type int, expected"),
            (
                lambda: elastic.dispatch(x, ids, num_experts=E, previous_event_before_epilogue=1),
                "previous_event_before_epilogue is of type int, expected",
            ),
            (lambda: low_latency(x, ids, 10**12, E), "num_max_dispatch_tokens_per_rank is 10{12}, allowed: at most"),
            (lambda: low_latency(x, ids, 10**7, E), "max_dispatch_tokens_per_rank is 10000000, allowed"),
            (lambda: low_latency(x, ids, M, 10**9), "num_experts is 1000000000, allowed: at most 32768"),
            (lambda: elastic.dispatch(x, ids, num_experts=2**70), "num_experts is .*, allowed: at most 32768"),
            (
                lambda: elastic.dispatch(x, ids, num_experts=E, num_max_tokens_per_rank="a"),
                "num_max_tokens_per_rank is 'a', allowed",
            ),
            (lambda: elastic.dispatch(x, ids, num_experts=E, num_sms=-1), "num_sms is -1, allowed"),
            (lambda: elastic.get_theoretical_num_qps("a"), "num_sms is 'a', allowed"),
            (lambda: elastic.get_buffer_size_hint(comm, M, 128, "a"), "num_topk is 'a', allowed"),
            (lambda: buffer.get_local_buffer_tensor("int8"), "dtype is of type str, expected a torch.dtype"),
            (lambda: buffer.get_local_buffer_tensor(torch.int8, offset=-1), "offset is -1, allowed: 0 and more"),
            (lambda: buffer.get_local_buffer_tensor(torch.int8, 5), "size is of type int, expected a torch.Size"),
            (lambda: buffer.get_local_buffer_tensor(torch.int8, (-1,)), "size is .-1., allowed: 0 and more each"),
        ]
        for call, words in cases:
            with pytest.raises(AssertionError, match=words) as raised:
                call()
            assert isinstance(raised.value, ep.Error)
        assert deep_ep.get_physical_domain_size(comm) == (1, 1)
        buffer.destroy()
        elastic.destroy()

    ep.run_threads(1, program)


def test_checks_are_done_once_per_form() -> None:
    """And each time where arguments have no form, or were found wrong."""
    seen: list[Any] = []

    @once_per_form
    def check(tensor: Any, number: Any) -> None:
        seen.append(number)
        require(number != 3, "number is 3")

    for tensor in (torch.zeros(2), torch.ones(2), torch.zeros(3)):
        check(tensor, 1)
    assert seen == [1, 1]
    for number in (3, 3, "no form", "no form"):
        with contextlib.suppress(AssertionError):
            check(torch.zeros(2), number)
    assert seen == [1, 1, 3, 3, "no form", "no form"]


def test_flags_of_any_type() -> None:
    """As in DeepEP, whatever has a truth value."""

    def program(comm: ep.Communicator) -> None:
        elastic: Any = deep_ep.ElasticBuffer(comm, explicitly_destroy=True)
        x, ids = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2)
        for flag, rows in ((0, 2), (None, 2), (1, 4), (torch.tensor(True), 4)):
            received, _, _, handle, _ = elastic.dispatch(x, ids, num_experts=E, do_expand=flag, do_zero_padding=flag)
            assert len(received) == rows and type(handle.do_expand) is bool
            assert len(elastic.dispatch(x, handle=handle, do_expand=flag)[0]) == rows
        elastic.destroy()

    ep.run_threads(1, program)


def test_a_hook_that_was_not_called() -> None:
    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        x, ids, weights = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        for _ in range(2):
            rows, _, handle, _, hook = buffer.low_latency_dispatch(x, ids, M, E, use_fp8=False, return_recv_hook=True)
            with pytest.raises(AssertionError, match="its earlier call has not received yet: call the hook"):
                buffer.low_latency_combine(rows, ids, weights, handle)
            hook()
            sums, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
            with pytest.raises(AssertionError, match="its earlier call has not received yet: call the hook"):
                buffer.low_latency_combine(rows, ids, weights, handle)
            hook()
            assert torch.equal(sums, 2 * x)
        buffer.destroy()

    ep.run_threads(1, program)


def test_tensors_of_another_gpu() -> None:
    """All tensors of a buffer are on the GPU that it was made for."""

    def program(comm: ep.Communicator) -> None:
        ranks = Ranks(comm)
        ranks.resources.of_gpus, ranks.resources.gpu = comm, torch.device("cuda", 0)
        assert ranks.communicator(torch.device("cuda", 0)) is comm
        with pytest.raises(AssertionError, match="on device cuda:1, the buffer's GPU is cuda:0: call torch"):
            ranks.communicator(torch.device("cuda", 1))
        ranks.resources.of_gpus = None

    ep.run_threads(1, program)


def test_ranks_that_wait_are_told_of_shapes() -> None:
    """Operations of other shapes are of another group, in which a rank waits alone."""
    error = explained(ep.RemoteError("the group has failed: rank 0 waited for rank 1 in LL dispatch (operation 2)"))
    assert isinstance(error, ep.RemoteError)
    assert "different num_max_dispatch_tokens_per_rank or num_experts" in str(error)
    assert str(explained(ep.RemoteError("in LL combine"))) == "in LL combine"
    overflow = ep.InvalidUsage("the group has failed: 9 rows came to rank 1, whose max_recv_tokens_per_rank is 8")
    assert str(carried.explained(overflow, "num_worst_tokens")).endswith("is 8; here that is num_worst_tokens")
    assert str(carried.explained(overflow, "")).endswith("is 8")
    sms = "the number of SMs (crossdockHandleSetSms) is 20 on rank 0, 24 on rank 1; all ranks must pass the same"
    assert str(carried.explained(ep.InvalidUsage(sms), "")).startswith("num_sms is 20 on rank 0, 24 on rank 1;")


def test_arguments_of_other_builds() -> None:
    """Those that SGLang and vLLM pass to some builds of DeepEP: without effect, or refused with the way out."""

    def program(comm: ep.Communicator) -> None:
        buffer = buffer_of(comm, low_latency_mode=True)
        x, ids, weights = torch.ones(2, 128, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        scale, signal = torch.ones(1), torch.ones(64, dtype=torch.int32)
        dispatch = buffer.low_latency_dispatch
        rows, counts, handle, _, _ = dispatch(x, ids, M, E, use_fp8=False, use_nvfp4=False, x_global_scale=scale)
        with pytest.raises(AssertionError, match="use_nvfp4 is True, .*--deepep-dispatcher-output-dtype bf16"):
            dispatch(x, ids, M, E, use_fp8=False, use_nvfp4=True, x_global_scale=scale)
        of_hopper = {"packed_recv_count": counts, "comp_signal": signal, "block_m": 64, "threshold": 1, "num_sms": 3}
        for arguments in (of_hopper, {"src_signals": signal, "src_signal_expect_value": 1}):
            for overlap in (False, True):
                sums = buffer.low_latency_combine(rows, ids, weights, handle, overlap=overlap, **arguments)[0]
                assert (sums == 2).all()
        buffer.destroy()

    ep.run_threads(1, program)


def test_helpers_of_tests() -> None:
    assert math.safe_div(6, 3) == 2 and math.safe_div(1, 0) == 0
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert math.count_bytes(x, None, (x, [torch.zeros(2)])) == 24 + 24 + 8
    scores = torch.arange(1.0, 13.0).view(2, 6)
    grouped = math.create_grouped_scores(scores, torch.tensor([[0, 2], [1, 1]]), 3)
    assert grouped.tolist() == [[1, 2, 0, 0, 5, 6], [0, 0, 9, 10, 0, 0]]
    calls: list[int] = []
    times = testing.bench(lambda: calls.append(1), num_warmups=1, num_tests=2, post_fn=lambda: calls.append(2))
    mean, least, most = times
    assert calls == [1, 1, 2, 1, 2] and least <= mean <= most
    assert testing.bench_kineto(lambda: x.add_(1), "dispatch", num_tests=2) > 0
    testing.bench_kineto(lambda: None, "x", num_tests=1, barrier_comm_profiling=True, barrier=lambda: calls.append(3))
    assert calls[5:] == [3, 3]
    both = testing.bench_kineto(lambda: x.add_(1), ("dispatch", "combine"), num_tests=2, num_kernels_per_period=2)
    assert [len(times) for times in both] == [2, 2]
