# SPDX-License-Identifier: Apache-2.0
"""EventHandle and EventOverlap: what a call waits for, and what its caller waits for.

On CPUs a call has finished when it returns, so both do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossdock._core import Kept, StreamEvent, current_stream_address
from crossdock.copies import Uncopied
from crossdock.deep_ep.checks import refuse, refuse_state, require_state

__all__ = ["EventHandle", "EventOverlap"]

_known_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and address


def current_stream(index: int) -> torch.cuda.Stream:
    """Of a CUDA device; the same stream is the same object, since torch makes one on every call."""
    key = index, current_stream_address(index)
    stream = _known_streams.get(key)
    if stream is None:
        stream = _known_streams.setdefault(key, torch.cuda.current_stream(index))
    return stream


class EventHandle(StreamEvent):
    """An event on the stream that was current when it was made; without CUDA, or before its first use, nothing."""

    _remedy = "an event is waited for where its call was made"
    __reduce_ex__ = Uncopied.__reduce_ex__  # a class of C++ has one base

    by_torch: torch.cuda.Event | None = None  # where the driver is not to be had

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """stream: default the current one."""
        super().__init__()
        if stream is None and torch.cuda.is_initialized():
            stream = current_stream(torch.cuda.current_device())
        if stream is not None and not self.record(stream.device_index, stream.cuda_stream):
            self.by_torch = torch.cuda.Event()
            self.by_torch.record(stream)

    @property
    def is_on_stream(self) -> bool:
        """Whether there is anything to wait for."""
        return self.is_recorded or self.by_torch is not None

    def current_stream_wait(self) -> None:
        """Makes the current stream wait, without blocking the CPU."""
        self.wait_here()

    def wait_here(self) -> int | None:
        """The same; the address of the stream that waits, if there is anything to wait for."""
        waiting = self.wait_current()
        if waiting is None and self.is_on_stream:
            stream = current_stream(torch.cuda.current_device())
            self.wait_on(stream)
            waiting = stream.cuda_stream
        return waiting

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Makes that stream wait."""
        if self.by_torch is not None:
            self.by_torch.wait(stream)
        elif not self.wait(stream.cuda_stream):
            stream.query()  # torch gives this thread the device's context
            require_state(self.wait(stream.cuda_stream), "the stream does not wait for the event: CUDA's driver fails")


class EventOverlap(Uncopied):
    """The end of an asynchronous call.

    event: None where there is nothing to wait for. extra_tensors: kept alive until the wait.
    """

    _remedy = "an event is waited for where its call was made"

    # What calls without an event leave as it is: C++ makes theirs without a constructor.
    event: EventHandle | None = None
    extra_tensors: Sequence[Any] | None = None
    kept: Kept | None = None

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[Any] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, then calls the registered hook, once."""
        event, kept = self.event, self.kept
        if event is None:
            refuse_state("event is None: the call that returned it was not asynchronous")
        waiting = event.wait_here()
        if kept is not None and waiting is not None:
            kept.note_wait(waiting)
        hook = self._hook
        if hook is not None:
            self._hook = None
            hook()
        if release_handle:
            self.event = None
            self.extra_tensors = None
            self.kept = None

    def register_hook_after_wait(self, hook: Callable[[], None]) -> None:
        """Registers a function to call at the end of the next current_stream_wait."""
        require_state(self._hook is None, "a hook is registered already: one is allowed")
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """with event(release_handle=True): ... waits at the end of the block, and releases the tensors."""
        self._releases = release_handle
        return self

    _releases = False
    _hook: Callable[[], None] | None = None

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._releases)


def handle_of(event: EventHandle | EventOverlap | None, name: str = "previous_event") -> EventHandle | None:
    """The event to wait for, if there is one. name: of the argument."""
    if event is None or isinstance(event, EventOverlap):
        return None if event is None else event.event
    if not isinstance(event, EventHandle):
        refuse(f"{name} is of type {type(event).__name__}, expected an EventHandle, an EventOverlap or None")
    return event
