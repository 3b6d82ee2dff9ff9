# SPDX-License-Identifier: Apache-2.0
"""A buffer's own stream on a GPU: what its calls wait for, and what waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from crossdock._core import ElasticLease, Kept, SideStream, no_event, order_streams
from crossdock.deep_ep.checks import require_state
from crossdock.deep_ep.handles import EPHandle
from crossdock.deep_ep.utils.event import EventHandle, EventOverlap, current_stream, handle_of

Event = EventHandle | EventOverlap | None
Result = TypeVar("Result")


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def run_on(stream: torch.cuda.Stream, work: Callable[..., Result], *arguments: Any) -> Result:
    """What work returns, with that stream current meanwhile."""
    index = stream.device_index
    if torch.cuda.current_device() != index:
        with torch.cuda.stream(stream):
            return work(*arguments)
    before = current_stream(index)
    torch.cuda.set_stream(stream)
    try:
        return work(*arguments)
    finally:
        torch.cuda.set_stream(before)


def on_this_stream(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """The function, to be called later, on the stream that is current now, if the device has streams."""
    if device.type == "cpu":
        return work
    index = index_of(device)
    stream = current_stream(index)

    def hook() -> None:
        if current_stream(index) is stream:
            work()
        else:
            run_on(stream, work)

    return hook


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those that an argument or a result consists of, and those that handles hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, ElasticLease):
        yield value.topk_idx
    elif isinstance(value, tuple):
        for item in tuple.__iter__(value):  # handles compute some of theirs
            yield from tensors_in(item)
    elif isinstance(value, EPHandle):
        for item in vars(value).values():
            yield from tensors_in(item)


class CommStream:
    """The stream of one Buffer's calls that overlap others' work.

    A call that neither has an event to wait for nor is asynchronous runs on the caller's stream: nothing overlaps.
    """

    def __init__(self) -> None:
        self._sides: dict[torch.device, SideStream] = {}

    def side(self, device: torch.device) -> SideStream:
        """Where asynchronous calls of C++ work."""
        return self._sides.get(device) or self._begin(device)

    def _begin(self, device: torch.device) -> SideStream:
        if device.type != "cuda":
            return self._sides.setdefault(device, SideStream(-1, 0, None))
        index = index_of(device)
        stream = torch.cuda.Stream(device, priority=-1)
        return self._sides.setdefault(torch.device("cuda", index), SideStream(index, stream.cuda_stream, stream))

    def of_current_device(self) -> torch.cuda.Stream:
        require_state(torch.cuda.is_available(), "there is no CUDA device, and no stream on CPUs")
        stream: torch.cuda.Stream = self.side(torch.device("cuda", torch.cuda.current_device())).stream
        return stream

    @staticmethod
    def _follow(stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        """stream waits for what before has by now."""
        if not order_streams(before.device_index, stream.cuda_stream, before.cuda_stream):
            EventHandle(before).wait_on(stream)

    def run(
        self,
        device: torch.device,
        work: Callable[..., Result],
        arguments: tuple[Any, ...],
        previous_event: Event,
        is_async: bool,
        further_event: Event = None,
    ) -> tuple[Result, EventOverlap]:
        """What work(*arguments) returns, and the event of its end: empty unless is_async.

        previous_event: instead of what the current stream has by now; further_event: beside either. Tensors of the
        arguments and of the result are not reused while the work runs.
        """
        if previous_event is None and further_event is None and not is_async:
            return work(*arguments), no_event()
        event = handle_of(previous_event)
        further = handle_of(further_event, "previous_event_before_epilogue")
        if event is None and further is None and not is_async:
            return work(*arguments), no_event()
        if device.type != "cuda":  # work refuses others than CPUs
            return work(*arguments), EventOverlap(EventHandle() if is_async else None)
        index = index_of(device)
        current, own = current_stream(index), self.side(torch.device("cuda", index)).stream
        if event is not None and event.is_on_stream:
            event.wait_on(own)
        else:
            self._follow(own, current)
        if further is not None:
            further.wait_on(own)
        try:
            result = run_on(own, work, *arguments)
        except BaseException:
            self._follow(current, own)  # a capture must not end while the other stream is apart
            raise
        touched, made = tuple(tensors_in(arguments)), tuple(tensors_in(result))
        is_captured = torch.cuda.is_current_stream_capturing()
        if not is_captured:
            for tensor in made:  # on the other stream, for this one
                tensor.record_stream(current)
        if is_async:
            event_after = EventOverlap(EventHandle(own), [*touched, *made])
            if not is_captured:
                event_after.kept = Kept(touched, current.cuda_stream, own)
            return result, event_after
        self._follow(current, own)
        return result, no_event()
