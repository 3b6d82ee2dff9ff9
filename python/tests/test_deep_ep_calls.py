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

from crossdock._core import (  # noqa: E402
    PieceMaker,
    elastic_combine,
    elastic_dispatch_again,
    low_latency_combine,
    low_latency_dispatch,
    no_event,
)

import crossdock as ep  # noqa: E402
import stub_libraries  # noqa: E402
from crossdock import deep_ep  # noqa: E402

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


def test_values_that_are_wrong_or_too_many_are_errors(one: OneRank) -> None:
    """In the first call of a form and in later ones."""
    too_large, too_many = torch.full((TOKENS, TOPK), NUM_EXPERTS), torch.zeros(TOKENS, TOPK, dtype=torch.int64)
    for calls in range(2):
        with pytest.raises(AssertionError, match="topk_idx has the value 4, allowed: below num_experts"):
            one.buffer.low_latency_dispatch(one.x, too_large, TOKENS, NUM_EXPERTS, use_fp8=False)
        with pytest.raises(AssertionError, match="an expert 6 times, .* num_max_dispatch_tokens_per_rank .3. times"):
            one.buffer.low_latency_dispatch(one.x, too_many, TOKENS, NUM_EXPERTS, use_fp8=False)
        assert len(one.free()) == calls  # none was taken
        one.dispatch()


def test_a_handle_goes_back_once_nobody_needs_it_and_not_while_its_hook_is_missing(one: OneRank) -> None:
    _, _, handle, _, _ = one.dispatch()
    own = handle.lease.taken
    assert one.free() == [] and list(handle)[2:] == [TOKENS, HIDDEN, NUM_EXPERTS] and len(handle) == 5
    assert handle[0] is handle[:2][0] and handle[-4] is handle[1] and handle[1].shape == (NUM_EXPERTS, 1)
    del handle
    assert one.free() == [own]
    _, _, handle, _, hook = one.dispatch(return_recv_hook=True)
    assert handle.lease.taken is own
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
    _, _, unread, _, _ = one.dispatch()
    one.buffer.destroy()
    assert low_latency_combine(pools, *given, None, False) is None
    with pytest.raises(AssertionError, match="the buffer of this handle is destroyed"):
        _ = unread[0]


def test_elastic_calls_along_a_handle_are_recognised_once_they_were_found_right(one: OneRank) -> None:
    """Those of rows that fit the group, with all that goes along them, dense or not."""
    [comm] = ep.Communicator.create_threads(1)
    buffer: Any = deep_ep.ElasticBuffer(comm, explicitly_destroy=True)
    x, weights, wide = one.x, one.weights, torch.full((TOKENS, 2 * TOPK), 0.5)[:, ::2]
    handle = buffer.dispatch(x, one.ids, wide, num_experts=NUM_EXPERTS)[3]
    lease = handle._lease

    def again(x: Any, weights: Any = None) -> Any:
        return elastic_dispatch_again(lease, x, None, weights, None, 0, False, False)

    for given in (weights, wide):
        assert again(x, given) is None
        rows, _, own, _, _ = buffer.dispatch(x, handle=handle, topk_weights=given)
        received, _, returned = again(x, given)
        assert torch.equal(received, rows) and torch.equal(returned, own)
    assert again(x) is None and again(x[:2], weights) is None and again(x.float(), weights) is None
    odd = x[:, : HIDDEN - 1].contiguous()  # is padded
    assert torch.equal(buffer.dispatch(odd, handle=handle)[0], odd) and torch.equal(again(odd)[0], odd)
    long = x.repeat(1, 2)  # goes in pieces
    assert torch.equal(buffer.dispatch(long, handle=handle)[0], long) and again(long) is None

    bias = torch.ones(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16)[:, ::2]
    assert elastic_combine(lease, rows, own, bias, None, 0, False) is None
    sums, weights, _ = buffer.combine(rows, handle, own, bias)
    made = elastic_combine(lease, rows, own, bias, None, 0, False)
    assert torch.equal(made[0], sums) and torch.equal(made[1], weights) and torch.equal(sums, x + 1)
    assert elastic_combine(lease, rows, None, None, None, 0, False) is None
    assert elastic_combine(lease, rows, own, bias, None, 0, True) is None
    buffer.destroy()


def test_events_of_calls_without_one_are_their_callers_own() -> None:
    event = no_event()
    assert type(event) is deep_ep.EventOverlap and event.event is None and event.extra_tensors is None
    event.register_hook_after_wait(lambda: None)
    no_event().register_hook_after_wait(lambda: None)
    with pytest.raises(AssertionError, match="event is None"):
        event.current_stream_wait()


@pytest.mark.parametrize("is_inference", [False, True])
def test_pieces_are_memory_that_nobody_else_has(is_inference: bool) -> None:
    """Also where inference mode begins or ends between them."""
    make = PieceMaker(torch.device("cpu"), 5)
    with torch.inference_mode(is_inference):
        kept = [make(False) for _ in range(3)]
    kept += [make(False) for _ in range(130)]
    alone = make(True)
    assert alone.untyped_storage().nbytes() == 20
    for number, piece in enumerate([*kept, alone]):
        assert piece.shape == (5,) and piece.dtype == torch.int32 and piece.data_ptr() % 4 == 0
        assert piece.is_inference() == (is_inference and number < 3)
        piece.fill_(number) if not piece.is_inference() else piece.numpy().fill(number)
    assert [piece.tolist() for piece in kept] == [[number] * 5 for number in range(133)]
    assert len({piece.untyped_storage().data_ptr() for piece in kept}) == 3
    assert make(False).untyped_storage().data_ptr() == kept[-1].untyped_storage().data_ptr()


