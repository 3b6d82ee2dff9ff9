# SPDX-License-Identifier: Apache-2.0
"""EventHandle and EventOverlap: what a call waits for, and what its caller waits for.

On CPUs a call has finished when it returns, so there both do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossdock.deep_ep.errors import require_state
from crossdock.deep_ep.streams import current_stream


# By device, of handles that are gone. A wait is for what was recorded when it began, so events are used again.
_free: dict[int, list[torch.cuda.Event]] = {}


class EventHandle:
    """An event on the stream that was current when it was made; without CUDA, or before its first use, nothing."""

    event: torch.cuda.Event | None = None
    device_index = 0

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """stream: another than the current one."""
        if stream is None and torch.cuda.is_initialized():
            stream = current_stream(torch.cuda.current_device())
        if stream is not None:
            self.device_index = stream.device_index
            try:  # threads share them
                self.event = _free[self.device_index].pop()
            except (KeyError, IndexError):
                self.event = torch.cuda.Event()
            self.event.record(stream)

    def __del__(self) -> None:
        if self.event is not None:
            _free.setdefault(self.device_index, []).append(self.event)

    def current_stream_wait(self) -> None:
        """Makes the current stream wait; the CPU goes on."""
        self.wait_here()

    def wait_here(self) -> torch.cuda.Stream | None:
        """The same; the stream that waits, if there is anything to wait for."""
        if self.event is None:
            return None
        stream = current_stream(torch.cuda.current_device())
        self.event.wait(stream)
        return stream


class Kept:
    """Tensors of torch that another stream than their own uses, until the stream of their call has waited for that one.

    Whoever does not wait leaves it to torch, which then asks the other stream before it reuses the memory.
    """

    __slots__ = ("current", "has_waited", "other", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], current: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        self.tensors, self.current, self.other, self.has_waited = tensors, current, other, False

    def __del__(self) -> None:
        if not self.has_waited:
            for tensor in self.tensors:
                tensor.record_stream(self.other)


class EventOverlap:
    """The end of a call that its caller did not want to wait for.

    event: None where there is nothing to wait for. extra_tensors: kept alive until the wait.
    """

    # What calls without an event leave as it is: C++ makes theirs without a constructor.
    event: EventHandle | None = None
    extra_tensors: Sequence[Any] | None = None
    kept: Kept | None = None

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[Any] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, then calls the registered hook, once."""
        require_state(self.event is not None, "event is None: the call that returned it was not asynchronous")
        assert self.event is not None
        stream = self.event.wait_here()
        if self.kept is not None and stream is self.kept.current:
            self.kept.has_waited = True
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None
            self.extra_tensors = None
            self.kept = None

    def register_hook_after_wait(self, hook: Callable[[], None]) -> None:
        """The function is called at the end of the next current_stream_wait."""
        require_state(self._hook is None, "a hook is registered already: one is allowed")
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """with event(release_handle=True): ... waits behind the block, and lets go."""
        self._releases = release_handle
        return self

    _releases = False
    _hook: Callable[[], None] | None = None

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._releases)


def handle_of(event: EventHandle | EventOverlap | None) -> EventHandle | None:
    """The event to wait for, if there is one."""
    return event.event if isinstance(event, EventOverlap) else event
