# SPDX-License-Identifier: Apache-2.0
"""The calls of crossdock.deep_ep that are one call into C++: what they recognise, and what they give back and when."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")

import stub_libraries  # noqa: E402

import crossdock as ep  # noqa: E402
from crossdock import deep_ep  # noqa: E402
from crossdock._core import copy_of, low_latency_combine, low_latency_dispatch, no_event  # noqa: E402

NUM_EXPERTS, TOPK, HIDDEN, TOKENS = 4, 2, 128, 3


class OneRank:
    """A buffer of one rank, and a problem for it."""

    def __init__(self) -> None:
        [comm] = ep.Communicator.create_threads(1)
        self.buffer: Any = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
        self.x = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).bfloat16()
        self.ids = torch.tensor([[0, 1], [3, -1], [2, 0]])
        self.weights = torch.full((TOKENS, TOPK), 0.5)

    def dispatch(self, **form: Any) -> Any:
        return self.buffer.low_latency_dispatch(self.x, self.ids, TOKENS, NUM_EXPERTS, use_fp8=False, **form)

    def at_once(self, ids: Any, use_fp8: bool = False) -> Any:
        """What C++ alone says to a dispatch."""
        forms = self.buffer.runtime.low_latency.forms
        return low_latency_dispatch(forms, self.x, ids, TOKENS, NUM_EXPERTS, use_fp8, False, False)

    def free(self) -> list[Any]:
        """Handles that nobody uses."""
        [pool] = self.buffer.runtime.low_latency.pools
        return list(pool.free(TOPK))


@pytest.fixture
def one() -> Any:
    rank = OneRank()
    yield rank
    if rank.buffer.runtime is not None:
        rank.buffer.destroy()


def test_a_form_is_recognised_once_it_was_found_right(one: OneRank) -> None:
    assert one.at_once(one.ids) is None
    rows, counts, *_ = one.dispatch()
    again = one.at_once(one.ids.clone())
    assert torch.equal(again[1], counts) and type(again[2]) is deep_ep.low_latency.LowLatencyHandle
    for expert, count in enumerate(counts.tolist()):
        assert torch.equal(again[0][expert, :count], rows[expert, :count])
    assert one.at_once(one.ids, use_fp8=True) is None and one.at_once(one.ids.int()) is None
    assert one.at_once(one.ids[:2]) is None and one.at_once(None) is None and one.at_once("ids") is None


def test_values_that_are_wrong_or_too_many_are_left_to_python(one: OneRank) -> None:
    one.dispatch()
    assert one.at_once(torch.full((TOKENS, TOPK), NUM_EXPERTS)) is None
    assert one.at_once(torch.zeros(TOKENS, TOPK, dtype=torch.int64)) is None  # 6 rows for an expert with room for 3
    with pytest.raises(AssertionError, match="topk_idx has the value 4, allowed: below num_experts"):
        one.buffer.low_latency_dispatch(one.x, torch.full((TOKENS, TOPK), 4), TOKENS, NUM_EXPERTS, use_fp8=False)


def test_a_handle_goes_back_once_nobody_needs_it_and_not_while_its_hook_is_missing(one: OneRank) -> None:
    _, _, handle, _, _ = one.dispatch()
    own = handle.trip.handle
    assert one.free() == [] and list(handle)[2:] == [TOKENS, HIDDEN, NUM_EXPERTS] and len(handle) == 5
    assert handle[0] is handle[:2][0] and handle[-4] is handle[1] and handle[1].shape == (NUM_EXPERTS, 1)
    del handle
    assert one.free() == [own]
    _, _, handle, _, hook = one.dispatch(return_recv_hook=True)
    assert handle.trip.handle is own
    del handle  # the hook keeps it
    assert one.free() == []
    hook()
    del hook
    assert one.free() == [own]
    # One whose hook is never called goes for good.
    _, _, handle, _, hook = one.dispatch(return_recv_hook=True)
    del handle, hook, own
    gc.collect()
    assert one.free() == []
    one.dispatch()


def test_a_cycle_through_a_handle_is_collected(one: OneRank) -> None:
    _, _, handle, _, _ = one.dispatch()
    buffer = one.buffer.get_next_low_latency_combine_buffer(handle)
    buffer.handle, gone = handle, weakref.ref(buffer)
    del buffer, handle
    gc.collect()
    assert gone() is None and len(one.free()) == 1


def test_combines_that_differ_are_left_to_python(one: OneRank) -> None:
    rows, _, handle, _, _ = one.dispatch()
    pools = one.buffer.runtime.low_latency.pools
    given = rows, one.ids, one.weights, handle
    assert low_latency_combine(pools, *given, None, False) is None  # not seen yet
    sums, event, hook = one.buffer.low_latency_combine(*given)
    made, _, _ = low_latency_combine(pools, *given, None, False)
    assert torch.equal(made, sums) and event.event is None and hook is None
    out = torch.empty_like(sums)
    assert one.buffer.low_latency_combine(*given, out=out)[0] is out and torch.equal(out, sums)
    assert low_latency_combine(pools, rows, one.ids.clone(), one.weights, handle, None, False) is None
    assert low_latency_combine([], *given, None, False) is None  # of another buffer
    assert low_latency_combine(pools, rows, one.ids, one.weights, tuple(handle), None, False) is None
    wide = torch.full((TOKENS, 2 * TOPK), 0.5)[:, ::2]
    assert low_latency_combine(pools, rows, one.ids, wide, handle, None, False) is None
    assert torch.equal(one.buffer.low_latency_combine(rows, one.ids, wide, handle)[0], sums)
    one.buffer.destroy()
    assert low_latency_combine(pools, *given, None, False) is None
    with pytest.raises(AssertionError, match="the buffer of this handle is destroyed"):
        _ = handle.trip.handle


def test_events_of_calls_without_one_are_their_callers_own() -> None:
    event = no_event()
    assert type(event) is deep_ep.EventOverlap and event.event is None and event.extra_tensors is None
    event.register_hook_after_wait(lambda: None)
    no_event().register_hook_after_wait(lambda: None)
    with pytest.raises(AssertionError, match="event is None"):
        event.current_stream_wait()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_a_copy_is_its_own_memory(dtype: Any) -> None:
    for shape in ((0, 3), (5, 3), (4,)):
        made = torch.ones(shape).to(dtype)
        copy = copy_of(made)
        assert torch.equal(copy, made) and copy.dtype == dtype and (not len(made) or copy.data_ptr() != made.data_ptr())


DRIVER = """
#include <stdio.h>
int cuEventCreate(void** event, unsigned flags) { *event = (void*)7; printf("create %u\\n", flags); return 0; }
int cuEventRecord(void* event, void* stream) { printf("record %ld %ld\\n", (long)event, (long)stream); return 0; }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    printf("wait %ld %ld %u\\n", (long)stream, (long)event, flags);
    return stream == (void*)3;
}
"""

ORDERING = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
torch._C._cuda_getDevice = lambda: 2
from crossdock._core import order_streams
print(order_streams(2, 5, 6), order_streams(2, 6, 5), order_streams(2, 3, 5), order_streams(1, 5, 6), flush=True)
ctypes.CDLL(None).fflush(None)
"""


def test_the_driver_orders_streams_of_the_current_device_with_one_event(tmp_path: Path) -> None:
    driver = stub_libraries.library(DRIVER, tmp_path / "libcuda.so.1")
    command = [sys.executable, "-c", ORDERING, str(driver)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    called = ["create 2", "record 7 6", "wait 5 7 0", "record 7 5", "wait 6 7 0", "record 7 5", "wait 3 7 0"]
    assert "True True False False" in said and [line for line in said if "True" not in line] == called
