# SPDX-License-Identifier: Apache-2.0
"""What the binding knows for crossdock.deep_ep: forms of arguments, routing counts, packed routing, rows as bytes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import crossdock as ep  # noqa: E402
from crossdock._core import (  # noqa: E402
    Forms,
    RowRoute,
    column_sums,
    count_routing,
    dispatch_rows,
    host_bytes,
    largest_id,
    route_and_dispatch,
    unpack_routing,
)
from crossdock.deep_ep.packed_routing import PackedRouting  # noqa: E402


class Tagged(torch.Tensor):  # type: ignore[name-defined]
    pass


def test_a_form_is_all_but_the_elements() -> None:
    forms, x = Forms(), torch.zeros(3, 5)
    forms.keep("known", x, None, 4, True)
    assert forms.find(torch.ones(3, 5), None, 4, 1) == "known"
    for other in (
        (x.int(), None, 4, True),
        (x.t().contiguous(), None, 4, True),
        (torch.zeros(5, 3).t(), None, 4, True),  # not dense
        (x[:, :4], None, 4, True),
        (x, x, 4, True),
        (x, None, 5, True),
        (x, None, 4),
        (x, None, 4.0, True),
        (x.numpy(), None, 4, True),
        (x.to("meta"), None, 4, True),
    ):
        assert forms.find(*other) is None
    forms.clear()
    assert forms.find(x, None, 4, True) is None


def test_forms_of_other_tensors_and_of_none_that_have_any() -> None:
    forms = Forms()
    tagged, parameter = torch.zeros(2).as_subclass(Tagged), torch.nn.Parameter(torch.zeros(2, 2))
    for name, arguments in {"tagged": (tagged,), "parameter": (parameter,), "many": (torch.zeros(1),) * 200}.items():
        forms.keep(name, *arguments)
    assert forms.find(torch.ones(2).as_subclass(Tagged)) == "tagged" and forms.find(torch.zeros(2)) is None
    assert forms.find(parameter.detach()) == "parameter"
    assert forms.find(*(torch.zeros(1),) * 200) is None
    forms.keep("a string has none", "text")
    assert forms.find("text") is None and forms.find(1 << 70) is None


def test_routing_on_the_host() -> None:
    ids = torch.tensor([[0, 3], [-1, 3], [-7, -1]])
    assert largest_id(ids) == 3 and largest_id(ids.int().t()) == 3 and largest_id(ids[2:]) == -1
    assert largest_id(ids[:0]) == -1 and largest_id(ids.float()) is None and largest_id(ids.to("meta")) is None

    def counted(num_experts: int) -> tuple[int | None, list[object]]:
        ranks, nodes, experts = (torch.full((size,), 9, dtype=torch.int32) for size in (2, 1, num_experts))
        mask = torch.ones(3, 2, dtype=torch.bool)
        largest = count_routing(ids, 2, ranks, nodes, experts, mask)
        return largest, [tensor.tolist() for tensor in (ranks, nodes, experts, mask)]

    assert counted(4) == (3, [[1, 2], [2], [1, 0, 0, 2], [[True, True], [False, True], [False, False]]])
    assert counted(2)[0] == 3
    with pytest.raises(ep.InvalidArgument, match="num_experts is 5, allowed: positive multiples of num_ranks"):
        counted(5)
    with pytest.raises(ep.InvalidArgument, match=r"per_rank is \[2\] of torch.float64 on cpu, expected elements"):
        count_routing(ids, 1, torch.zeros(2).double(), None, torch.zeros(4).int(), torch.zeros(3, 2).bool())
    with pytest.raises(ep.InvalidArgument, match=r"is_in_rank is \[2, 2\] of torch.bool on cpu, expected .* 6 "):
        count_routing(ids, 1, torch.zeros(2).int(), None, torch.zeros(4).int(), torch.zeros(2, 2).bool())


def test_bytes_of_the_host() -> None:
    counts = torch.tensor([1, 2], dtype=torch.int32)
    assert host_bytes(counts, counts[:1]) == b"\1\0\0\0\2\0\0\0\1\0\0\0"
    assert host_bytes(counts.long()) is None and host_bytes(torch.zeros(4).int()[::2]) is None
    parts = [bytes(host_bytes(counts, counts) or b""), bytes(host_bytes(counts * 3, -counts) or b"")]
    assert column_sums(parts, 0, 4) == [4, 8, 0, 0] and column_sums(parts, 1, 2) == [8, 0]
    with pytest.raises(ep.InvalidArgument, match="a part has 4 columns, expected at least 5"):
        column_sums(parts, 2, 3)


@pytest.mark.parametrize("kind", [torch.Tensor, Tagged])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_packed_routing_comes_back_as_it_went(dtype: Any, kind: Any) -> None:
    """Out of tensors of any strides, of torch's own type or not."""
    tokens, topk, scales = 5, 3, torch.arange(10.0).view(2, 5).t()
    ids = torch.tensor([[0, 5, -1], [4, 4, 4], [3, -1, 2], [1, 0, 5], [-1, -1, -1]], dtype=dtype)
    weights = torch.arange(15.0).view(3, 5).t()
    parts: list[Any] = [part.as_subclass(kind) for part in (ids, weights, scales)]
    routing = PackedRouting.of(torch.zeros(tokens, 1), parts[0], parts[1], parts[2], 50, 2, None)
    assert routing.words.shape == (5, 12)
    assert routing.targets.tolist() == [[0, 2, -1], [2, 2, 2], [1, -1, 1], [0, 0, 2], [-1, -1, -1]]
    mask = torch.tensor([[True, False, True]] * tokens)
    assert PackedRouting.of(ids, None, None, None, 0, 2, mask).targets.tolist() == [[0, 2, -1]] * tokens

    found, numbers = torch.zeros(4, topk, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    own, back = torch.zeros(4, topk), torch.zeros(4, 2)
    unpack_routing(routing.words, 4, 3, topk, True, 4, 2, found, None, own, True, numbers, back)
    assert found.tolist() == [[-1, 1, -1], [0, 0, 0], [-1, -1, -1], [-1, -1, -1]]
    assert own.tolist() == [[0, 5, 0], [1, 6, 11], [0, 0, 0], [0, 0, 0]]
    assert numbers.tolist() == [50, 51, 52, 53] and torch.equal(back, scales[:4])
    with pytest.raises(ep.InvalidArgument, match=r"ids is \[4, 3\] of .*, expected a dense tensor of 15 elements"):
        unpack_routing(routing.words, 5, 3, topk, True, 4, 2, found, None, None, True, None, None)
    with pytest.raises(ep.InvalidArgument, match="weights is .*, expected 3 columns, as topk_idx has"):
        PackedRouting.of(ids, ids, scales, None, 0, 2, None)


def test_rows_of_any_type_go_as_bytes() -> None:
    def program(comm: ep.Communicator) -> None:
        config = ep.GroupConfig(num_experts=2, max_dispatch_tokens_per_rank=4, max_token_bytes=256)
        with ep.Group(comm, config, algorithm=ep.Algorithm.HIGH_THROUGHPUT) as group:
            handle = group.init_handle(ep.Layout.FLAT, 1)
            handle.update(torch.tensor([[1], [0], [1]]))
            num = 2 * (1 + comm.rank)
            of_rank = [torch.arange(12, dtype=torch.int32).view(3, 4) + 100 * rank for rank in range(2)]
            kept = torch.tensor([1] if comm.rank == 0 else [0, 2])
            expected = torch.cat([rows[kept] for rows in of_rank])
            received, words = torch.zeros(num, 4, dtype=torch.int32), torch.zeros(num, 8, dtype=torch.float16)
            dispatch_rows(handle, of_rank[comm.rank], received)
            assert torch.equal(received, expected)
            beside = of_rank[comm.rank].to(torch.float16).repeat(1, 2)
            dispatch_rows(handle, of_rank[comm.rank].float(), received.view(torch.float32), beside, words)
            assert torch.equal(received.view(torch.float32), expected.float())
            assert torch.equal(words, expected.to(torch.float16).repeat(1, 2))
            route = RowRoute(handle, 3, num, 16)
            floats = of_rank[comm.rank].float()
            again = route.send_again(floats)
            assert torch.equal(again, expected.float()) and again.dtype == torch.float32
            for unfit in (floats[:, :3], floats[:2], floats.long(), floats.int(), floats.as_subclass(Tagged), None):
                assert route.send_again(unfit) is None
            assert RowRoute(handle, 3, num, 8).send_again(floats) is None
            sums = route.add_up(expected.float())
            assert torch.equal(sums, of_rank[comm.rank].float()) and route.add_up(expected) is None
            assert RowRoute(handle, 3, num + 1, 16).add_up(expected.float()) is None
            with pytest.raises(ep.InvalidArgument, match="rows has rows of 12 bytes, allowed: multiples of 16"):
                dispatch_rows(handle, of_rank[comm.rank][:, :3].contiguous(), received)

    ep.run_threads(2, program)


def test_scales_by_column_of_any_tensor() -> None:
    [comm] = ep.Communicator.create_threads(1)
    sizes: dict[str, Any] = {
        "num_experts": 2,
        "max_dispatch_tokens_per_rank": 3,
        "max_token_bytes": 512,
        "api_version": 1,
    }
    with comm, ep.Group(comm, **sizes) as group, group.init_handle(ep.Layout.EXPERT_MAJOR, 1) as handle:
        x, ids = torch.arange(768.0).view(3, 256).to(torch.bfloat16), torch.tensor([[1], [0], [1]])
        found = []
        for kind in (torch.Tensor, Tagged):
            rows, counts = torch.empty(2, 3, 256, dtype=torch.float8_e4m3fn), torch.empty(2, dtype=torch.int32)
            scales = torch.zeros(2, 2, 3).transpose(1, 2)
            route_and_dispatch(handle, ids, x, rows, counts, scales.as_subclass(kind), True, False, False)
            found.append(scales)
        assert torch.equal(*found) and counts.tolist() == [1, 2]
        largest = x.view(3, 2, 128).amax(dim=2).float()
        assert torch.allclose(found[0][1, :2], largest[[0, 2]] / 448)
        with pytest.raises(ep.InvalidArgument, match="scales is not contiguous"):
            route_and_dispatch(handle, ids, x, rows, counts, torch.zeros(2, 3, 2), True, False, False)
