# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch whose elements are not those in their memory: with the negative or conjugate bit, or without memory.
The operators resolve them, all other calls refuse them by name, as inputs and as outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

from crossdock._core import Forms  # noqa: E402

import crossdock as ep  # noqa: E402
import crossdock.a2sgd as a2sgd  # noqa: E402
import crossdock.torch as ept  # noqa: E402
from crossdock import deep_ep  # noqa: E402

EXPERTS, TOPK, TOKENS, MOST, HIDDEN = 2, 1, 3, 4, 128
NEGATIVE = "has its negative bit set: pass its resolve_neg"


def negated(tensor: Any) -> Any:
    """The same elements, with the negative of each in memory."""
    return torch._neg_view(torch.neg(tensor))


def without_memory(tensor: Any) -> Any:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


def test_negative_views_come_from_ordinary_programs() -> None:
    imaginary = torch.ones(4, 1, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg() and imaginary.squeeze(1).is_neg()
    assert negated(torch.ones(2, 4)).is_contiguous() and negated(torch.ones(2, 4)).sum() == 8


def test_arrays() -> None:
    one = torch.ones(2, 4)
    with pytest.raises(ep.InvalidArgument, match=f"^buffer {NEGATIVE}"):
        ep.Tensor(negated(one))
    with pytest.raises(ep.InvalidArgument, match=f"^buffer {NEGATIVE}"):
        ep.Tensor(torch.nn.Parameter(negated(one)))
    for empty in (without_memory(one), torch._efficientzerotensor((2, 4))):
        with pytest.raises(ep.InvalidArgument, match="^buffer has no memory"):
            ep.Tensor(empty)
    for sparse in (one.to_sparse(), one.to_sparse_csr(), one.to_mkldnn()):
        with pytest.raises(ep.InvalidArgument, match=r"^buffer is not a dense tensor: pass its to_dense\(\)"):
            ep.Tensor(sparse)
    with pytest.raises(ep.InvalidArgument, match="^buffer is a nested tensor"):
        ep.Tensor(torch.nested.nested_tensor([one, one]))
    assert ep.Tensor(torch.zeros(0, 4)).sizes == (0, 4)
    forms = Forms()
    forms.keep(True, one)
    assert forms.find(one) and forms.find(negated(one)) is None and forms.find(without_memory(one)) is None


def test_calls_of_the_library() -> None:
    [comm] = ep.Communicator.create_threads(1)
    fields = {"num_experts": EXPERTS, "max_dispatch_tokens_per_rank": MOST, "max_token_bytes": 4 * HIDDEN}
    with comm, ep.Group(comm, **fields, enable_mask=True) as group:
        tokens, ids, weights = torch.ones(TOKENS, HIDDEN), torch.tensor([[0], [1], [0]]), torch.ones(TOKENS, TOPK)
        rows, counts, sums = torch.zeros(EXPERTS, MOST, HIDDEN), torch.zeros(EXPERTS).int(), torch.zeros(TOKENS, HIDDEN)
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, ids)

        def dispatch(tokens: Any = tokens, rows: Any = rows, counts: Any = counts) -> None:
            handle.dispatch(tokens, rows, layout_info=ep.LayoutInfo(expert_counters=counts))

        def combine(rows: Any = rows, sums: Any = sums, weights: Any = weights) -> None:
            handle.combine(rows, ep.CombineOutputs(tokens=sums, topk_weights=weights))

        status = torch.zeros(1, dtype=torch.int32)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("topk_idx", lambda: handle.update(negated(ids))),
            ("inputs.tokens", lambda: dispatch(tokens=negated(tokens))),
            ("outputs.tokens", lambda: dispatch(rows=negated(rows))),
            ("layout_info.expert_counters", lambda: dispatch(counts=negated(counts))),
            ("inputs.tokens", lambda: combine(rows=negated(rows))),
            ("outputs.tokens", lambda: combine(sums=negated(sums))),
            ("outputs.topk_weights", lambda: combine(weights=negated(weights))),
            ("out", lambda: group.mask_query(negated(status))),
            ("memory", lambda: comm.register_window(negated(tokens))),
            ("pieces\\[0\\]", lambda: ep.A2sgd(comm, [negated(tokens)])),
        ]
        for name, call in calls:
            with pytest.raises(ep.InvalidArgument, match=f"^{name} {NEGATIVE}"):
                call()
        dispatch()
        combine()
        assert torch.equal(sums, tokens)
        handle.close()
        with ept.SymmetricMemory(comm, 64) as memory, pytest.raises(ep.InvalidArgument, match=NEGATIVE):
            memory.of(torch._neg_view(memory.empty(4)))


def refuse_each(call: Callable[..., Any], **tensors: Any) -> None:
    """call(**tensors) with each tensor in turn negated, and without memory; before its forms are known, and after."""
    for _ in range(2):
        for name, tensor in tensors.items():
            for changed, fault in ((negated, NEGATIVE), (without_memory, "has no memory")):
                if tensor.dtype is torch.bool and changed is negated:
                    continue  # torch has no negative of them
                with pytest.raises(AssertionError, match=f"^{'x' if name == 'rows' else name} {fault}"):
                    call(**tensors | {name: changed(tensor)})
        call(**tensors)


@pytest.fixture
def comm() -> Any:
    [made] = ep.Communicator.create_threads(1)
    with made:
        yield made


