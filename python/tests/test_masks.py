# SPDX-License-Identifier: Apache-2.0
"""Groups that go on without a silent rank, and take it back."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import crossdock as ep
from patience import short_timeout_s


@pytest.fixture(autouse=True)
def own_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups' own timeouts count here."""
    monkeypatch.delenv("NCCL_EP_TIMEOUT_MS")


def test_a_silent_rank_is_masked_and_rejoins() -> None:
    rejoin = threading.Barrier(3)
    timeout_ns = int(short_timeout_s() * 1e9)

    def program(comm: ep.Communicator) -> None:
        rank = comm.rank
        group = ep.Group(
            comm,
            num_experts=3,
            max_dispatch_tokens_per_rank=2,
            max_token_bytes=64,
            enable_mask=True,
            timeout_ns=timeout_ns,
        )
        counts, received = np.zeros(1, np.int32), np.zeros((1, 6, 4), np.float32)
        tokens, result = np.full((2, 4), rank + 1, np.float32), np.zeros((2, 4), np.float32)
        weights = np.full((2, 3), 1 / 3, np.float32)
        handle = group.create_handle(ep.Layout.EXPERT_MAJOR, np.tile(np.arange(3), (2, 1)))

        def step() -> None:
            handle.dispatch(tokens, received, layout_info=ep.LayoutInfo(expert_counters=counts))
            handle.combine(received, ep.CombineOutputs(tokens=result, topk_weights=weights))

        step()
        assert group.mask_query() == [True, True, True]
        np.testing.assert_allclose(result, tokens, rtol=1e-6)
        if rank != 2:  # which now misses a step
            step()
            assert counts[0] == 4
            np.testing.assert_allclose(result, tokens * 2 / 3, rtol=1e-6)
            assert group.mask_query() == [True, True, False]
            assert group.get_async_error()
            found: Any = group.diagnosis()
            assert found.peer == 2
        rejoin.wait()
        group.mask_clean()
        group.error_clear()
        assert not group.get_async_error()
        step()
        np.testing.assert_allclose(result, tokens, rtol=1e-6)
        handle.close()
        group.close()

    ep.run_threads(3, program)


def test_masks_are_set_by_hand() -> None:
    [comm] = ep.Communicator.create_threads(1)
    fields: dict[str, Any] = {"num_experts": 2, "max_dispatch_tokens_per_rank": 2, "max_token_bytes": 64}
    with comm, ep.Group(comm, **fields, enable_mask=True) as group:
        group.mask_update([0])
        assert group.mask_query() == [False]
        out = np.zeros(1, np.int32)
        group.mask_update([True])
        assert group.mask_query(out) is out
        assert out[0] == 1
        with pytest.raises(ep.InvalidArgument, match="mask has 2 entries, expected one per rank, 1"):
            group.mask_update([1, 1])
        with pytest.raises(ep.InvalidArgument, match=r"out is \[1\] of int64, expected int32 with one dimension"):
            group.mask_query(np.zeros(1, np.int64))


def test_high_throughput_with_masks() -> None:
    def program(comm: ep.Communicator) -> int:
        with ep.Group(
            comm,
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=2,
            max_dispatch_tokens_per_rank=4,
            max_token_bytes=64,
            num_topk=1,
            ht_masks=True,
        ) as group:
            handle = group.create_handle(ep.Layout.FLAT, np.zeros((4, 1), np.int64))
            count = np.ones(1, np.int64)
            handle.dropped_tokens(count)
            assert group.mask_query() == [True, True]
            handle.close()
            return int(count[0])

    assert ep.run_threads(2, program) == [0, 0]
