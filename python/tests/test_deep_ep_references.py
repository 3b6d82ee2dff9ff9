# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer against crossdock.deep_ep.utils.refs, as DeepEP's own test compares them; ranks are processes."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402, F811

from crossdock import deep_ep  # noqa: E402
from crossdock.deep_ep.utils import refs  # noqa: E402
from crossdock.deep_ep.utils.envs import init_dist  # noqa: E402
from crossdock.deep_ep.utils.gate import get_unbalanced_scores  # noqa: E402
from crossdock.deep_ep.utils.math import per_token_cast_to_fp8  # noqa: E402

RANKS, TOKENS, HIDDEN, TOPK, EXPERTS = 3, 24, 256, 4, 12


def compare(local_rank: int, num_ranks: int, port: str, several_sums: bool) -> None:
    os.environ["MASTER_PORT"] = port
    rank, _, group = init_dist(local_rank, num_ranks, seed=7)
    buffer: Any = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=TOKENS, allow_multiple_reduction=several_sums, explicitly_destroy=True
    )
    num = TOKENS - rank
    scores = get_unbalanced_scores(num, EXPERTS, num_ranks, TOPK, 1.5)
    weights, ids = torch.topk(scores, TOPK, dim=-1, sorted=False)
    ids.masked_fill_(torch.rand(num, TOPK, dtype=torch.float32) < 0.1, -1)
    weights.masked_fill_(ids < 0, 0)
    bias = (torch.randn(num, HIDDEN), torch.randn(num, HIDDEN))
    own = rank * TOKENS + torch.arange(num)
    pairs = refs.generate_pre_combine_data(own, TOKENS, TOPK, HIDDEN).masked_fill_((ids < 0).unsqueeze(2), 0)

    for x in (torch.randn(num, HIDDEN), per_token_cast_to_fp8(torch.randn(num, HIDDEN))):
        rows, local, of_rows, sources, of_each = refs.dispatch(x, ids, weights, TOKENS, EXPERTS)
        got, got_ids, got_weights, handle, _ = buffer.dispatch(x, ids, weights, num_experts=EXPERTS)
        for one, wanted in zip(*((got, rows) if isinstance(x, tuple) else ((got,), (rows,))), strict=True):
            assert one.dtype == wanted.dtype and torch.equal(one.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(got_ids, local) and torch.equal(handle.recv_src_metadata[:, 0], sources)
        assert torch.equal(got_weights.masked_fill(local < 0, 0), of_rows.masked_fill(local < 0, 0))
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == torch.tensor(of_each).cumsum(0).tolist()
        assert torch.equal(handle.dst_buffer_slot_idx, buffer.dispatch(x, handle=handle)[3].dst_buffer_slot_idx)

        made = refs.generate_pre_combine_data(sources, TOKENS, TOPK, HIDDEN)
        here = made.masked_fill((local < 0).unsqueeze(2), 0)
        for biases in (None, bias[0], bias):
            found, back, _ = buffer.combine(refs.ordered_accumulate(here), handle, got_weights, bias=biases)
            wanted = refs.combine(pairs, ids, 1, num_ranks, EXPERTS, biases, True, False)
            assert torch.equal(found, wanted) and torch.equal(back, weights)

        expanded, _, _, places, _ = buffer.dispatch(x, ids, weights, num_experts=EXPERTS, do_expand=True)
        expanded = expanded[0] if isinstance(expanded, tuple) else expanded
        outputs = torch.full((len(expanded) + 1, HIDDEN), torch.nan)
        outputs[places.recv_src_metadata[:, 2:].flatten()] = made.view(-1, HIDDEN)
        found, _, _ = buffer.combine(outputs[:-1], places, bias=bias)
        assert torch.equal(found, refs.combine(pairs, ids, 1, num_ranks, EXPERTS, bias, several_sums, False))
    buffer.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("several_sums", [True, False])
def test_elastic_buffer(several_sums: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    torch.multiprocessing.start_processes(compare, (RANKS, port, several_sums), nprocs=RANKS, start_method="forkserver")


def test_sums_that_are_not_rounded_go_by_column() -> None:
    """In fp32, 2**-25 is lost beside 1. Rank 0 has the second choice, rank 1 the others, two experts each."""
    ids = torch.tensor([[2, 0, 3]])
    y = torch.tensor([1.0, 2**-25, -1.0]).bfloat16().view(1, 3, 1)
    assert refs.combine(y, ids, 1, 2, 4, None, False, False).item() == 0
    assert refs.combine(y, ids, 1, 2, 4, None, True, False).item() == 2**-25
    assert refs.combine(y, ids, 1, 2, 4, torch.tensor([[1.0]]).bfloat16(), True, False).item() == 1


def test_sums_round_per_rank_and_per_domain() -> None:
    """1 + 1/256 is 1 in bf16, and 1/256 twice is not."""
    ids = torch.tensor([[0, 2, 3, -1]])  # two experts a rank, two ranks a domain
    y = torch.tensor([1.0, 1 / 256, 1 / 256, 0]).bfloat16().view(1, 4, 1)
    assert refs.combine(y, ids, 2, 2, 8, None, False, False).item() == 1 + 1 / 128
    assert refs.combine(y, ids, 2, 2, 8, None, True, False).item() == 1 + 1 / 128
    together = torch.tensor([[0, 1, 2, -1]])
    assert refs.combine(y, together, 2, 2, 8, None, True, False).item() == 1
    assert refs.combine(y, together, 2, 2, 8, y[:, 1], True, False).item() == 1 + 1 / 128


@pytest.mark.parametrize("precise", [False, True])
def test_scores(precise: bool) -> None:
    torch.manual_seed(3)
    for ratio, expected in ((1, 1024), (2, 2048), (9, 4096)):
        ids = get_unbalanced_scores(1024, 64, 4, 4, ratio, precise).topk(4, dim=1).indices
        of_first = int((ids < 16).sum())
        assert of_first == expected if precise else abs(of_first - expected) <= expected / 10
