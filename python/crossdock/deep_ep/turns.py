# SPDX-License-Identifier: Apache-2.0
"""On which stream a call's work runs, what it waits for, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from crossdock._core import order_streams
from crossdock.deep_ep.events import EventHandle, EventOverlap, Kept, handle_of
from crossdock.deep_ep.streams import Result, current_stream, index_of, run_on


def overlaps(previous: EventHandle | EventOverlap | None, is_async: bool) -> bool:
    """Whether a call is for Turns.run; else its work can be done at once."""
    return is_async or (previous is not None and handle_of(previous) is not None)


class Turns:
    """The order of one Buffer's calls on a GPU, with a stream of its own for those that overlap others' work.

    A call that neither has an event to wait for nor is asynchronous runs on the caller's stream: nothing overlaps.
    """

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}  # by device
        self._events: dict[int, list[torch.cuda.Event]] = {}  # by device, that nobody waits for any more

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        index = index_of(device)
        found = self._streams.get(index)
        if found is None:
            found = self._streams[index] = torch.cuda.Stream(device, priority=-1)
        return found

    def _follow(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        """stream waits for what before has by now. A wait is for what was recorded then, so events are used again."""
        if order_streams(before.device_index, stream.cuda_stream, before.cuda_stream):
            return
        free = self._events.setdefault(before.device_index, [])
        try:  # threads may share a buffer
            event = free.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(before)
        event.wait(stream)
        free.append(event)

    def enqueue(
        self,
        device: torch.device,
        call: Callable[[int | None], Result],
        inputs: Sequence[torch.Tensor | None],
        outputs: Callable[[Result], Sequence[torch.Tensor | None]],
    ) -> tuple[Result, EventOverlap]:
        """run, asynchronously, of a call that makes tensors and enqueues its work on the stream of this address.

        So that stream need not become the current one: tensors are of the caller's, which this one follows. A call
        that returns None has not been done.
        """
        if device.type == "cpu":
            return call(None), EventOverlap(EventHandle())
        current, own = current_stream(index_of(device)), self.stream(device)
        self._follow(own, current)
        result = call(own.cuda_stream)
        if result is None:
            return result, EventOverlap()
        touched = [tensor for tensor in (*inputs, *outputs(result)) if tensor is not None]
        event = EventOverlap(EventHandle(own), touched)
        if not torch.cuda.is_current_stream_capturing():
            event.kept = Kept(touched, current, own)
        return result, event

    def run(
        self,
        device: torch.device,
        work: Callable[[], Result],
        inputs: Iterable[Any],
        outputs: Callable[[Result], Iterable[Any]],
        previous_event: EventHandle | EventOverlap | None,
        is_async: bool,
        further_event: EventHandle | EventOverlap | None = None,
    ) -> tuple[Result, EventOverlap]:
        """What work returns, and the event of its end: empty unless is_async.

        previous_event: instead of what the current stream has by now; further_event: beside either. inputs and
        outputs(result): the tensors that must not be reused while the work runs.
        """
        if device.type == "cpu":
            return work(), EventOverlap(EventHandle() if is_async else None)
        event, further = handle_of(previous_event), handle_of(further_event)
        if event is None and further is None and not is_async:
            return work(), EventOverlap()
        current, own = current_stream(index_of(device)), self.stream(device)
        if event is not None and event.event is not None:
            event.event.wait(own)
        else:
            self._follow(own, current)
        if further is not None and further.event is not None:
            further.event.wait(own)
        result = run_on(own, work)
        touched = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
        made = [tensor for tensor in outputs(result) if isinstance(tensor, torch.Tensor)]
        is_captured = torch.cuda.is_current_stream_capturing()
        if not is_captured:
            for tensor in made:  # on the other stream, for this one
                tensor.record_stream(current)
        if is_async:
            event_after = EventOverlap(EventHandle(own), [*touched, *made])
            if not is_captured:
                event_after.kept = Kept(touched, current, own)
            return result, event_after
        self._follow(current, own)
        return result, EventOverlap()
