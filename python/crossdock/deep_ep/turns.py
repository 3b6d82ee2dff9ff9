# SPDX-License-Identifier: Apache-2.0
"""The stream that a call's work runs on, what it waits for, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from crossdock._core import Kept, SideStream, order_streams
from crossdock.deep_ep.events import EventHandle, EventOverlap, handle_of
from crossdock.deep_ep.streams import Result, current_stream, index_of, run_on


def overlaps(
    previous: EventHandle | EventOverlap | None, is_async: bool, name: str = "previous_event"
) -> bool:
    """Whether a call is for Turns.run; else its work can be done at once. name: of the event's argument."""
    return (previous is not None and handle_of(previous, name) is not None) or is_async


class Turns:
    """The order of one Buffer's calls on a GPU, with a stream of its own for those that overlap others' work.

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

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        found: torch.cuda.Stream = self.side(torch.device("cuda", index_of(device))).stream
        return found

    @staticmethod
    def _follow(stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        """stream waits for what before has by now."""
        if not order_streams(before.device_index, stream.cuda_stream, before.cuda_stream):
            EventHandle(before).wait_on(stream)

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
        event, further = handle_of(previous_event), handle_of(further_event, "previous_event_before_epilogue")
        if event is None and further is None and not is_async:
            return work(), EventOverlap()
        current, own = current_stream(index_of(device)), self.stream(device)
        if event is not None and event.is_on_stream:
            event.wait_on(own)
        else:
            self._follow(own, current)
        if further is not None:
            further.wait_on(own)
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
                event_after.kept = Kept(tuple(touched), current.cuda_stream, own)
            return result, event_after
        self._follow(current, own)
        return result, EventOverlap()