DRIVER = """
#define _GNU_SOURCE
#include <stdio.h>
static long events = 70;
int cuEventCreate(void** event, unsigned flags) {
    *event = (void*)++events;
    dprintf(1, "create %u\\n", flags);
    return 0;
}
int cuEventRecord(void* event, void* stream) {
    dprintf(1, "record %ld %ld\\n", (long)event, (long)stream);
    return 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    dprintf(1, "wait %ld %ld %u\\n", (long)stream, (long)event, flags);
    return stream == (void*)3;
}
"""

ORDERING = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
torch._C._cuda_getDevice = lambda: 2
from crossdock._core import order_streams
print(order_streams(2, 5, 6), order_streams(2, 6, 5), order_streams(2, 3, 5), order_streams(1, 5, 6), flush=True)
"""

ASYNCHRONOUS = """
import ctypes, sys
from types import SimpleNamespace
import torch

ctypes.CDLL(sys.argv[1])
device, current, captures = 2, 5, False
torch._C._cuda_getDevice = lambda: device
torch._C._cuda_getCurrentRawStream = lambda index: current
torch._C._cuda_isCurrentStreamCapturing = lambda: captures
torch.Tensor.record_stream = lambda tensor, stream: print(stream, "uses", list(tensor.shape), flush=True)

import crossdock as ep
from crossdock import deep_ep
from crossdock._core import SideStream

[comm] = ep.Communicator.create_threads(1)
buffer = deep_ep.Buffer(comm, low_latency_mode=True, explicitly_destroy=True)
x, ids, weights = torch.ones(3, 128).bfloat16(), torch.tensor([[0, 1], [3, -1], [2, 0]]), torch.ones(3, 2)
rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 3, 4, use_fp8=False)
buffer.low_latency_combine(rows, ids, weights, handle)
buffer.runtime.stream._sides[x.device] = SideStream(2, 9, "own")

calls = dict(
    dispatch=lambda: buffer.low_latency_dispatch(x, ids, 3, 4, use_fp8=False, async_finish=True)[3],
    combine=lambda: buffer.low_latency_combine(rows, ids, weights, handle, async_finish=True)[1],
)
for name, call in calls.items():
    print(name, flush=True)
    event = call()
    print("wait", len(event.extra_tensors), flush=True)
    event.current_stream_wait()
    del event
print("not waited", flush=True)
calls["combine"]()
print("waited elsewhere", flush=True)
event = calls["combine"]()
current = 6
event.current_stream_wait(release_handle=True)
current = 5
print("captured", flush=True)
captures = True
event = calls["dispatch"]()
del event
captures = False
print("no context", flush=True)
event = calls["combine"]()
stream = SimpleNamespace(cuda_stream=3, query=lambda: print("query", flush=True))
try:
    event.event.wait_on(stream)
except AssertionError as error:
    print(error, flush=True)
event.current_stream_wait()
buffer.destroy()
"""


def said_with_driver(program: str, tmp_path: Path) -> list[str]:
    """What a program and a driver that only writes down what is asked of it say."""
    driver = stub_libraries.library(DRIVER, tmp_path / "libcuda.so.1")
    command = [sys.executable, "-c", program, str(driver)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_the_driver_orders_streams_of_the_current_device_with_one_event(tmp_path: Path) -> None:
    called = ["create 2", "record 71 6", "wait 5 71 0", "record 71 5", "wait 6 71 0", "record 71 5", "wait 3 71 0"]
    assert said_with_driver(ORDERING, tmp_path) == [*called, "True True False False"]


def test_an_asynchronous_call_asks_the_driver_three_times_and_its_wait_once(tmp_path: Path) -> None:
    """The caller's stream is 5, the buffer's 9. torch is told of tensors only where stream 5 has not waited."""
    said = said_with_driver(ASYNCHRONOUS, tmp_path)
    parts: dict[str, list[str]] = {}
    part: list[str] = []
    for line in said:
        if line.split()[0] not in ("create", "record", "wait", "own", "query", "the"):
            parts[line] = part = []
        elif line != "create 2":
            part.append(line)
    enqueued = ["record 71 5", "wait 9 71 0", "record 71 9"]
    for name, num_tensors in {"dispatch": 4, "combine": 4}.items():
        assert parts[name] == [*enqueued, f"wait {num_tensors}", "wait 5 71 0"]
    used = [f"own uses {shape}" for shape in ("[4, 3, 128]", "[3, 2]", "[3, 2]", "[3, 128]")]
    assert parts["not waited"] == [*enqueued, *used]
    assert parts["waited elsewhere"] == [*enqueued, "wait 6 71 0", *used]
    assert parts["captured"] == enqueued
    refusal = "the stream does not wait for the event: CUDA's driver fails"
    assert parts["no context"] == [*enqueued, "wait 3 71 0", "query", "wait 3 71 0", refusal, "wait 5 71 0"]
    assert said.count("create 2") == 1