def given() -> tuple[Any, Any, Any]:
    x = torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN).bfloat16()
    return x, torch.tensor([[0], [1], [0]]), torch.full((TOKENS, TOPK), 0.5)


def test_buffer_in_normal_mode(comm: ep.Communicator) -> None:
    x, ids, weights = given()
    buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
    refuse_each(lambda topk_idx: buffer.get_dispatch_layout(topk_idx, EXPERTS), topk_idx=ids)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    tensors: dict[str, Any] = {
        "x": x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
        "topk_weights": weights,
    }
    refuse_each(lambda **given: buffer.dispatch(**given), **tensors)
    rows, _, own_weights, _, handle, _ = buffer.dispatch(**tensors)
    refuse_each(lambda x: buffer.dispatch(x, handle=handle), x=x)
    for is_async in (False, True):
        refuse_each(lambda rows: buffer.combine(rows, handle, async_finish=is_async), rows=rows)
    refuse_each(lambda rows, bias: buffer.combine(rows, handle, bias=bias), rows=rows, bias=torch.ones_like(x))
    refuse_each(
        lambda rows, topk_weights: buffer.combine(rows, handle, topk_weights), rows=rows, topk_weights=own_weights
    )
    values, scales = torch.zeros(TOKENS, HIDDEN, dtype=torch.int8), torch.ones(TOKENS, 1)
    with pytest.raises(AssertionError, match=f"^the tensor of scales {NEGATIVE}"):
        buffer.dispatch(**tensors | {"x": (values, negated(scales))})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of halves of complex numbers
        complex_x = torch.ones(TOKENS, 4, dtype=torch.complex32)
    with pytest.raises(AssertionError, match="^x has its conjugate bit set: pass its resolve_conj"):
        buffer.dispatch(**tensors | {"x": complex_x.conj()})
    buffer.destroy()


def test_buffer_in_low_latency(comm: ep.Communicator) -> None:
    x, ids, weights = given()
    buffer = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
    forms: list[dict[str, Any]] = [{"use_fp8": False}, {}]
    for form in forms:
        for is_async in (False, True):
            refuse_each(
                lambda x, topk_idx: buffer.low_latency_dispatch(
                    x, topk_idx, MOST, EXPERTS, async_finish=is_async, **form
                ),
                x=x,
                topk_idx=ids,
            )
    statistics = torch.zeros(EXPERTS, dtype=torch.int32)
    refuse_each(
        lambda cumulative_local_expert_recv_stats: buffer.low_latency_dispatch(
            x, ids, MOST, EXPERTS, cumulative_local_expert_recv_stats
        ),
        cumulative_local_expert_recv_stats=statistics,
    )
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    refuse_each(
        lambda rows, topk_idx, topk_weights, out: buffer.low_latency_combine(
            rows, topk_idx, topk_weights, handle, out=out
        ),
        rows=rows,
        topk_idx=ids,
        topk_weights=weights,
        out=torch.empty_like(x),
    )
    buffer.destroy()


def test_elastic_buffer(comm: ep.Communicator) -> None:
    x, ids, weights = given()
    buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=MOST, explicitly_destroy=True)
    for expand in (False, True):
        tensors = {"x": x, "topk_idx": ids, "topk_weights": weights}
        refuse_each(lambda **given: buffer.dispatch(**given, num_experts=EXPERTS, do_expand=expand), **tensors)
        rows, _, own_weights, handle, _ = buffer.dispatch(x, ids, weights, num_experts=EXPERTS, do_expand=expand)
        refuse_each(lambda x: buffer.dispatch(x, handle=handle, do_expand=expand), x=x)
        refuse_each(lambda rows: buffer.combine(rows, handle), rows=rows)
        refuse_each(
            lambda rows, topk_weights: buffer.combine(rows, handle, topk_weights), rows=rows, topk_weights=own_weights
        )
        refuse_each(lambda rows, bias: buffer.combine(rows, handle, bias=bias), rows=rows, bias=torch.ones_like(x))
    buffer.destroy()


@pytest.mark.parametrize("algorithm", list(ep.Algorithm))
def test_operators_resolve_it(comm: ep.Communicator, algorithm: ep.Algorithm) -> None:
    x, ids, weights = given()
    x, shape = x.float(), {"num_experts": EXPERTS, "num_topk": TOPK, "max_tokens": MOST, "hidden": HIDDEN}
    with ept.Exchange(comm, algorithm=algorithm, **shape) as exchange:
        for start in (lambda *part: lambda: exchange.dispatch(*part), exchange.start_dispatch):
            expected, found = start(x, ids, weights)(), start(negated(x), negated(ids), negated(weights))()
            for one, other in zip(expected[:3], found[:3], strict=True):
                assert torch.equal(one, other)
            sums = exchange.combine(negated(found.rows), found)
            assert torch.equal(sums, exchange.combine(expected.rows, expected))
        leaf = x.clone().requires_grad_()
        received = exchange.dispatch(leaf, ids, weights)
        torch._neg_view(exchange.combine(received.rows, received)).sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(x, -1))


def test_averages_of_parameters(comm: ep.Communicator) -> None:
    parameter = negated(torch.ones(4))
    a2sgd.average_parameters([parameter], comm)
    assert torch.equal(parameter, torch.ones(4)) and a2sgd.drift([parameter], comm).distance == 0


def test_numpy_is_as_ever() -> None:
    assert ep.Tensor(np.ones(3, np.float32)).sizes == (3,)
