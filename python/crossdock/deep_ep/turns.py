# SPDX-License-Identifier: Apache-2.0
"""On which stream a call's work runs, what it waits for, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from crossdock.deep_ep.events import EventHandle, EventOverlap, handle_of

Result = TypeVar("Result")


class Turns:
    """The order of one Buffer's calls on a GPU, with a stream of its own for those that overlap others' work.

    A call that neither has an event to wait for nor is asynchronous runs on the caller's stream: nothing overlaps.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return self._streams[device]

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
        current, own = torch.cuda.current_stream(device), self.stream(device)
        with torch.cuda.stream(own):
            if event is not None and event.event is not None:
                own.wait_event(event.event)
            else:
                own.wait_stream(current)
            if further is not None and further.event is not None:
                own.wait_event(further.event)
            result = work()
            finished = EventHandle()
        touched = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
        made = [tensor for tensor in outputs(result) if isinstance(tensor, torch.Tensor)]
        if not torch.cuda.is_current_stream_capturing():
            for tensor in touched:
                tensor.record_stream(own)
            for tensor in made:
                tensor.record_stream(current)
        if is_async:
            return result, EventOverlap(finished, [*touched, *made])
        finished.current_stream_wait()
        return result, EventOverlap()
