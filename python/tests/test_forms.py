# SPDX-License-Identifier: Apache-2.0
"""What the binding knows for crossdock.deep_ep: forms of arguments, and routing counts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

from crossdock._core import (  # noqa: E402
    Forms,
    column_sums,
    count_routing,
    host_bytes,
    largest_id,
    route_and_dispatch,
)

import crossdock as ep  # noqa: E402


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

    for num_nodes, per_node in ((1, None), (2, [1, 2])):
        ranks, nodes, experts, mask = count_routing(ids, 4, 2, num_nodes)
        assert ranks.tolist() == [1, 2] and experts.tolist() == [1, 0, 0, 2]
        assert mask.tolist() == [[True, True], [False, True], [False, False]]
        assert (nodes if nodes is None else nodes.tolist()) == per_node
    twice = torch.tensor([[1, 1]])
    assert [count_routing(twice, 2, 1, 1, distinct)[2].tolist() for distinct in (False, True)] == [[0, 2], [0, 1]]
    with pytest.raises(ep.InvalidArgument, match="num_experts is 5, allowed: positive multiples of num_ranks"):
        count_routing(ids, 5, 2)
    with pytest.raises(ep.InvalidArgument, match=r"topk_idx is \[3, 2\] of torch.float32 on cpu, expected .* of int64"):
        count_routing(ids.float(), 4, 2)


def test_bytes_of_the_host() -> None:
    counts = torch.tensor([1, 2], dtype=torch.int32)
    assert host_bytes(counts, counts[:1]) == b"\1\0\0\0\2\0\0\0\1\0\0\0"
    assert host_bytes(counts.long()) is None and host_bytes(torch.zeros(4).int()[::2]) is None
    parts = [bytes(host_bytes(counts, counts) or b""), bytes(host_bytes(counts * 3, -counts) or b"")]
    assert column_sums(parts, 0, 4) == [4, 8, 0, 0] and column_sums(parts, 1, 2) == [8, 0]
    with pytest.raises(ep.InvalidArgument, match="a part has 4 columns, expected at least 5"):
        column_sums(parts, 2, 3)


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
